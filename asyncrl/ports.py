"""The small Protocols through which sibling rooms know each other. No torch here.

    rollout pump --> Environment --> Engine          score pump --> Reward
    train pump   --> Ledger, Trainer                 publish pump --> WeightSink

Each has at least two implementations (a real one and a dry-run one) and one contract test suite.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from .types import (
    ClaimState,
    Float32Array,
    Generation,
    GenerationRequest,
    LedgerStatistics,
    Microbatch,
    Prompt,
    StepResult,
    Ticket,
    Trajectory,
)

Generate: TypeAlias = Callable[[GenerationRequest], Awaitable[Generation]]


@runtime_checkable
class Engine(Protocol):
    """Samples tokens. One owner task inside; `generate` may be called from any task of the loop.

    `async with engine:` opens and closes it; closing fails every waiting request with `EngineClosed`.
    """

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *exc: object) -> bool | None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one sequence. Cancelling the caller aborts it. Errors: `GenerationError`, `EngineClosed`."""
        ...

    def statistics(self) -> dict[str, float]:
        """`running`, `waiting`, `tokens` (sampled so far), `decode_steps`, ..."""
        ...


class PinnedVersion(Protocol):
    """A version that a part of an engine stays at, while the rest goes on to later ones."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `Engine.generate`, every token from that version, as long as the pin has not ended."""
        ...

    def end(self) -> None:
        """That part goes on, too. Twice is fine."""
        ...


@runtime_checkable
class PinsVersions(Protocol):
    """An engine that may have a part to spare."""

    async def pin(self, version: int) -> PinnedVersion | None:
        """Requests of the pin alone go to that part from now on. None: there is none to spare, or not all are at `version`."""
        ...


@runtime_checkable
class WeightSink(Protocol):
    """Somebody who must know version v before the slots of its step are released."""

    async def update_weights(self, version: int) -> None:
        """Returns once every token sampled from now on comes from `version` or a later one, but for those of a pin."""
        ...


@runtime_checkable
class SettlingSink(WeightSink, Protocol):
    """One whose weights lie where a pinned version may be in the way of the next one."""

    async def settled(self) -> None:
        """Returns once the trainer has room for its next version."""
        ...


class Environment(Protocol):
    """Plays one episode. The trajectory comes back without reward unless the environment gives one itself."""

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Generate) -> Trajectory:
        """Play member `member` of `group_size` for `prompt`; `generate` samples a completion, as often as there are rounds."""
        ...


class Reward(Protocol):
    """Scores trajectories off the loop. Who makes it opens and closes what is behind it."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same trajectories with `reward` and `components` set. Errors: `RewardError` as the policy says."""
        ...


class Trainer(Protocol):
    """The split train step on one rank. One step open at most; calls are served in order.

    | call     | closed                    | open                                              |
    |----------|---------------------------|---------------------------------------------------|
    | begin    | opens                     | TrainStepError "already open", state unchanged    |
    | micro    | TrainStepError            | accumulates, returns None                         |
    | finish   | TrainStepError            | reduces, steps, closes, returns the result        |
    | abort    | no-op                     | zeroes gradients, closes; weights untouched       |

    A cancelled caller does not cancel the work on the lane: `abort_train_step` queues behind it.
    """

    @property
    def version(self) -> int:
        """The policy version: optimizer steps behind the weights."""
        ...

    async def begin_train_step(self, loss: Any) -> None:
        """`loss` is an `algorithms.base.Loss`."""
        ...

    async def train_microbatch(self, batch: Microbatch) -> None:
        """Forward and backward; the gradient is added to that of the open step."""
        ...

    async def finish_train_step(self) -> StepResult:
        """Divide by the true counts of all ranks, step the optimizer, move to the next version. With several ranks a
        collective. Errors, all before a weight moves: `TrainStepError` for a step without sequences, `DivergenceError` for a
        loss or gradient that is not finite, and for log-probs of the sampler beyond `algorithm.mismatch_gate`."""
        ...

    async def abort_train_step(self) -> None:
        """Forget what the open step added up. Without an open step: nothing."""
        ...

    async def compute_logprobs(
        self, batch: Microbatch, model: Literal["policy", "reference"] = "policy"
    ) -> Float32Array:
        """Log-probs [S] of the scored tokens at the batch's temperatures, without gradient; leaves gradients alone."""
        ...

    async def survey(self, loss: Any, batches: Sequence[Microbatch]) -> tuple[Any, list[Microbatch]]:
        """Where `loss.needs_whole_step`, and no step is streamed: loss and microbatches of this step with what they have
        to know of all ranks' microbatches. Before begin, on every rank, one without microbatches too: a collective."""
        ...


class Ledger(Protocol):
    """Admits groups and hands them to optimizer steps, for one rank or a thousand.

    A *turn* is one batch: the policy version where `updates_per_batch` is 1. The reservation rule: a ready group
    gets a place in turn `v` only if afterwards, for every j >= 0, the live groups with deadline <= v + j still fit
    into the places left up to then. See `distributed/ledger.py` for the proof.
    """

    @property
    def turn(self) -> int:
        """The turn of the open step: steps that this rank has committed, those before a resume included."""
        ...

    @property
    def first_turn(self) -> int:
        """The turn at which this ledger was made: 0, or the one a resumed run goes on from."""
        ...

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        """Wait for a slot. `oldest` (a version) stamps a group that was sampled elsewhere; None for a fresh one.

        None comes back where such a group is too old to be trained in time without dropping another one.
        """
        ...

    def due(self) -> int:
        """Fresh groups that this rank gets slots for without waiting for anybody, as its share of the open step; 0 where ranks
        have no shares, and any slot may be waited for."""
        ...

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        """Ask for a place for the first of `ready` that may have one now. Never waits for other groups."""
        ...

    async def wait_changed(self, seen: int) -> int:
        """Return once anything changed since the change number `seen` (admission, end, commit, release); the new one."""
        ...

    @property
    def changes(self) -> int:
        """The number of the last change: what `wait_changed` takes as `seen`."""
        ...

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        """Give an unclaimed group's slot back at once."""
        ...

    async def exhaust(self) -> None:
        """This rank admits no more: once every rank said so, a step whose last live group was claimed counts as full."""
        ...

    @property
    def finished(self) -> bool:
        """Every rank is exhausted and no group is left to train."""
        ...

    def expired(self) -> list[Ticket]:
        """Live groups of this rank past their deadline (`late: drop` only); the caller ends them."""
        ...

    def describe(self) -> str:
        """One sentence for a stalled run: the open step and whom it waits for."""
        ...

    def elsewhere(self) -> str | None:
        """A few words on the group that the open step waits for, where that is another rank's. From any thread."""
        ...

    def live_groups(self) -> list[Ticket]:
        """This rank's groups that were admitted and not trained, those of the open step included, by group id."""
        ...

    def committed_elsewhere(self) -> list[Ticket]:
        """Those of `live_groups` that are in a step which another rank has committed and this one has not."""
        ...

    def last_step(self, rank: int) -> list[int]:
        """Ids of the groups that this rank (any, also one that has died) had in the step that was committed last on any rank."""
        ...

    async def commit(self) -> int:
        """The open step was applied: next turn. Returns its number. The slots stay held until `release`."""
        ...

    async def rollback(self) -> list[Ticket]:
        """The open step was aborted: its claimed groups are live again. Returns their tickets (of this rank)."""
        ...

    async def release(self, turn: int) -> None:
        """Every engine acknowledged the weights that follow `turn`: the slots of that step are free."""
        ...

    def statistics(self) -> LedgerStatistics:
        """A snapshot of the books."""
        ...
