"""The counter of slots: how many groups may exist in the pipeline. It raises when it would go wrong."""

from __future__ import annotations

from ..errors import LedgerError


class Slots:
    """`total` permissions. Never waits: who waits for a slot, and in which order, is the ledger's business."""

    __slots__ = ("held", "total")

    def __init__(self, total: int, held: int = 0) -> None:
        if total < 1:
            raise ValueError(f"slots: total must be at least 1, found {total}")
        if not 0 <= held <= total:
            raise LedgerError(f"slots: {held} held of {total} cannot be")
        self.total = total
        self.held = held

    @property
    def free(self) -> int:
        """How many `take` may be called now."""
        return self.total - self.held

    def take(self) -> None:
        """Raises LedgerError when none is free: ask `free` first, in the same step of the loop."""
        if self.held >= self.total:
            raise LedgerError(f"slots: all {self.total} are held, none can be taken")
        self.held += 1

    def give(self, count: int = 1) -> None:
        """Raises LedgerError, with the state unchanged, when more would come back than were taken."""
        if count < 0 or count > self.held:
            raise LedgerError(f"slots: {count} given back but only {self.held} of {self.total} are held (over-release)")
        self.held -= count
