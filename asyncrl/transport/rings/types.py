"""Types of the record rings' owner: settings, counts, a delivered record, and the seen members."""

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
    payload_bytes: int = 1 << 24  # per producer: limit of one record, too


@dataclass(slots=True)
class RingStatistics:
    """Counts over all rings of one owner, since it opened."""

    records: int = 0  # delivered
    released: int = 0
    outstanding: int = 0  # found in a ring and not released
    duplicates: int = 0  # members that an earlier record had
    torn: int = 0  # records with damaged bytes
    half_written: int = 0  # records that a dead producer began but did not put
    passed_over: int = 0  # slots that a put skipped because they were in use
    replayed: int = 0  # found in rings of an earlier owner
    producers: int = 0  # attached now
    rings: int = 0
    deaths: int = 0  # producers that died without closing
    reclaimed: int = 0  # rings freed
    refused: int = 0  # producers refused
    pauses: int = 0  # times that `accept` found no free descriptor
    damaged: int = 0  # messages about damaged segments


@dataclass(slots=True, eq=False)
class Delivery:
    """A leased record. Its arrays are views of the ring, valid until `release`."""

    _release: Callable[[Record], None]
    record: Record
    fresh: tuple[int, ...]  # positions of the members that no earlier record had
    released: bool = False

    def __str__(self) -> str:
        return f"group {self.record.group} of epoch {self.record.epoch}"

    def release(self) -> None:
        """Free the record's place in the ring, after its group was trained or dropped. A second call does nothing."""
        if not self.released:
            self.released = True
            self._release(self.record)


class SeenMembers:
    """Detects duplicates: the members in the ring, and the `limit` members released last, by whole groups. The last released group
    is always kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_ring: dict[_GroupKey, set[int]] = {}
        self._released: OrderedDict[_GroupKey, tuple[int, ...]] = OrderedDict()  # oldest release first
        self._released_count = 0  # members in `_released`

    def add(self, group: _GroupKey, members: tuple[int, ...]) -> tuple[int, ...]:
        """Add distinct members of a group in the ring. Returns the positions of the members not seen before."""
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
        """Move distinct members from the ring to the released members."""
        remaining = self._in_ring.pop(group, set()).difference(members)
        if remaining:
            self._in_ring[group] = remaining
        earlier = self._released.pop(group, ())
        self._released[group] = released = tuple({*earlier, *members})
        self._released_count += len(released) - len(earlier)
        while self._released_count > self._limit and len(self._released) > 1:
            self._released_count -= len(self._released.popitem(last=False)[1])
