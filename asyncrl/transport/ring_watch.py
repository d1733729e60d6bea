"""Staying awake for a record that is being written right now.

To wake up a sleeping process takes as long as to write half a megabyte. So a producer that begins a record of some size
knocks (it signals the eventfd once more, before the copy) where the consumer has nothing left to read; the consumer wakes up
while the bytes are being copied, and looks again and again until the record is accepted: for `PATIENCE_S` at most, between
the other work of its loop, and only while somebody waits for a record. Whoever is not there by then wakes it up as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

KNOCK = range(1 << 16, (1 << 21) + 1)  # bytes of a record: a smaller one is there at once, a larger one takes too long
PATIENCE_S = 0.0003  # some times the copy of the largest of these


class Watch:
    """Calls `look` in every turn of the loop, while it says that there is something to wait for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], bool]) -> None:
        self._loop, self._look = loop, look
        self._until = 0.0  # of the loop's clock; 0 while nobody looks

    def begin(self) -> None:
        if not self._until:
            self._until = self._loop.time() + PATIENCE_S
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        if self._look() and self._loop.time() < self._until:
            self._loop.call_soon(self._again)
        else:
            self._until = 0.0
