"""A closure in the queue of a thread, and its result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LaneJob:
    """One closure with its caller's future. The lane's lock guards `started`; only the caller's loop writes `ended`."""

    __slots__ = ("ended", "error", "finished_at", "fn", "future", "loop", "name", "result", "started", "submitted_at")

    def __init__(self, fn: Callable[[], Any], name: str, loop: asyncio.AbstractEventLoop, submitted_at: float) -> None:
        self.fn = fn
        self.name = name
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.started = False
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.submitted_at, self.finished_at = submitted_at, 0.0  # seconds on the recorder's clock

    def notify(self) -> None:
        """Wake the caller after the end of the closure. Call this on the caller's loop."""
        self.ended = True
        if not self.future.done():
            self.future.set_result(None)
