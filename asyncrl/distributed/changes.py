"""The number of the last change of the books, and who waits for the next one. Both ledgers wait with it, on the
loop's thread."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder


def waiting_for_slot(recorder: Recorder | None) -> AbstractContextManager[object]:
    """To be entered while this task waits for a slot: the recorder hears of it."""
    if recorder is None:
        return nullcontext()
    task = asyncio.current_task()
    return recorder.wait(task.get_name() if task else "?", "a slot", on="publish pump", cause="slots")


class Changes:
    """`number` counts the changes; who moves it calls `wake` afterwards."""

    def __init__(self) -> None:
        self.number = 0
        self._waiters: set[asyncio.Future[None]] = set()

    async def wait(self, seen: int) -> int:
        """Return the number once it is above `seen`. Errors: whatever `wake` was called with meanwhile."""
        while self.number <= seen:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.number

    def wake(self, error: BaseException | None = None) -> None:
        """Everybody who waits looks at the number again, or raises this error."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error) if error is not None else waiter.set_result(None)
