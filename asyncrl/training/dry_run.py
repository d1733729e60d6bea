"""A trainer without a model. It opens and closes steps like a real trainer, occupies the lane, and counts the tokens of a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import TrainStepError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Float32Array, Microbatch, StepResult

T = TypeVar("T")
TRACK = "trainer"
PRIORITY = 1  # decoding has 0; a higher priority runs first


class DryRunTrainer:
    """Implements `ports.Trainer`. A microbatch takes `train_token_s` seconds per packed token, the optimizer step `finish_s`.

    Metrics of a step: `dry_run/packed_tokens`, `dry_run/scored_tokens`, `dry_run/groups` (distinct), `dry_run/max_age`
    (age of the step's oldest token, in versions).
    """

    def __init__(
        self, lane: Lane, recorder: Recorder, *, train_token_s: float = 1e-5, finish_s: float = 0.01, version: int = 0
    ) -> None:
        self._lane = lane
        self._recorder = recorder
        self._train_token_s = train_token_s
        self._finish_s = finish_s
        self.version = version
        self._open: list[Microbatch] | None = None  # the microbatches of the open step
        # Waits for the other ranks before the optimizer step, like the gradient reduction of a real trainer. None: one rank.
        self.meet_ranks: Callable[[], Awaitable[object]] | None = None

    async def begin_train_step(self, loss: Any) -> None:
        """Errors: TrainStepError if a step is open already. The open step is unchanged."""

        def begin() -> None:
            if self._open is not None:
                raise TrainStepError("a train step is already open; call finish_train_step or abort_train_step first")
            self._open = []

        await self._run(begin, "begin")

    async def train_microbatch(self, batch: Microbatch) -> None:
        """Errors: TrainStepError if no step is open."""
        tokens = int(batch.tokens.size)
        await self._run(lambda: self._step().append(batch), "microbatch", self._train_token_s * tokens, tokens=tokens)

    async def finish_train_step(self) -> StepResult:
        """Errors: TrainStepError if no step is open."""
        self._step()
        if self.meet_ranks is not None:
            await self.meet_ranks()
        return await self._run(self._finish, "finish", self._finish_s)

    async def abort_train_step(self) -> None:
        """Drops the open step, if there is one."""

        def abort() -> None:
            self._open = None

        await self._run(abort, "abort")

    async def compute_logprobs(
        self, batch: Microbatch, model: Literal["policy", "reference"] = "policy"
    ) -> Float32Array:
        """The sampler's log-probs [S], whatever `model` says: this trainer has no models."""
        tokens = int(batch.tokens.size)
        cost = self._train_token_s * tokens / 3  # a forward costs a third of forward and backward
        return await self._run(batch.sampler_logprobs.copy, "logprobs", cost, tokens=tokens)

    async def survey(self, loss: Any, batches: Sequence[Microbatch]) -> tuple[Any, list[Microbatch]]:
        """Returns the arguments unchanged, because this trainer computes no loss."""
        return loss, list(batches)

    async def _run(self, fn: Callable[[], T], name: str, cost: float = 0.0, **args: Any) -> T:
        """Run `fn` on the lane, and occupy the lane for `cost` seconds."""
        with self._recorder.span(name, track=TRACK, **args):
            return await self._lane.run(fn, name=f"train/{name}", priority=PRIORITY, cost=cost)

    def _step(self) -> list[Microbatch]:
        if self._open is None:
            raise TrainStepError("no train step is open; call begin_train_step first")
        return self._open

    def _finish(self) -> StepResult:
        step = self._step()
        oldest = min((int(batch.versions.min()) for batch in step if batch.versions.size), default=self.version)
        scored = sum(batch.scored + batch.skipped_tokens for batch in step)
        metrics = {
            "dry_run/packed_tokens": float(sum(batch.tokens.size for batch in step)),
            "dry_run/scored_tokens": float(scored),
            "dry_run/groups": float(len({group for batch in step for group in batch.group_ids.tolist()})),
            "dry_run/max_age": float(self.version - oldest),
        }
        self.version, self._open = self.version + 1, None
        return StepResult(
            version=self.version,
            loss=0.0,
            grad_norm=0.0,
            lr=0.0,
            tokens=scored,
            sequences=sum(batch.sequences + batch.skipped_sequences for batch in step),
            microbatches=len(step),
            metrics=metrics,
        )
