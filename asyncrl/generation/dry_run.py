"""An engine without a model, for tests and `train.kind: dry_run`: continuous batching with made-up tokens.

The tokens of a completion depend only on the request, `seed` and `length_sigma`, not on the order of arrival. A decode step
occupies a `SimulatedLane` for `decode_step_s`, whatever the number of sequences. A `ThreadLane` ignores this time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.concurrency.lane import Lane
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, Int32Array

from .lifecycle import TRACK
from .owner import Job, OwnedEngine

VOCABULARY, EOS = 256, 0
LEAST_PROBABILITY = 1e-6  # keeps the logarithm of a random number finite


@dataclass(slots=True)
class _DryRow:
    """A made-up completion. Admission draws its tokens; each decode step adds the version of one more token."""

    tokens: Int32Array  # [C]
    logprobs: npt.NDArray[np.float32]  # [C]
    reason: FinishReason
    versions: list[int]


class DryRunEngine(OwnedEngine):
    """Implements `ports.Engine` and `ports.WeightSink`.

    length_sigma: standard deviation of the natural logarithm of a completion's length. With 0 every length is the median, half of
    max_tokens. Lengths are limited to min_tokens + 1 ... max_tokens. A request without stop tokens gets max_tokens tokens.
    version_source: returns the current policy version. It is called on the lane.
    """

    def __init__(
        self,
        lane: Lane,
        recorder: Recorder,
        *,
        max_sequences: int,
        max_context: int,
        kv_positions: int | None = None,
        version_source: Callable[[], int],
        decode_step_s: float = 0.01,
        length_sigma: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(
            lane, recorder, max_sequences=max_sequences, max_context=max_context, kv_positions=kv_positions
        )
        self._version_source = version_source
        self._decode_step_s = decode_step_s
        self._length_sigma = length_sigma
        self._seed = seed
        self._rows: dict[int, _DryRow] = {}  # by slot
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    def _draw(self, job: Job) -> _DryRow:
        sampling = job.request.sampling
        # numpy refuses negative seeds.
        generator = np.random.default_rng([self._seed, job.request.seed & 0xFFFFFFFFFFFFFFFF])
        median = max(1, sampling.max_tokens // 2)
        factor = math.exp(self._length_sigma * generator.standard_normal())
        drawn_length = max(sampling.min_tokens + 1, round(median * factor))
        stop_ids = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]
        stops = drawn_length < sampling.max_tokens and bool(stop_ids)
        length = drawn_length if stops else sampling.max_tokens
        tokens = generator.integers(0, VOCABULARY, length).astype(np.int32)
        # Tokens that would end the completion early are replaced by the smallest other token.
        ends = {EOS, *stop_ids}
        tokens[np.isin(tokens, [*ends])] = next(token for token in itertools.count() if token not in ends)
        if stops:
            tokens[-1] = stop_ids[0]
        logprobs = np.log(np.maximum(generator.random(length), LEAST_PROBABILITY)).astype(np.float32)
        return _DryRow(tokens, logprobs, FinishReason.STOP if stops else FinishReason.LENGTH, [])

    async def _prepare(self) -> None:
        pass

    def _add(self, job: Job) -> int:
        slot = self._free_slots.pop()
        self._rows[slot] = self._draw(job)
        return slot

    def _remove(self, job: Job, finished: bool) -> None:
        del self._rows[job.slot]
        self._free_slots.append(job.slot)

    def _decode(self) -> list[int]:
        version = self._version_source()
        ended = []
        for slot, row in self._rows.items():
            row.versions.append(version)
            if len(row.versions) == row.tokens.size:
                ended.append(slot)
        return ended

    async def _advance(self) -> list[tuple[Job, Generation]]:
        rows = len(self._rows)
        with self.recorder.span("decode", track=TRACK, sequences=rows):
            ended = await self.lane.run(self._decode, name="engine/decode", cost=self._decode_step_s)
        self._count_step(rows)
        return [(self._running[slot], self._generation(self._rows[slot])) for slot in ended]

    def _generation(self, row: _DryRow) -> Generation:
        versions = np.array(row.versions, dtype=np.int32)
        return Generation(row.tokens, row.logprobs, row.logprobs.copy(), versions, row.reason)

    async def _refresh(self) -> int:
        return await self.lane.run(self._version_source, name="engine/weights")
