"""What the pumps share: the rooms behind their ports, the edges between the pumps, and the book of live groups.

Used from the loop thread only. The book is the one place that gives a group's slot back before training, so that every
admitted group ends exactly once whichever pump notices first that it cannot be trained (invariant 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import RewardPenalty
from asyncrl.config.schema import Config
from asyncrl.data.batch_meta import BatchMeta
from asyncrl.data.group_rows import put_trajectories, register_groups
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.stash import Stash
from asyncrl.data.store import Store
from asyncrl.ports import Engine, Environment, Ledger, Reward, Trainer, WeightSink
from asyncrl.records.check import Limits
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Group, Prompt, StepResult, Ticket, Trajectory

from .hooks import Hooks, StoreWatch
from .metrics import Gather, alone
from .rounds import Round

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


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the stash keeps beside the trajectories of a group: its slot and its prompt."""

    ticket: Ticket
    prompt: Prompt


class GroupBook:
    """Tickets of the groups that are live on this rank: admitted, not yet claimed by a step. And where their rows are.

    add --> stash (until whole) --> rows of the store --claimed--> the open step --trained--> cleared
              `---------- end ----------'---> cleared       open again <--abort--'
    """

    PARTITION = "rollout"
    TASK = "train"

    def __init__(self, ledger: Ledger, stash: Stash[Admitted], store: Store) -> None:
        self._ledger = ledger
        self._stash = stash
        self._store = store
        register_groups(store, self.PARTITION, (self.TASK,))
        self._rows: dict[int, BatchMeta] = {}  # of whole groups, by group id
        self._tickets: dict[int, Ticket] = {}
        self.reasons: Counter[str] = Counter()
        self.failed = 0

    def open(self, ticket: Ticket) -> None:
        self._tickets[ticket.group_id] = ticket

    def reopen(self, ticket: Ticket) -> None:
        """The step that had claimed the group was aborted: its rows can be claimed again."""
        self.open(ticket)
        if ticket.group_id in self._rows:
            self._store.unclaim(self._rows[ticket.group_id], self.TASK)

    def claimed(self, ticket: Ticket) -> None:
        del self._tickets[ticket.group_id]
        if ticket.group_id in self._rows:
            claim = self._store.claim(self.PARTITION, self.TASK, among=self._rows[ticket.group_id].ids)
            assert claim is not None, f"the rows of group {ticket.group_id} were claimed before"

    def trained(self, group_ids: Iterable[int]) -> None:
        """The step of these claimed groups was applied: their rows are cleared, at once."""
        rows = [self._rows.pop(group_id) for group_id in group_ids if group_id in self._rows]
        if rows:
            self._store.clear(self.PARTITION, BatchMeta.concat(rows).ids)

    def add(self, ticket: Ticket, prompt: Prompt, trajectory: Trajectory) -> Group | None:
        """One scored trajectory into the stash. Its group, as rows of the store, if that is whole now.

        Errors: StashRefused; DataError where the columns of a trajectory do not fit together.
        """
        whole = self._stash.add(trajectory, Admitted(ticket, prompt)).whole
        if whole is None:
            return None
        rows, trajectories = put_trajectories(self._store, self.PARTITION, whole.trajectories)
        self._rows[whole.key.group_id] = rows
        return Group(whole.context.ticket, whole.context.prompt, trajectories)

    async def end(self, group_id: int, outcome: Literal["dropped", "failed"], reason: str) -> bool:
        """Give the slot back and forget the rows. False if the group had ended, or was claimed, before."""
        ticket = self._tickets.pop(group_id, None)  # before the await: two callers cannot both end it
        if ticket is None:
            return False
        self._stash.discard(group_id)
        if (rows := self._rows.pop(group_id, None)) is not None:
            self._store.clear(self.PARTITION, rows.ids)
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
    store: Store
    engine: Engine
    environment: Environment
    reward: Reward
    trainer: Trainer
    sinks: Sequence[WeightSink]
    loss: Loss
    advantage: Estimator
    book: GroupBook
    ranks: int = 1
    rank: int = 0
    gather: Gather = alone
    round: Round | None = None  # of a trainer whose microbatches are collectives (rounds.py)
    score_groups: bool = False  # all members of a group in one call of the reward functions, once the last one is done
    weights: Mapping[str, float] = field(default_factory=dict)  # of reward components, by name; 1 where none is given
    reward_penalty: RewardPenalty | None = None  # KL to the reference, taken off the rewards
    replay: ReplayBuffer | None = None
    hooks: Hooks = field(default_factory=Hooks)
    store_watch: StoreWatch | None = None
    limits: Limits = field(default_factory=Limits)  # of trajectories from anywhere
    counters: Counter[str] = field(default_factory=Counter)
