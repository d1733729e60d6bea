"""Counts slots. A slot is the permission for one group to exist in the pipeline."""

from __future__ import annotations

from ..errors import LedgerError


class Slots:
    """`total` slots, `held` of them in use. Its methods never wait; the ledger keeps the queue of waiting callers."""

    __slots__ = ("held", "total")

    def __init__(self, total: int, held: int = 0) -> None:
        if total < 1:
            raise ValueError(f"slots: total must be at least 1, found {total}")
        if not 0 <= held <= total:
            raise LedgerError(f"slots: held must be from 0 to {total}, found {held}")
        self.total = total
        self.held = held

    @property
    def free(self) -> int:
        """Number of slots that can be taken now."""
        return self.total - self.held

    def take(self) -> None:
        """Take one slot. Errors: LedgerError if none is free. Check `free` first, without an `await` in between."""
        if self.held >= self.total:
            raise LedgerError(f"slots: all {self.total} are held, so none can be taken; check `free` first")
        self.held += 1

    def give(self, count: int = 1) -> None:
        """Release `count` slots. Errors: LedgerError if fewer are held; the count of held slots stays unchanged."""
        if count < 0 or count > self.held:
            raise LedgerError(f"slots: asked to release {count}, but only {self.held} are held (over-release)")
        self.held -= count
