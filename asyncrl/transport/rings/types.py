"""What belongs to the owner of record rings: their sizes, its counts, the damage that it found, and which members came before."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .link import Link
    from .ring import RingCounts

_Group = tuple[int, int]  # (epoch, group)


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Of all rings of one owner, since it opened."""

    records: int  # delivered
    released: int
    outstanding: int  # found and not released
    duplicates: int  # members that had come before
    torn: int
    half_written: int  # begun by producers that died
    passed_over: int
    replayed: int  # found at adoption
    producers: int  # attached now
    rings: int
    deaths: int  # producers that died without closing
    reclaimed: int  # rings freed
    refused: int  # producers sent away
    pauses: int  # times that none could be let in for 0.1 s: this process had no free descriptor
    damaged: int  # rings that were set aside, segments that were, entries of the block table that were written over


@dataclass(slots=True)
class RingCounters:
    """What the owner counts itself; the rest of `RingStatistics` the rings know."""

    records: int = 0
    released: int = 0
    duplicates: int = 0
    torn: int = 0
    half_written: int = 0
    passed_over: int = 0
    replayed: int = 0
    deaths: int = 0
    reclaimed: int = 0
    refused: int = 0
    pauses: int = 0

    def leave(self, counts: RingCounts) -> None:
        """A ring goes: what it counted stays."""
        self.passed_over += counts.passed_over
        self.torn += counts.lost

    def statistics(self, links: Collection[Link], damaged: int) -> RingStatistics:
        """With what the rings that exist count themselves, and the damage."""
        counts = [link.reader.counts for link in links]
        here = {
            "torn": self.torn + sum(each.lost for each in counts),
            "passed_over": self.passed_over + sum(each.passed_over for each in counts),
            "outstanding": sum(link.reader.outstanding for link in links),
            "producers": sum(link.connection is not None for link in links),
            "rings": len(links),
            "damaged": damaged,
        }
        return RingStatistics(**(asdict(self) | here))


@dataclass(frozen=True, slots=True)
class RingSettings:
    """The sizes of an owner's rings."""

    size: int = 1 << 28  # bytes of the arena
    slots: int = 256  # records per producer
    ring_bytes: int = 1 << 24  # payload per producer; no record can be larger


class Damage:
    """What of a ring's memory was written over: a sentence for each thing, the latest hundred."""

    def __init__(self) -> None:
        self.count = 0
        self.lines: deque[str] = deque(maxlen=100)
        self.listener: Callable[[str], None] | None = None  # hears the next ones at once

    def say(self, line: str) -> None:
        """One more."""
        self.count += 1
        self.lines.append(line)
        if self.listener is not None:
            self.listener(line)


class CameBefore:
    """Which members came before: those that lie in the ring, and the latest `most` that left it. Kept group by
    group: one is as old as its latest member.

    Nearly always all members of a group come together and leave together: then the tuple that came is what is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: dict[_Group, Collection[int]] = {}
        self._gone: OrderedDict[_Group, tuple[int, ...]] = OrderedDict()  # in the order in which they left
        self._left = 0  # members in `_gone`

    def fresh(self, group: _Group, members: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of the members (distinct) that had not come before; they are here from now on."""
        here, gone = self._here.get(group), self._gone.get(group)
        if here is None and gone is None:
            self._here[group] = members
            return _positions(len(members))
        before = {*(here or ()), *(gone or ())}
        found = tuple([position for position, member in enumerate(members) if member not in before])
        if found:
            self._here[group] = {*(here or ()), *[members[position] for position in found]}
        return found

    def leave(self, group: _Group, members: tuple[int, ...]) -> None:
        """They (distinct) left the ring."""
        here = self._here.pop(group, None)
        if here is not None and here != members and (rest := set(here).difference(members)):
            self._here[group] = rest
        gone = self._gone.get(group)
        if gone is None:
            self._gone[group] = members
            self._left += len(members)
        else:
            self._gone.move_to_end(group)
            self._gone[group] = both = tuple(dict.fromkeys((*gone, *members)))
            self._left += len(both) - len(gone)
        while self._left > self._most:
            oldest, gone = next(iter(self._gone.items()))
            forgotten = min(len(gone), self._left - self._most)
            self._left -= forgotten
            if forgotten == len(gone):
                del self._gone[oldest]
            else:
                self._gone[oldest] = gone[forgotten:]


@functools.lru_cache(maxsize=256)
def _positions(count: int) -> tuple[int, ...]:
    return tuple(range(count))
