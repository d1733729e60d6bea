"""What the pumps share: the ports of a rank, and the publication and the report of a committed step."""

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

# Runs one round: microbatches that all ranks of a sharded model run together. Argument: whether this rank has added the last
# microbatch of its step. Result: whether all ranks have added their last microbatch, and all microbatches have run.
Round: TypeAlias = Callable[[bool], Awaitable[bool]]


class Gather(Protocol):
    """A collective of the ranks that build steps. Returns their parts in rank order. `metrics.encode_part` encodes each part."""

    async def __call__(self, part: T) -> list[T]:
        """All these ranks must make the calls in the same order."""
        ...


async def gather_alone(part: T) -> list[T]:
    """`Gather` if no other rank builds steps, and on a rank that builds none."""
    return [part]


@dataclass(slots=True)
class Ports:
    """The ports and shared objects of one rank, for its pumps."""

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
    # The version at turn 0. Below 0 after a resume if an earlier batch ended before its last optimizer step: that batch counts as a
    # turn, but made fewer versions than a whole batch.
    base: int = 0
    # Index of this rank among all ranks of the run, from 0.
    rank: int = 0
    # How many ranks build steps. Of the ranks that share sequences (`distributed.context`) only the leader builds steps.
    ranks: int = 1
    # Index of this rank among the ranks that build steps, from 0; 0 on a rank that builds none.
    train_rank: int = 0
    # How many ranks generate.
    generating: int = 1
    # The role of this rank. `builds_steps`: the rank builds steps and trains them. `follows`: the rank is a sibling, which trains
    # the steps that its leader builds.
    builds_steps: bool = True
    generates: bool = True
    follows: bool = False
    gather: Gather = gather_alone
    # None: this rank runs its microbatches without rounds.
    round: Round | None = None
    # Whether the run has reward functions or reward models.
    scores: bool = True
    # Calls of reward functions that may run at the same time; None: one for each worker.
    calls_at_once: int | None = None
    # Whether one call of the reward functions scores all members of a group, after its last episode.
    score_groups: bool = False
    # Name of a reward component -> weight; a component that is not listed has weight 1.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Computes the KL to the reference model. The KL is subtracted from the rewards. None: nothing is subtracted.
    reward_penalty: Kl | None = None
    replay: ReplayBuffer | None = None
    hooks: Hooks = field(default_factory=Hooks)
    # Sends a scored group to a training rank. None: the groups of this rank stay here.
    depart: Callable[[Group], None] | None = None
    # Limits for trajectories from every source.
    limits: Limits = field(default_factory=Limits)
    # The logged failures of episodes, each as (class of the error, file:line).
    logged: set[tuple[str, str]] = field(default_factory=set)
    # Prints a line for the user, above the live view.
    note: Callable[[str], None] = lambda text: None

    @property
    def trains_alone(self) -> bool:
        """Whether no other rank trains."""
        return self.ranks == self.config.distributed.context == 1

    def turn_of(self, version: int) -> int:
        """The number of whole turns (batches) that the weights of `version` were trained on."""
        return (version - self.base) // versions_per_batch(self.config)


@dataclass(frozen=True, slots=True)
class Publication:
    """For the publish pump (edge 6 of graph.py): the step of `turn` made `version`. The publish pump releases the step's slots."""

    turn: int
    version: int


@dataclass(frozen=True, slots=True, repr=False)
class StepReport:
    """One committed step, which made `version`. `Runtime.steps()` yields it. `advantages`: group id -> [G]. `repr` is one line."""

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
