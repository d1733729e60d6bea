"""`ports.Trainer` on a lane, the thread that owns the device. A call runs one closure there (`survey`, `train_round`: several).

Training closures run before decoding (priority 1 against 0), in call order. If the closure of a cancelled caller has started, the
caller waits for the closure. If not, the closure never runs. So when `abort_train_step` begins, no other closure is half done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from asyncrl.algorithms.base import Loss
from asyncrl.concurrency.lane import Lane
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Float32Array, Microbatch, StepResult

from .sharded import ShardedTrainer
from .trainer import TorchTrainer

T = TypeVar("T")
TRACK = "trainer"
PRIORITY = 1  # decoding has 0; a higher priority runs first


class LaneTrainer:
    """Implements `ports.Trainer` with a `TorchTrainer`. The metrics `time/train`, `time/logprobs` and, for sharded
    models, `time/wait_for_ranks` are seconds for which the lane was busy."""

    def __init__(self, core: TorchTrainer, lane: Lane, recorder: Recorder) -> None:
        self.core = core
        self._lane = lane
        self._recorder = recorder

    @property
    def version(self) -> int:
        """See `Trainer.version`. Changes on the thread of the lane, while `finish_train_step` runs."""
        return self.core.version

    async def begin_train_step(self, loss: Any) -> None:
        await self._run(lambda: self.core.begin_train_step(loss), "begin")

    async def train_microbatch(self, batch: Microbatch) -> None:
        await self._run(lambda: self.core.train_microbatch(batch), "microbatch", tokens=int(batch.tokens.size))

    async def finish_train_step(self) -> StepResult:
        return await self._run(self.core.finish_train_step, "finish")

    async def abort_train_step(self) -> None:
        await self._run(self.core.abort_train_step, "abort")

    async def compute_logprobs(
        self, batch: Microbatch, model: Literal["policy", "reference"] = "policy"
    ) -> Float32Array:
        return await self._run(
            lambda: self.core.compute_logprobs(batch, model), "logprobs", metric="time/logprobs", model=model
        )

    async def survey(self, loss: Loss, batches: Sequence[Microbatch]) -> tuple[Loss, list[Microbatch]]:
        """See `Trainer.survey`. If the loss needs entropies, one closure for each microbatch computes them."""
        entropies: list[Float32Array] = []
        if loss.top_entropy_quantile < 1:
            for batch in batches:  # decoding runs between the closures
                work = partial(self.core.compute_entropies, batch)
                entropies.append(await self._run(work, "entropies", metric="time/logprobs"))
        return await self._run(lambda: self.core.survey(loss, batches, entropies), "survey")

    async def train_round(self, finishing: bool) -> bool:
        """For a sharded model: run a number of microbatches, agreed by all ranks. Each is a closure, and decoding runs in between.
        `finishing`: this rank adds no more microbatches. Returns True if all ranks are finishing: call `finish_train_step` next."""
        core = self.core
        assert isinstance(core, ShardedTrainer)
        agree = partial(core.agree_on_round, finishing=finishing)
        count = await self._run(agree, "agree", metric="time/wait_for_ranks")
        for _ in range(count):
            await self._run(core.run_agreed, "microbatch")
        return core.ready_to_finish

    async def _run(self, fn: Callable[[], T], name: str, metric: str = "time/train", **args: Any) -> T:
        def closure() -> T:
            with self._recorder.timed(metric):
                return fn()

        with self._recorder.span(name, track=TRACK, **args):
            return await self._lane.run(closure, name=f"train/{name}", priority=PRIORITY)
