"""The samples of one metric in one step, and how they become one number."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal, Self, TypeAlias

Reduce: TypeAlias = Literal["mean", "min", "max", "p99"]

# For a percentile: the latest of a step; bounds the memory of a run that never drains.
_KEPT = 65_536


class Samples:
    """Adds up in constant memory; `value` is what `reduce` says of all samples ("p99": of the newest ones)."""

    __slots__ = ("_count", "_extreme", "_last", "_reduce", "_sum")

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._count = 0
        self._sum = 0.0
        self._extreme = math.nan
        self._last: deque[float] | None = deque(maxlen=_KEPT) if reduce == "p99" else None

    def add(self, value: float) -> None:
        self._count += 1
        self._sum += value
        if self._last is not None:
            self._last.append(value)
        elif self._reduce == "max":
            self._extreme = value if self._count == 1 else max(self._extreme, value)
        elif self._reduce == "min":
            self._extreme = value if self._count == 1 else min(self._extreme, value)

    def value(self) -> float:
        """Their mean, minimum, maximum or 99th percentile. At least one sample must have come."""
        if self._last is not None:
            ordered = sorted(self._last)
            return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
        return self._sum / self._count if self._reduce == "mean" else self._extreme

    def state(self) -> list[Any]:
        """All of it, as JSON: `of` is the inverse."""
        extreme = None if math.isnan(self._extreme) else self._extreme
        return [self._reduce, self._count, self._sum, extreme, None if self._last is None else list(self._last)]

    @classmethod
    def of(cls, state: list[Any]) -> Self:
        """The samples that `state` is of."""
        made = cls(state[0])
        _, made._count, made._sum, extreme, last = state
        made._extreme = math.nan if extreme is None else extreme
        if made._last is not None:
            made._last.extend(last)
        return made

    def merge(self, other: Samples) -> None:
        """The samples of both; they reduce alike."""
        if self._last is not None and other._last is not None:
            self._last.extend(other._last)
        elif self._count == 0 or math.isnan(self._extreme):
            self._extreme = other._extreme
        elif not math.isnan(other._extreme):
            self._extreme = (max if self._reduce == "max" else min)(self._extreme, other._extreme)
        self._count += other._count
        self._sum += other._sum
