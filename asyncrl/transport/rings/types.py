"""What belongs to the owner of record rings: their sizes, its counts, what it hands out, damage, and which members came before."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from ...records.read import Record

_Group = tuple[int, int]  # (epoch, group)


@dataclass(frozen=True, slots=True)
class RingSettings:
    """The sizes of an owner's rings."""

    size: int = 1 << 28  # bytes of all rings together
    slots: int = 256  # records per producer
    ring_bytes: int = 1 << 24  # payload per producer; no record can be larger


@dataclass(slots=True)
class RingStatistics:
    """Of all rings of one owner, since it opened."""

    records: int = 0  # delivered
    released: int = 0
    outstanding: int = 0  # found and not released
    duplicates: int = 0  # members that had come before
    torn: int = 0
    half_written: int = 0  # begun by producers that died
    passed_over: int = 0
    replayed: int = 0  # found at adoption
    producers: int = 0  # attached now
    rings: int = 0
    deaths: int = 0  # producers that died without closing
    reclaimed: int = 0  # rings freed
    refused: int = 0  # producers sent away
    pauses: int = 0  # of 0.1 s, without a free descriptor for a producer
    damaged: int = 0  # rings and segments that were set aside


class Delivery:
    """A leased record. Its arrays are views: valid until `release`, or until `copy` was asked of them."""

    __slots__ = ("_release", "fresh", "record", "released")

    def __init__(self, release: Callable[[Record], None], record: Record, fresh: tuple[int, ...]) -> None:
        self.record = record
        self.fresh = fresh  # positions of the members that had not come before
        self.released = False
        self._release = release

    def __str__(self) -> str:
        return f"group {self.record.group} of epoch {self.record.epoch}"

    def release(self) -> None:
        """Its group was trained or dropped: the record leaves the ring. Twice is fine."""
        if not self.released:
            self.released = True
            self._release(self.record)


class Damage:
    """What of the rings' memory was written over: a sentence for each thing, the latest hundred."""

    def __init__(self) -> None:
        self.count = 0
        self.lines: deque[str] = deque(maxlen=100)
        self.listener: Callable[[str], None] | None = None  # is called with each further sentence

    def add(self, line: str) -> None:
        """Note one more, and pass it to the listener."""
        self.count += 1
        self.lines.append(line)
        if self.listener is not None:
            self.listener(line)


class CameBefore:
    """Which members came before: those that lie in the ring, and those of the groups that left it latest.

    Of the groups that left, so many are kept that their members are at most `most`; the last one is kept always.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: dict[_Group, set[int]] = {}
        self._gone: OrderedDict[_Group, tuple[int, ...]] = OrderedDict()  # in the order in which they left
        self._left = 0  # members in `_gone`

    def fresh(self, group: _Group, members: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of the members (distinct) that had not come before; they are here from now on."""
        here, gone = self._here.get(group), self._gone.get(group)
        if here is None and gone is None:
            self._here[group] = set(members)
            return _positions(len(members))
        before = {*(here or ()), *(gone or ())}
        found = tuple([position for position, member in enumerate(members) if member not in before])
        if found:
            self._here[group] = {*(here or ()), *[members[position] for position in found]}
        return found

    def leave(self, group: _Group, members: tuple[int, ...]) -> None:
        """They (distinct) left the ring."""
        rest = self._here.pop(group, set()).difference(members)
        if rest:
            self._here[group] = rest
        gone = self._gone.pop(group, ())
        self._gone[group] = both = tuple({*gone, *members})
        self._left += len(both) - len(gone)
        while self._left > self._most and len(self._gone) > 1:
            self._left -= len(self._gone.popitem(last=False)[1])


@functools.lru_cache(maxsize=256)
def _positions(count: int) -> tuple[int, ...]:
    return tuple(range(count))
