"""What a run shows before its first step, which on a slow machine is minutes away: a stage and its counts."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from asyncrl.pumps.graph import Graph
from asyncrl.pumps.wiring import Rooms

Say = Callable[[str], None]  # `LiveView.status`
_EVERY_S = 1.0


async def show_first_step(rooms: Rooms, graph: Graph, say: Say) -> None:
    """Say every second how far the first evaluation and the first step are, until that step is committed."""
    start = rooms.trainer.version
    while rooms.trainer.version == start:
        say(progress(rooms, graph))
        await anyio.sleep(_EVERY_S)


def progress(rooms: Rooms, graph: Graph) -> str:
    """A stage, a colon and counts, the main one first: a narrow terminal cuts the rest off. Groups are those of all ranks,
    completions and tokens those of this one."""
    tokens = f"{rooms.engine.statistics().get('tokens', 0.0):,.0f} tokens sampled"
    if graph.evaluating is not None:
        done, total = graph.evaluating
        return f"evaluating: {done}/{total} completions, {tokens}"
    claimed, groups = rooms.ledger.statistics().claimed, rooms.config.rollout.groups_per_step
    return f"first step: {claimed}/{groups} groups in training, {graph.scored:,.0f} completions scored, {tokens}"
