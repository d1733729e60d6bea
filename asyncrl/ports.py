"""The Protocols between packages that may not import each other. This module imports no torch.

    rollout pump --> Environment --> Engine          score pump --> Reward
    train pump   --> Ledger, Trainer                 publish pump --> WeightSink

Engine, Trainer, Ledger and WeightSink have several implementations, some of them for dry runs.
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
    """Samples tokens. `generate` may be called from any task of the event loop.

    `async with engine:` opens and closes the engine. Closing fails every unfinished request with `EngineClosed`.
    """

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *exc: object) -> bool | None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one sequence. Cancelling the caller aborts the request. Errors: `GenerationError`, `EngineClosed`."""
        ...

    def end_session(self, session: str) -> None:
        """Free the keys and values of a session, after its last request. May be called again, and after the engine is closed."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counts by name. Now: `running` and `waiting` requests. Since the opening: sampled `tokens`, `decode_steps`, and more."""
        ...


class PinnedVersion(Protocol):
    """One worker of an engine stays at a version, while the other workers get later versions."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """`Engine.generate` with the pinned version for every token. Must not be called after `end`."""
        ...

    def end(self) -> None:
        """Let the worker get later versions, too. Further calls do nothing."""
        ...


@runtime_checkable
class PinsVersions(Protocol):
    """An engine with several workers. An evaluation pins one of them."""

    async def pin(self, version: int) -> PinnedVersion | None:
        """Wait for the end of an earlier pin, then pin one worker to `version`. None: a newer version exists, fewer than two
        workers have `version`, or a concurrent call has pinned a worker."""
        ...


@runtime_checkable
class WeightSink(Protocol):
    """A receiver of new weights. The ledger releases the slots of a step once every sink has the weights of that step."""

    async def update_weights(self, version: int) -> None:
        """Each token that is sampled after the return has `version` or a later version, except for tokens of a pinned worker."""
        ...


@runtime_checkable
class BufferedSink(WeightSink, Protocol):
    """A sink with two buffers of weights. The trainer writes one of them while workers read the other."""

    async def wait_writable(self) -> None:
        """Returns once no worker, pinned workers included, reads the buffer that the trainer writes next."""
        ...


class Environment(Protocol):
    """Plays episodes. The trajectory has no reward unless the environment computes the reward itself."""

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Generate) -> Trajectory:
        """Play the episode of `member` (from 0) of the prompt's group. Call `generate` once for each reply of the episode."""
        ...


class Reward(Protocol):
    """Scores trajectories in other processes or threads, which the creator of the object starts and ends."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same trajectories with `reward` and `components`. Errors: `RewardError`, depending on `reward.on_error`."""
        ...


class Trainer(Protocol):
    """The train step of one rank, in several calls. At most one step is open. Calls run in the order in which they were made.

    | call                | if no step is open | if a step is open                                                  |
    |---------------------|--------------------|--------------------------------------------------------------------|
    | `begin_train_step`  | opens a step       | TrainStepError "already open", state unchanged                     |
    | `train_microbatch`  | TrainStepError     | adds gradients                                                     |
    | `finish_train_step` | TrainStepError     | all-reduces gradients, updates weights, closes the step            |
    | `abort_train_step`  | no effect          | zeroes gradients, keeps the weights, closes the step               |

    A cancelled caller does not stop work that already runs. `abort_train_step` waits for the end of that work.
    """

    @property
    def version(self) -> int:
        """The policy version: the number of finished steps. Steps before a resume, and steps whose loss has no tokens, count."""
        ...

    async def begin_train_step(self, loss: Any) -> None:
        """Open a step. `loss` is an `algorithms.base.Loss`."""
        ...

    async def train_microbatch(self, batch: Microbatch) -> None:
        """Run forward and backward, and add the gradient to the gradient of the open step."""
        ...

    async def finish_train_step(self) -> StepResult:
        """Divide the gradient by the loss's normaliser over all ranks, and step the optimizer to the next version. A collective.
        Errors leave the weights unchanged: `TrainStepError` for a step without sequences, `DataError` for unknown token ids,
        `DivergenceError` for a loss or gradient that is not finite, or a step that exceeds `algorithm.mismatch_gate`."""
        ...

    async def abort_train_step(self) -> None:
        """Drop the gradient of the open step, and close the step. Does nothing without an open step."""
        ...

    async def compute_logprobs(
        self, batch: Microbatch, model: Literal["policy", "reference"] = "policy"
    ) -> Float32Array:
        """Log-probs [S] of the tokens with loss mask 1, at the batch's temperatures. Does not change gradients of an open step."""
        ...

    async def survey(self, loss: Any, batches: Sequence[Microbatch]) -> tuple[Any, list[Microbatch]]:
        """Exchange sums over the whole step, for a loss with `needs_whole_step`. Returns the loss and the microbatches with these
        sums. A collective: each rank calls it before `begin_train_step`, even a rank without microbatches."""
        ...


class Ledger(Protocol):
    """Admits groups and gives them places in steps, for one or several ranks.

    A *turn* is the number of a batch, from 0: the policy version, if a batch takes one optimizer step. A *slot* lets one group
    exist. A *place* lets one group be trained in one step; all steps have equally many places. The reservation rule: a ready group
    gets a place in turn `v` only if, for every j >= 0, the other live groups with a deadline <= v + j fit into the places that
    remain free in the turns up to v + j. `distributed/reservation.py` has the proof.
    """

    @property
    def turn(self) -> int:
        """The turn of the open step: the number of steps that this rank has committed, steps before a resume included."""
        ...

    @property
    def first_turn(self) -> int:
        """The value of `turn` when this ledger was created: 0, or the turn of the resumed checkpoint."""
        ...

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        """Wait for a slot. `oldest`: for a group from outside, the turn of its oldest token; None for a fresh group. Returns None
        for a group from outside that is past its deadline, or that could meet its deadline only if another group were dropped."""
        ...

    def due(self) -> int:
        """How many fresh groups this rank can admit without waiting, within its share of the open step. 0 if ranks have no
        shares, or after `exhaust` on any rank."""
        ...

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        """Claim a place for the first group of `ready` that may have a place now. Does not wait for a place."""
        ...

    async def assign(self, ticket: Ticket, tokens: int) -> int:
        """The training rank that gets this group, which this rank has generated. `tokens`: the group's tokens in a forward pass."""
        ...

    async def arrive(self, ticket: Ticket, sender: int) -> bool:
        """Move a group from the rank `sender` to this rank. False: `sender` no longer has the group; discard the copy.
        A repeated call has the same result until the group is trained or dropped. Errors: LedgerError if `sender` is lost."""
        ...

    async def wait_changed(self, seen: int) -> int:
        """Wait for a change (admission, end, commit, release) after the change number `seen`. Returns the newest number."""
        ...

    @property
    def changes(self) -> int:
        """The number of the newest change, for `wait_changed`."""
        ...

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        """Release the slot of a group that is in no step. The metric `groups/OUTCOME/REASON` counts the group."""
        ...

    async def exhaust(self) -> None:
        """End the admission of this rank. After `exhaust` on all ranks, a step with the last live group counts as full."""
        ...

    @property
    def finished(self) -> bool:
        """Whether all ranks have called `exhaust` and no group is left to train."""
        ...

    def expired(self) -> list[Ticket]:
        """This rank's live groups past their deadline, which the caller must end. Empty unless `rollout.late` is `drop`."""
        ...

    def describe(self) -> str:
        """A sentence for errors of a stalled run: the open step, and the groups that the step waits for."""
        ...

    def remote_cause(self) -> str | None:
        """A text about the group that the open step waits for. None if no other rank has that group. Any thread may call this."""
        ...

    def live_groups(self, *, everywhere: bool = False) -> list[Ticket]:
        """This rank's admitted groups that are not trained yet, groups of the open step included, sorted by group id. On rank 0
        `everywhere` adds the groups of the other ranks."""
        ...

    def last_step(self, rank: int) -> list[int]:
        """Ids of the groups that `rank`, connected or lost, has in the newest step that any rank has committed. Only for rank 0."""
        ...

    async def commit(self) -> int:
        """Commit the open step after its optimizer step. Returns the next turn. The slots stay occupied until `release`."""
        ...

    async def rollback(self) -> list[Ticket]:
        """Abort the open step, and make its claimed groups live again. Returns the tickets of this rank's groups."""
        ...

    async def begin(self, turn: int) -> bool:
        """Only for a rank that joined the run: start to admit groups. Its engines must have the weights of all turns below `turn`.
        False: these weights are too old, so call `begin` again with newer weights."""
        ...

    async def release(self, turn: int) -> None:
        """Release the slots of the step `turn`. Call it after every sink has the weights of that step."""
        ...

    def statistics(self) -> LedgerStatistics:
        """A snapshot of the ledger's counts."""
        ...
