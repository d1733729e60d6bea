"""What the owner of a ring hands out."""

from __future__ import annotations

from collections.abc import Callable

from ...records.read import Record
from .link import Link


class Delivery:
    """A leased record. Its arrays are views: valid until `release`, or until `copy` was asked of them."""

    __slots__ = ("_link", "_release", "_slot", "fresh", "record", "released")

    def __init__(
        self,
        release: Callable[[Link, int, Record], None],
        link: Link,
        slot: int,
        record: Record,
        fresh: tuple[int, ...],
    ) -> None:
        self.record = record
        self.fresh = fresh  # positions of the members that had not come before
        self.released = False
        self._release = release
        self._link = link
        self._slot = slot

    def __str__(self) -> str:
        return f"group {self.record.group} of epoch {self.record.epoch}"

    def release(self) -> None:
        """Its group was trained or dropped: the record leaves the ring. Twice is fine."""
        if not self.released:
            self.released = True
            self._release(self._link, self._slot, self.record)
