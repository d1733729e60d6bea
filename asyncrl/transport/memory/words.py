"""Aligned 64-bit words in shared memory. A process writes data, and then publishes the data by the store of a word.

A store through a memoryview of format "Q" is one aligned 8-byte move. So a reader sees the old or the new value, never
a mixture. x86-64 makes stores visible in program order, and the C library puts a fence after its non-temporal copies. So a
reader that sees the new value also sees every earlier write. `segment.py` refuses architectures without this order.

Each `Words` has a label. Tests set `FAULT` to kill the process before or after a store.
"""

from __future__ import annotations

from collections.abc import Callable

# Set by tests only, in each process: called with "label:before" and "label:after" around each store, and by `fault`.
FAULT: Callable[[str], None] | None = None


def fault(label: str) -> None:
    """A point outside of a store at which tests kill the process, for example at a bulk copy or a system call."""
    if FAULT is not None:
        FAULT(label)


class Words:
    """`count` words of a mapping, from byte `offset` (a multiple of 8) on. `view`: for fast reads."""

    __slots__ = ("_label", "view")

    def __init__(self, buffer: memoryview, offset: int, count: int, label: str) -> None:
        self.view = buffer[offset : offset + 8 * count].cast("Q")
        self._label = label

    def __getitem__(self, index: int) -> int:
        return self.view[index]

    def store(self, index: int, value: int) -> None:
        """Store one word. Other processes see the old value or the new value."""
        if FAULT is None:
            self.view[index] = value
            return
        FAULT(f"{self._label}:before")
        self.view[index] = value
        FAULT(f"{self._label}:after")

    def release(self) -> None:
        """Release the view, so that the mapping can be closed."""
        self.view.release()
