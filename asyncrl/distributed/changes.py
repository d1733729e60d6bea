"""A counter of changes of a ledger's books, with waiters for the next change. For the thread of the event loop."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder


def waiting_for_slot(recorder: Recorder | None) -> AbstractContextManager[object]:
    """A context that records, in `recorder`, that the current task waits for a slot."""
    if recorder is None:
        return nullcontext()
    task = asyncio.current_task()
    return recorder.wait(task.get_name() if task else "?", "a slot", on="publish pump", cause="slots")


class Changes:
    """`number` counts the changes. A ledger raises `number` and then calls `wake`."""

    def __init__(self) -> None:
        self.number = 0
        self._waiters: set[asyncio.Future[None]] = set()

    async def wait(self, seen: int) -> int:
        """Wait until `number` is above `seen`, and return `number`. Errors: the error of a `wake` during the wait."""
        while self.number <= seen:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.number

    @property
    def awaited(self) -> bool:
        """Whether a task waits."""
        return bool(self._waiters)

    def wake(self, error: BaseException | None = None) -> None:
        """Wake all waiters. Each waiter checks `number` again, or raises `error`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error) if error is not None else waiter.set_result(None)
