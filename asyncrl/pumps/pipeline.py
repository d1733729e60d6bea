"""What the pumps share: the ports of a rank, and what travels over the edges that `graph.py` draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import RewardPenalty
from asyncrl.config.schema import Config
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import Store
from asyncrl.ports import Engine, Environment, Ledger, Reward, Trainer, WeightSink
from asyncrl.records.check import Limits
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Group, Prompt, StepResult, Ticket, Trajectory

from .book import GroupBook, GroupIds
from .hooks import Hooks, StoreWatch

T = TypeVar("T")

# A round of microbatches that all ranks of a sharded model run together. Takes whether this rank is finishing its step; returns
# whether every rank is and nothing is left to run.
Round: TypeAlias = Callable[[bool], Awaitable[bool]]


class Gather(Protocol):
    """The parts of all ranks, in rank order: a collective, of what `metrics.packed` can send."""

    async def __call__(self, part: T) -> list[T]:
        """Every rank's part; all ranks call it, in the same order."""
        ...


async def alone(part: T) -> list[T]:
    """The gathering of a run with one rank."""
    return [part]


@dataclass(slots=True)
class Ports:
    """Everything of one rank behind its ports. Each pump takes it whole."""

    config: Config
    recorder: Recorder
    ledger: Ledger
    store: Store
    engine: Engine
    environment: Environment
    reward: Reward
    trainer: Trainer
    sinks: Sequence[WeightSink]
    loss: Loss
    advantage: Estimator
    book: GroupBook
    ids: GroupIds
    ranks: int = 1
    rank: int = 0
    gather: Gather = alone
    # Of a trainer whose microbatches are collectives.
    round: Round | None = None
    # Whether the run has reward functions or models.
    scores: bool = True
    # Calls of reward functions that may be under way; None: one for each worker.
    calls_at_once: int | None = None
    # All members of a group are scored in one call of the reward functions, once the last one is played.
    score_groups: bool = False
    # Of reward components, by name; 1 where none is given.
    weights: Mapping[str, float] = field(default_factory=dict)
    # The KL to the reference that is taken off the rewards.
    reward_penalty: RewardPenalty | None = None
    replay: ReplayBuffer | None = None
    hooks: Hooks = field(default_factory=Hooks)
    store_watch: StoreWatch | None = None
    # Of trajectories from anywhere.
    limits: Limits = field(default_factory=Limits)
    counters: Counter[str] = field(default_factory=Counter)
    # The kinds of failed episodes that were logged.
    logged: set[tuple[str, str]] = field(default_factory=set)
    # Shows a line to people, on the live view.
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Scoring:
    """From the rollout pump to the score pump (edge 3): one trajectory, or a whole group in member order."""

    ticket: Ticket
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Publication:
    """From the train pump to the publish pump (edge 6). `turn`: of the step whose slots are released."""

    turn: int
    version: int


@dataclass(frozen=True, slots=True, repr=False)
class StepReport:
    """One committed step, as `Runtime.steps()` yields it. Its representation is one line, however many tokens it has.

    `advantages`: by group id, [G].
    """

    version: int
    result: StepResult
    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    advantages: Mapping[int, npt.NDArray[np.float64]]

    def __repr__(self) -> str:
        reward = self.metrics.get("reward/mean")
        mean = "" if reward is None else f"reward={reward:.4g}, "
        sizes = f"groups={len(self.groups)}, tokens={self.result.tokens}, metrics={len(self.metrics)}"
        return f"StepReport(version={self.version}, {mean}loss={self.result.loss:.4g}, {sizes})"


async def hand_on(edge: QueueSender[T], item: T) -> None:
    """`edge.put(item)`. Where the next pump is gone because all are being cancelled, the cancellation is raised, not the
    closed end."""
    try:
        await edge.put(item)
    except anyio.BrokenResourceError:
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise
