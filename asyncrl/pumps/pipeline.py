"""What travels between the pumps, over the edges that `graph.py` draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Group, Prompt, StepResult, Ticket, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scoring:
    """What travels from the rollout pump to the score pump (edge 3): one trajectory, or a whole group in member order."""

    ticket: Ticket
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Publication:
    """What travels from the train pump to the publish pump (edge 6)."""

    turn: int  # of the step whose slots are released
    version: int


@dataclass(frozen=True, slots=True, repr=False)
class StepReport:
    """One committed step, as `Runtime.steps()` yields it. Its representation is one line, however many tokens it has."""

    version: int
    result: StepResult
    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    advantages: Mapping[int, npt.NDArray[np.float64]]  # by group id, [G]

    def __repr__(self) -> str:
        reward = self.metrics.get("reward/mean")
        said = "" if reward is None else f"reward={reward:.4g}, "
        sizes = f"groups={len(self.groups)}, tokens={self.result.tokens}, metrics={len(self.metrics)}"
        return f"StepReport(version={self.version}, {said}loss={self.result.loss:.4g}, {sizes})"


async def hand_on(edge: QueueSender[T], item: T) -> None:
    """`edge.put(item)`. Where the next pump is gone because all are being cancelled, that is the reason, not the closed end."""
    try:
        await edge.put(item)
    except anyio.BrokenResourceError:
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise
