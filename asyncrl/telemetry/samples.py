"""The samples of one metric in one step, reduced to one number."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal, Self, TypeAlias

Reduce: TypeAlias = Literal["mean", "min", "max", "p99"]

# The 99th percentile is of the newest samples, so that the memory of a run that never drains is bounded.
_MAX_NEWEST = 65_536


class Samples:
    """Reduces samples in bounded memory, by `reduce`. The reduction "p99" uses only the newest 65,536 samples."""

    __slots__ = ("_count", "_extreme", "_newest", "_reduce", "_sum")

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._count = 0
        self._sum = 0.0
        self._extreme = math.nan
        self._newest: deque[float] | None = deque(maxlen=_MAX_NEWEST) if reduce == "p99" else None

    def add(self, value: float) -> None:
        self._count += 1
        self._sum += value
        if self._newest is not None:
            self._newest.append(value)
        elif self._reduce == "max":
            self._extreme = value if self._count == 1 else max(self._extreme, value)
        elif self._reduce == "min":
            self._extreme = value if self._count == 1 else min(self._extreme, value)

    def value(self) -> float:
        """The mean, minimum, maximum or 99th percentile. There must be a sample."""
        if self._newest is not None:
            ordered = sorted(self._newest)
            return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
        return self._sum / self._count if self._reduce == "mean" else self._extreme

    def to_json(self) -> list[Any]:
        """The state as a list of JSON values, for `from_json`."""
        extreme = None if math.isnan(self._extreme) else self._extreme
        return [self._reduce, self._count, self._sum, extreme, None if self._newest is None else list(self._newest)]

    @classmethod
    def from_json(cls, state: list[Any]) -> Self:
        """The inverse of `to_json`."""
        samples = cls(state[0])
        _, samples._count, samples._sum, extreme, newest = state
        samples._extreme = math.nan if extreme is None else extreme
        if samples._newest is not None:
            samples._newest.extend(newest)
        return samples

    def merge(self, other: Samples) -> None:
        """Add the samples of `other`, which must have the same `reduce`."""
        if self._newest is not None and other._newest is not None:
            self._newest.extend(other._newest)
        elif self._count == 0 or math.isnan(self._extreme):
            self._extreme = other._extreme
        elif not math.isnan(other._extreme):
            self._extreme = (max if self._reduce == "max" else min)(self._extreme, other._extreme)
        self._count += other._count
        self._sum += other._sum
