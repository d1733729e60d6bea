"""An engine without a model, for tests and dry runs: continuous batching with made-up tokens.

A completion depends only on its request and the engine's seed, never on the order of arrival. A decode step occupies the lane for
`decode_step_s`, whatever its number of sequences: a real step spends its time on reading weights. The lane decides whether this
time is virtual, real or none.
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
    """A made-up completion, decided at admission; only the versions come step by step."""

    tokens: Int32Array  # [C]
    logprobs: npt.NDArray[np.float32]  # [C]
    reason: FinishReason
    versions: list[int]


class DryRunEngine(OwnedEngine):
    """Implements `ports.Engine` and `ports.WeightSink`.

    length_sigma: standard deviation of the natural logarithm of a completion's length. The median length is half of max_tokens, and
    the shortest min_tokens + 1. 0: every completion has the median length. A request without stop tokens gets max_tokens.
    version_source: returns the current policy version; called on the lane in each decode step.
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
        self._rows: dict[int, _DryRow] = {}
        self._free = list(range(max_sequences - 1, -1, -1))

    def _draw(self, job: Job) -> _DryRow:
        sampling = job.request.sampling
        # numpy refuses negative seeds.
        random = np.random.default_rng([self._seed, job.request.seed & 0xFFFFFFFFFFFFFFFF])
        median = max(1, sampling.max_tokens // 2)
        drawn = max(sampling.min_tokens + 1, round(median * math.exp(self._length_sigma * random.standard_normal())))
        stop_ids = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]
        stops = drawn < sampling.max_tokens and bool(stop_ids)
        length = drawn if stops else sampling.max_tokens
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        ends = {EOS, *stop_ids}
        tokens[np.isin(tokens, [*ends])] = next(token for token in itertools.count() if token not in ends)
        if stops:
            tokens[-1] = stop_ids[0]
        logprobs = np.log(np.maximum(random.random(length), LEAST_PROBABILITY)).astype(np.float32)
        return _DryRow(tokens, logprobs, FinishReason.STOP if stops else FinishReason.LENGTH, [])

    async def _prepare(self) -> None:
        pass

    def _add(self, job: Job) -> int:
        slot = self._free.pop()
        self._rows[slot] = self._draw(job)
        return slot

    def _remove(self, job: Job, finished: bool) -> None:
        del self._rows[job.slot]
        self._free.append(job.slot)

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
