"""Aligned 64-bit words in shared memory: the only stores that other processes act upon.

A store through a memoryview of format "Q" is one aligned 8-byte move, so a reader sees the old or the new value, never
a mixture. x86-64 makes stores visible in program order (and the C library ends its streaming copies with a fence), so
whoever sees the word sees everything that was written before it. Other architectures give no such order: `segment`
refuses them.

Every store has a label. `FAULT`, where set, is called before and after each one: the tests kill the process there.
"""

from __future__ import annotations

from collections.abc import Callable

# Set by tests only, per process: called with "label:before" and "label:after" around every store of the protocol.
FAULT: Callable[[str], None] | None = None


def fault(label: str) -> None:
    """A place between stores where a crash is worth a test (bulk copies, system calls)."""
    if FAULT is not None:
        FAULT(label)


class Words:
    """`count` words of a mapping from byte `offset` (a multiple of 8) on. `view`: for reading many, or one in less time."""

    __slots__ = ("_label", "view")

    def __init__(self, buffer: memoryview, offset: int, count: int, label: str) -> None:
        if offset % 8:
            raise AssertionError(f"{label}: offset {offset} is not aligned to 8 bytes; the store would tear")
        self.view = buffer[offset : offset + 8 * count].cast("Q")
        self._label = label

    def __getitem__(self, index: int) -> int:
        return self.view[index]

    def store(self, index: int, value: int) -> None:
        """One aligned store, which other processes see whole or not at all."""
        if FAULT is None:
            self.view[index] = value
            return
        FAULT(f"{self._label}:before")
        self.view[index] = value
        FAULT(f"{self._label}:after")

    def release(self) -> None:
        """Let go of the view, so that the mapping can close."""
        self.view.release()
