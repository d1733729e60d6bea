"""The metrics of the steps of a run, at 8 bytes a number: a dictionary for each step would take ten times that.

All of them up to `MOST` lines, then every second one, every fourth, and so on: a run of a million steps takes no more memory than
one of two thousand. `metrics.jsonl` has every line.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, overload

Line = tuple[int, dict[str, float]]
MOST = 2_000  # lines


class History(Sequence[Line]):
    """(version, metrics) of the lines of metrics, in order, the last one always. Lines are added at the end; each is made when it
    is asked for."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._every = 1  # of so many lines one is kept
        self._added = 0
        self._versions = array("q")
        self._numbers: list[tuple[tuple[str, ...], array[float]]] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}  # most steps have the same: each kept once

    def add(self, version: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics, or more of the last one."""
        if again := self._versions[-1:] == array("q", [version]):
            metrics = {**self[-1][1], **metrics}
        names = tuple(sys.intern(name) for name in sorted(metrics))  # they are made anew for each step
        if again or (self._added and (self._added - 1) % self._every):  # the last one was kept for being the last
            self._versions.pop()
            self._numbers.pop()
        self._versions.append(version)
        self._numbers.append((self._names.setdefault(names, names), array("d", [metrics[name] for name in names])))
        self._added += not again
        if len(self._versions) > self._most:
            self._thin()
        if len(self._names) > 2 * self._most:  # most of them are of lines that went
            self._names = {names: names for names, _ in self._numbers}

    def _thin(self) -> None:
        """Keep every second of those that were not kept for being the last, and the last."""
        last = self._added - 1
        regular = slice(0, len(self._versions) - bool(last % self._every), 2)
        self._every *= 2
        latest = slice(-1 if last % self._every else len(self._versions), None)
        self._versions = self._versions[regular] + self._versions[latest]
        self._numbers = self._numbers[regular] + self._numbers[latest]

    def copy(self) -> History:
        """As it is now: what is added later is not in it."""
        other = History(self._most)
        other._every, other._added = self._every, self._added
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
