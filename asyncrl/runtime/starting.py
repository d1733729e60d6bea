"""What a run shows before its first step, which on a slow machine is minutes away: a stage and its counts."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from asyncrl.pumps.graph import Graph
from asyncrl.pumps.pipeline import Ports

Say = Callable[[str], None]  # `LiveView.status`
_EVERY_S = 1.0


async def show_first_step(ports: Ports, graph: Graph, say: Say) -> None:
    """Say every second how far the first evaluation and the first step are, until that step is committed."""
    start = ports.trainer.version
    while ports.trainer.version == start:
        say(progress(ports, graph))
        await anyio.sleep(_EVERY_S)


def progress(ports: Ports, graph: Graph) -> str:
    """A stage, a colon and counts, the main one first: a narrow terminal cuts the rest off. Groups are those of all ranks,
    completions and tokens those of this one."""
    tokens = f"{ports.engine.statistics().get('tokens', 0.0):,.0f} tokens sampled"
    if graph.evaluating is not None:
        done, total = graph.evaluating
        return f"evaluating: {done}/{total} completions, {tokens}"
    claimed, groups = ports.ledger.statistics().claimed, ports.config.rollout.groups_per_step
    return f"first step: {claimed}/{groups} groups in training, {graph.scored:,.0f} completions scored, {tokens}"
