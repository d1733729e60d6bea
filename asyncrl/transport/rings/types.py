"""Types that the owner of record rings uses: settings, counts, a delivered record, and the filter of duplicates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...records.read import Record

_GroupKey = tuple[int, int]  # (epoch, group)


@dataclass(frozen=True, slots=True)
class RingSettings:
    """The sizes of the rings of one owner."""

    total_bytes: int = 1 << 28  # of all rings together
    slots: int = 256  # records per producer
    payload_bytes: int = 1 << 24  # per producer; also the limit of one record


@dataclass(slots=True)
class RingStatistics:
    """Counts over all rings of one owner since it opened. `outstanding`, `producers` and `rings`: the numbers now."""

    records: int = 0  # delivered
    released: int = 0
    outstanding: int = 0  # records found in a ring and not released
    duplicates: int = 0  # members that were in an earlier record
    torn: int = 0  # damaged records, and records without a valid descriptor
    half_written: int = 0  # puts that a dead producer did not finish
    skipped_slots: int = 0  # slots in use that a put skipped
    replayed: int = 0  # records in rings of an earlier owner
    producers: int = 0  # attached now
    rings: int = 0
    deaths: int = 0  # producers that died without closing
    reclaimed: int = 0  # rings removed after the end of their producer
    refused: int = 0  # producers refused
    pauses: int = 0  # times that `accept` found no free file descriptor
    damaged: int = 0  # damaged segments, those of earlier owners too


@dataclass(slots=True, eq=False)
class Delivery:
    """A record that the consumer holds until `release`. Its arrays are views of the ring, valid until then."""

    _release: Callable[[Record], None]
    record: Record
    fresh: tuple[int, ...]  # positions of the members that no earlier record had
    released: bool = False

    def __str__(self) -> str:
        return f"group {self.record.group} of epoch {self.record.epoch}"

    def release(self) -> None:
        """Free the record's space in the ring. Call it after the group was trained or dropped. A second call does nothing."""
        if not self.released:
            self.released = True
            self._release(self.record)


class SeenMembers:
    """Detects duplicate members. Remembers all members in the rings, and up to `limit` released members. Above `limit` it forgets
    released members group by group, the least recently released group first. The most recently released group always stays."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_ring: dict[_GroupKey, set[int]] = {}
        self._released: OrderedDict[_GroupKey, tuple[int, ...]] = OrderedDict()  # by last release
        self._released_count = 0  # members in `_released`

    def add(self, group: _GroupKey, members: tuple[int, ...]) -> tuple[int, ...]:
        """Add members of a group that were put into a ring. Returns the positions of the members not seen before."""
        in_ring, released = self._in_ring.get(group), self._released.get(group)
        if in_ring is None and released is None:
            self._in_ring[group] = set(members)
            return tuple(range(len(members)))
        seen = {*(in_ring or ()), *(released or ())}
        fresh = tuple([position for position, member in enumerate(members) if member not in seen])
        if fresh:
            self._in_ring[group] = {*(in_ring or ()), *[members[position] for position in fresh]}
        return fresh

    def remove(self, group: _GroupKey, members: tuple[int, ...]) -> None:
        """Move members from those in the rings to the released members."""
        remaining = self._in_ring.pop(group, set()).difference(members)
        if remaining:
            self._in_ring[group] = remaining
        earlier = self._released.pop(group, ())
        self._released[group] = released = tuple({*earlier, *members})
        self._released_count += len(released) - len(earlier)
        while self._released_count > self._limit and len(self._released) > 1:
            self._released_count -= len(self._released.popitem(last=False)[1])
