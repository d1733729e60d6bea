"""A closure that was handed to a thread: what its caller waits for, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LaneJob:
    """One closure on its way. `started` moves under the lane's lock; `ended` belongs to the caller's loop."""

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
        self.submitted_at = submitted_at  # times of the recorder's clock
        self.finished_at = 0.0

    def notify(self) -> None:
        """On the caller's loop: the closure has ended."""
        self.ended = True
        if not self.future.done():
            self.future.set_result(None)
