"""What an owner of record rings is told, tells, and remembers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..records.read import Identity


@dataclass(frozen=True, slots=True)
class RingStatistics:
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


@dataclass(slots=True)
class RingCounters:
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


@dataclass(frozen=True, slots=True)
class RingSettings:
    size: int = 1 << 28  # bytes of the arena
    slots: int = 256  # records per producer
    ring_bytes: int = 1 << 24  # payload per producer; no record can be larger
    checksum: bool = False  # of the payload too (the header's CRC32 is always checked)
    remembered: int = 1 << 17  # released identities that are remembered against duplicates
    first_position: int = 0  # where new rings begin to count


@dataclass(slots=True)
class Memory:
    """Which members came before: those that lie in the ring, and the latest that left it."""

    most: int
    here: set[Identity] = field(default_factory=set)
    gone: OrderedDict[Identity, None] = field(default_factory=OrderedDict)

    def forget(self, identity: Identity) -> None:
        self.here.discard(identity)
        self.gone[identity] = None
        while len(self.gone) > self.most:
            self.gone.popitem(last=False)
