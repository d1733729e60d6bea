"""A trainer without a model: it has the states of a real trainer, occupies the lane, and counts the tokens of a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import numpy as np

from asyncrl.concurrency.lane import Lane
from asyncrl.errors import TrainStepError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Float32Array, Microbatch, StepResult

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
        self._version = version
        self._open: list[Microbatch] | None = None  # the microbatches of the open step
        # Waits for the other ranks before the optimizer step, as a real trainer's reduction of gradients does.
        self.meet_ranks: Callable[[], Awaitable[object]] | None = None

    @property
    def version(self) -> int:
        return self._version

    async def begin_train_step(self, loss: Any) -> None:
        """Errors: TrainStepError if a step is open already; that step stays open."""

        def begin() -> None:
            if self._open is not None:
                raise TrainStepError("a train step is already open: finish_train_step or abort_train_step comes first")
            self._open = []

        with self._recorder.span("begin", track=TRACK):
            await self._lane.run(begin, name="train/begin", priority=PRIORITY)

    async def train_microbatch(self, batch: Microbatch) -> None:
        """Errors: TrainStepError if no step is open."""
        cost = self._train_token_s * batch.tokens.size
        with self._recorder.span("microbatch", track=TRACK, tokens=int(batch.tokens.size)):
            await self._lane.run(
                lambda: self._step().append(batch), name="train/microbatch", priority=PRIORITY, cost=cost
            )

    async def finish_train_step(self) -> StepResult:
        """Errors: TrainStepError if no step is open."""

        def finish() -> StepResult:
            step = self._step()
            age = max((self._age(batch) for batch in step), default=0)
            self._version += 1
            self._open = None
            return self._result(step, age)

        with self._recorder.span("finish", track=TRACK):
            self._step()
            if self.meet_ranks is not None:
                await self.meet_ranks()
            return await self._lane.run(finish, name="train/finish", priority=PRIORITY, cost=self._finish_s)

    async def abort_train_step(self) -> None:
        """Without an open step this does nothing."""

        def abort() -> None:
            self._open = None

        with self._recorder.span("abort", track=TRACK):
            await self._lane.run(abort, name="train/abort", priority=PRIORITY)

    async def compute_logprobs(
        self, batch: Microbatch, model: Literal["policy", "reference"] = "policy"
    ) -> Float32Array:
        """The sampler's log-probs [S]: policy, reference and sampler are equal in a dry run."""
        cost = self._train_token_s * batch.tokens.size / 3  # a forward: a third of forward and backward
        with self._recorder.span("logprobs", track=TRACK, tokens=int(batch.tokens.size)):
            return await self._lane.run(
                batch.sampler_logprobs.copy, name="train/logprobs", priority=PRIORITY, cost=cost
            )

    async def survey(self, loss: Any, batches: Sequence[Microbatch]) -> tuple[Any, list[Microbatch]]:
        """Returns its arguments: this trainer computes no loss, so no term needs a normaliser."""
        return loss, list(batches)

    def _step(self) -> list[Microbatch]:
        if self._open is None:
            raise TrainStepError("no train step open; begin_train_step must be called first")
        return self._open

    def _age(self, batch: Microbatch) -> int:
        return self._version - int(batch.versions.min()) if batch.versions.size else 0

    def _result(self, step: list[Microbatch], age: int) -> StepResult:
        groups = np.unique(np.concatenate([batch.group_ids for batch in step])).size if step else 0
        scored = sum(batch.scored + batch.skipped_tokens for batch in step)
        return StepResult(
            version=self._version,
            loss=0.0,
            grad_norm=0.0,
            lr=0.0,
            tokens=scored,
            sequences=sum(batch.sequences + batch.skipped_sequences for batch in step),
            microbatches=len(step),
            metrics={
                "dry_run/packed_tokens": float(sum(batch.tokens.size for batch in step)),
                "dry_run/scored_tokens": float(scored),
                "dry_run/groups": float(groups),
                "dry_run/max_age": float(age),
            },
        )
