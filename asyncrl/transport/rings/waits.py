"""One protocol for threads and event loops: a generator yields `Readable`, `Pause` or `Call`, which `block` or `wait` performs.

So the code between the waits is written once. An exception in a wait (an error, Ctrl-C, a cancellation) is not thrown into the
generator: it leaves `block` or `wait`, whose caller must clean up.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Readable:
    """Wait until one of the descriptors is readable, or the time is over."""

    fds: list[int]
    seconds: float

    def block(self) -> None:
        """Block this thread in poll(2)."""
        poll = select.poll()
        for fd in self.fds:
            poll.register(fd, select.POLLIN)
        poll.poll(max(1.0, self.seconds * 1000))  # 0 ms would not wait

    async def wait(self) -> None:
        """Wait in the loop's selector."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        for fd in self.fds:
            loop.add_reader(fd, wake)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    await woken
        finally:
            for fd in self.fds:
                loop.remove_reader(fd)


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait until the time is over."""

    seconds: float

    def block(self) -> None:
        time.sleep(self.seconds)

    async def wait(self) -> None:
        await asyncio.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Call:
    """Call `work`, which may block; the generator gets its result."""

    work: Callable[[], Any]

    def block(self) -> Any:
        return self.work()

    async def wait(self) -> Any:
        """Call `work` in another thread. A cancelled caller waits for the end of `work`, so that no work outlives its caller."""
        future = asyncio.get_running_loop().run_in_executor(None, self.work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # asyncio logs exceptions that are never retrieved
            raise


# The longest wait in seconds. Longer waits are split, so that a suspension is noticed. Each part wakes the process once.
SLICE_S = 10.0
_LATE_S = 1.0


def stopped_s(began: float, limit_s: float) -> float:
    """Seconds since `began` (`time.monotonic`) if this process was suspended during the wait, else 0.

    The process counts as suspended if a wait of at most `limit_s` seconds took more than a second longer.
    """
    elapsed = time.monotonic() - began
    return elapsed if elapsed > limit_s + _LATE_S else 0.0


Waits: TypeAlias = Generator[Readable | Pause | Call, Any, None]


def block(waits: Waits) -> None:
    """Run the generator to its end in this thread."""
    result = None
    while True:
        try:
            step = waits.send(result)
        except StopIteration:
            return
        result = step.block()


async def wait(waits: Waits) -> None:
    """Run the generator to its end in this task."""
    result = None
    while True:
        try:
            step = waits.send(result)
        except StopIteration:
            return
        result = await step.wait()
