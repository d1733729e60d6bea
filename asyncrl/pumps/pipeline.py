"""What the pumps share: the rooms behind their ports, the edges between the pumps, and the book of live groups.

Used from the loop thread only. The book is the one place that gives a group's slot back before training, so that every
admitted group ends exactly once whichever pump notices first that it cannot be trained (invariant 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import RewardPenalty
from asyncrl.config.schema import Config
from asyncrl.data.stash import Stash
from asyncrl.ports import Engine, Environment, Ledger, Reward, Trainer, WeightSink
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queue import QueueSender
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


@dataclass(frozen=True, slots=True)
class StepReport:
    """One committed step, as `Runtime.steps()` yields it."""

    version: int
    result: StepResult
    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    advantages: Mapping[int, npt.NDArray[np.float64]]  # by group id, [G]


async def hand_on(edge: QueueSender[T], item: T) -> None:
    """`edge.put(item)`. Where the next pump is gone because all are being cancelled, that is the reason, not the closed end."""
    try:
        await edge.put(item)
    except anyio.BrokenResourceError:
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the stash keeps beside the trajectories of a group: its slot and its prompt."""

    ticket: Ticket
    prompt: Prompt


class GroupBook:
    """Tickets of the groups that are live on this rank: admitted, not yet claimed by a step."""

    def __init__(self, ledger: Ledger, stash: Stash[Admitted]) -> None:
        self._ledger = ledger
        self._stash = stash
        self._tickets: dict[int, Ticket] = {}
        self.reasons: Counter[str] = Counter()
        self.failed = 0

    def open(self, ticket: Ticket) -> None:
        self._tickets[ticket.group_id] = ticket

    def claimed(self, ticket: Ticket) -> None:
        del self._tickets[ticket.group_id]

    def add(self, ticket: Ticket, prompt: Prompt, trajectory: Trajectory) -> Group | None:
        """One scored trajectory into the stash. Its group, if that is whole now. Errors: StashRefused."""
        whole = self._stash.add(trajectory, Admitted(ticket, prompt)).whole
        return None if whole is None else Group(whole.context.ticket, whole.context.prompt, whole.trajectories)

    async def end(self, group_id: int, outcome: Literal["dropped", "failed"], reason: str) -> bool:
        """Give the slot back and forget the rows. False if the group had ended, or was claimed, before."""
        ticket = self._tickets.pop(group_id, None)  # before the await: two callers cannot both end it
        if ticket is None:
            return False
        self._stash.discard(group_id)
        self.reasons[f"{outcome}: {reason}"] += 1
        self.failed += outcome == "failed"
        await self._ledger.end(ticket, outcome, reason)
        return True

    async def end_all(self, reason: str) -> int:
        ended = [await self.end(group_id, "dropped", reason) for group_id in list(self._tickets)]
        return sum(ended)

    def live(self) -> list[int]:
        return sorted(self._tickets)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._tickets


@dataclass(slots=True)
class Rooms:
    """Every port, as the pumps see them."""

    config: Config
    recorder: Recorder
    ledger: Ledger
    stash: Stash[Admitted]
    engine: Engine
    environment: Environment
    reward: Reward
    trainer: Trainer
    sinks: Sequence[WeightSink]
    loss: Loss
    advantage: Estimator
    book: GroupBook
    ranks: int = 1
    score_groups: bool = False  # all members of a group in one call of the reward functions, once the last one is done
    weights: Mapping[str, float] = field(default_factory=dict)  # of reward components, by name; 1 where none is given
    reward_penalty: RewardPenalty | None = None  # KL to the reference, taken off the rewards
    counters: Counter[str] = field(default_factory=Counter)
