"""The samples of one metric in one step, reduced to one number."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal, Self, TypeAlias

Reduce: TypeAlias = Literal["mean", "max", "p99"]

# How many of the newest samples a 99th percentile uses. This bounds the memory of a run that never calls `Recorder.drain`.
_MAX_NEWEST = 65_536


class Samples:
    """Reduces samples to their mean, maximum or 99th percentile, in bounded memory. "p99" uses only the newest 65,536 samples. One
    NaN among the used samples makes the result NaN."""

    __slots__ = ("_count", "_newest", "_reduce", "_total")

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._count = 0
        self._total = -math.inf if reduce == "max" else 0.0  # the sum, or with "max" the maximum
        self._newest: deque[float] | None = deque(maxlen=_MAX_NEWEST) if reduce == "p99" else None

    def add(self, value: float) -> None:
        if self._newest is not None:
            self._newest.append(value)
        self._combine(1, value)

    def _combine(self, count: int, total: float) -> None:
        self._count += count
        # `max` may lose a NaN, depending on the order of its arguments. A sum with a NaN is always NaN.
        if self._reduce != "max" or math.isnan(total) or math.isnan(self._total):
            self._total += total
        else:
            self._total = max(self._total, total)

    def value(self) -> float:
        """The mean, maximum or 99th percentile. There must be a sample."""
        if self._newest is not None:
            ordered = sorted(self._newest)
            index = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
            return math.nan if any(map(math.isnan, ordered)) else ordered[index]
        return self._total / self._count if self._reduce == "mean" else self._total

    def to_json(self) -> list[Any]:
        """The state as a list of JSON values, for `from_json`. Text for NaN and infinities, which JSON does not have."""
        total, *newest = [x if math.isfinite(x) else str(x) for x in (self._total, *(self._newest or ()))]
        return [self._reduce, self._count, total, newest]

    @classmethod
    def from_json(cls, state: list[Any]) -> Self:
        """The inverse of `to_json`."""
        samples = cls(state[0])
        samples._count, samples._total = state[1], float(state[2])
        if samples._newest is not None:
            samples._newest.extend(map(float, state[3]))
        return samples

    def merge(self, other: Samples) -> None:
        """Add the samples of `other`, which must have the same `reduce`."""
        if self._newest is not None and other._newest is not None:
            self._newest.extend(other._newest)
        self._combine(other._count, other._total)
