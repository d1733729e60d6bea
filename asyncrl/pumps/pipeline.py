"""What the pumps share: the ports of a rank, and the items on the edges of `graph.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.kl import Kl
from asyncrl.config.resolve import versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import Store
from asyncrl.ports import Engine, Environment, Ledger, Reward, Trainer, WeightSink
from asyncrl.records.check import Limits
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Group, StepResult

from .book import GroupBook, GroupIds
from .hooks import Hooks

T = TypeVar("T")

# Runs one round: microbatches that all ranks of a sharded model run together. Argument: whether this rank is finishing its step.
# Result: whether all ranks are finishing and no rank has a microbatch left.
Round: TypeAlias = Callable[[bool], Awaitable[bool]]


class Gather(Protocol):
    """A collective that returns the parts of all ranks in rank order. `metrics.encode_part` must be able to encode a part."""

    async def __call__(self, part: T) -> list[T]:
        """All ranks must make these calls in the same order."""
        ...


async def gather_alone(part: T) -> list[T]:
    """`Gather` for a run with one rank."""
    return [part]


@dataclass(slots=True)
class Ports:
    """The ports and shared objects of one rank. Each pump takes the whole object."""

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
    # `turn_of` counts versions from this version. Below 0 after a resume from a checkpoint that was written within a batch: that
    # batch made fewer versions than a whole batch.
    base: int = 0
    # This rank, the number of ranks that build steps, and the number of this rank among them; 0 on other ranks. Siblings
    # (`distributed.context`) count once: their leader builds steps for them.
    rank: int = 0
    ranks: int = 1
    train_rank: int = 0
    # Number of ranks that generate.
    generating: int = 1
    # The role of this rank. `builds_steps`: the rank builds steps and trains them. `follows`: the rank trains the steps that the
    # leader of its siblings builds.
    builds_steps: bool = True
    generates: bool = True
    follows: bool = False
    gather: Gather = gather_alone
    # Set for a trainer whose microbatches are collectives.
    round: Round | None = None
    # Whether the run has reward functions or models.
    scores: bool = True
    # Calls of reward functions that may run at a time; None: one for each worker.
    calls_at_once: int | None = None
    # Whether one call of the reward functions scores all members of a group, after its last episode.
    score_groups: bool = False
    # Name of a reward component -> weight; a component that is not listed has weight 1.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Computes the KL to the reference, which is subtracted from the rewards.
    reward_penalty: Kl | None = None
    replay: ReplayBuffer | None = None
    hooks: Hooks = field(default_factory=Hooks)
    # Sends a scored group to a training rank. None: the groups of this rank stay here.
    depart: Callable[[Group], None] | None = None
    # Limits for trajectories from every source.
    limits: Limits = field(default_factory=Limits)
    # The kinds of failed episodes that were logged.
    logged: set[tuple[str, str]] = field(default_factory=set)
    # Shows a line to the user, in the live view.
    note: Callable[[str], None] = lambda text: None

    @property
    def alone(self) -> bool:
        """Whether no other rank trains."""
        return self.ranks == self.config.distributed.context == 1

    def turn_of(self, version: int) -> int:
        """The number of turns of the ledger whose steps made the weights of `version`."""
        return (version - self.base) // versions_per_batch(self.config)


@dataclass(frozen=True, slots=True)
class Publication:
    """From the train pump to the publish pump (edge 6). `turn`: turn of the step whose slots are released."""

    turn: int
    version: int


@dataclass(frozen=True, slots=True, repr=False)
class StepReport:
    """One committed step, as `Runtime.steps()` yields it. `advantages`: group id -> [G]. `repr` is one line."""

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


async def put_item(edge: QueueSender[T], item: T) -> None:
    """`edge.put(item)`. If all pumps are being cancelled and the receiver is already closed, raises the cancellation instead of the
    error of the closed edge."""
    try:
        await edge.put(item)
    except anyio.BrokenResourceError:
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise
