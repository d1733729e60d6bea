"""Virtual time: an asyncio loop that never waits.

When no callback is ready the clock jumps to the next timer, so hours of simulated waiting take milliseconds, and the
same program gives the same schedule every time. When nothing is ready and no timer exists, nothing can ever happen
again: that is a deadlock, and it is an error that names every pending task and what it awaits.

There is no selector behind it: no sockets, subprocesses, signals or threads. A program that waits for a thread looks
like a deadlock; that is what `SimulatedLane` is for.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import base_events
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.concurrency.describe import describe_tasks
from asyncrl.errors import StallError

T = TypeVar("T")


class VirtualTimeLoop(base_events.BaseEventLoop):
    """An asyncio event loop whose `time()` is simulated, in seconds from `start`."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._selector = self  # BaseEventLoop asks `self._selector.select(timeout)` when it would wait
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the base class instead of waiting: jump to the next timer, or raise StallError."""
        if timeout is None:
            raise StallError(_deadlock_message(self))
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]  # private to BaseEventLoop
            # The base class runs timers earlier than now + resolution: the sum must differ from now for any now.
            self._clock_resolution = max(1e-9, 2.0 * math.ulp(self._now))
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events but timers."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector, so nobody needs to be woken."""


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, start: float = 0.0) -> T:
    """Run `main()` to its end in virtual time and return its result.

    Raises StallError when it can never end. Whatever the outcome, tasks left behind are cancelled and run to their end.
    """
    loop = VirtualTimeLoop(start)
    try:
        return loop.run_until_complete(main())
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_all(loop: VirtualTimeLoop) -> None:
    pending = {task for task in asyncio.all_tasks(loop) if not task.done()}
    if not pending:
        return
    for task in pending:
        task.cancel()
    loop.run_until_complete(asyncio.wait(pending))
    for task in pending:
        if not task.cancelled():
            task.exception()  # retrieved: the error that ended the run is the one to report


def _deadlock_message(loop: VirtualTimeLoop) -> str:
    lines = describe_tasks(asyncio.all_tasks(loop))
    return "deadlock: nothing is ready and no timer is set\n  " + "\n  ".join(lines)
