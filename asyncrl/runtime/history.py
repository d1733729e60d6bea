"""The metrics of every step of a run, at 8 bytes a number: a dictionary for each step would take ten times that."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, overload

Line = tuple[int, dict[str, float]]


class History(Sequence[Line]):
    """(version, metrics) of every line of metrics, in order. Lines are added at the end; each is made when it is asked for."""

    def __init__(self) -> None:
        self._versions = array("q")
        self._numbers: list[tuple[tuple[str, ...], array[float]]] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}  # most steps have the same: each kept once

    def add(self, version: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics."""
        names = tuple(sys.intern(name) for name in sorted(metrics))  # they are made anew for each step
        self._versions.append(version)
        self._numbers.append((self._names.setdefault(names, names), array("d", [metrics[name] for name in names])))

    def copy(self) -> History:
        """As it is now: what is added later is not in it."""
        other = History()
        other._versions, other._numbers, other._names = self._versions[:], self._numbers[:], dict(self._names)
        return other

    def __len__(self) -> int:
        return len(self._versions)

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        names, numbers = self._numbers[index]
        return self._versions[index], dict(zip(names, numbers, strict=True))
