"""The waits of a producer: `ThreadWaits` blocks a thread, `LoopWaits` waits on an event loop.

A coroutine whose every `await` is a wait of one of the two classes is written once for both. `run_blocking` runs it in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


class ThreadWaits:
    """Waits that block the thread, so their coroutines never suspend."""

    @staticmethod
    async def readable(fds: Sequence[int], seconds: float) -> None:
        """Wait until one of the descriptors is readable, at most `seconds`."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(max(1.0, seconds * 1000))  # 0 ms would not wait

    @staticmethod
    async def call(work: Callable[[], T]) -> T:
        """The result of `work`, which may block."""
        return work()


class LoopWaits:
    """The same waits on the running event loop."""

    @staticmethod
    async def readable(fds: Sequence[int], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        for fd in fds:
            loop.add_reader(fd, woken.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await woken.wait()
        finally:
            for fd in fds:
                loop.remove_reader(fd)

    @staticmethod
    async def call(work: Callable[[], T]) -> T:
        """Calls `work` in another thread. A cancelled caller waits for the end of `work`, so that no work outlives its caller."""
        future = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # asyncio logs exceptions that are never retrieved
            raise


Waits: TypeAlias = type[ThreadWaits] | type[LoopWaits]

# The longest wait in seconds. Longer waits are split, so that a suspension is noticed. Each part wakes the process once.
SLICE_S = 10.0
_LATE_S = 1.0


def stopped_s(began: float, limit_s: float) -> float:
    """Seconds since `began` (`time.monotonic`) if this process was suspended during the wait, else 0.

    The process counts as suspended if a wait of at most `limit_s` seconds took more than a second longer.
    """
    elapsed = time.monotonic() - began
    return elapsed if elapsed > limit_s + _LATE_S else 0.0


def run_blocking(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that awaits only `ThreadWaits` to its end."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
