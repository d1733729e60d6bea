"""Blocking work on another thread, so that the event loop stays free while files are read and written.

A run starts two standby threads. Work that finds both busy gets a fresh thread. If no thread can be started, the work waits for a
standby thread. So the last metrics and the last checkpoint are still written.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from asyncrl.telemetry.lag import top_user_frame

from .shield import call_soon, wait_shielded

T = TypeVar("T")
_running: dict[int, str] = {}  # threads and what they do, for the watchdog


class StandbyThread(threading.Thread):
    """A thread, started by its constructor, that runs the functions in `work` one after the other until `end`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.jobs = 0  # unfinished jobs of `offload`, set on the loop's thread
        self.start()

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # an idle thread must not keep objects alive

    def end(self, limit_s: float | None = None) -> None:
        """Finish the queue and wait for the thread's end, at most `limit_s`."""
        self.work.put(None)
        self.join(limit_s)


_standby_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, list[StandbyThread]] = WeakKeyDictionary()


@contextlib.contextmanager
def standby_threads() -> Iterator[None]:
    """Two standby threads for the running loop, until the context ends."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            thread = StandbyThread("asyncrl-standing")
            stack.callback(thread.end)
            _standby_threads.setdefault(loop, []).append(thread)
            stack.callback(_standby_threads[loop].remove, thread)
        yield


async def offload(function: Callable[[], T], name: str, *, abandon: bool = False) -> T:
    """The result of `function`, run on another thread. A cancelled caller waits until `function` has ended; an error of `function`
    is raised instead of the cancellation.

    With `abandon` a cancelled caller returns at once and the result is lost: for a `function` that may never end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        _running[threading.get_ident()] = name
        try:
            results.append(function())
        except BaseException as error:  # carried to the caller
            errors.append(error)
        finally:
            del _running[threading.get_ident()]
        call_soon(loop, done.set_result, None)

    thread, fresh = _thread_for(loop, name, fresh=abandon)
    thread.jobs += 1
    thread.work.put(work)
    if abandon and fresh:
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            # The thread is a daemon. It ends with its work.
            thread.work.put(None)
            raise
    cancelled = await wait_shielded(done)
    thread.jobs -= 1
    if fresh:
        thread.end()
    if errors:
        try:
            raise errors[0]
        finally:
            # The exception's traceback holds this frame, which must not hold the exception.
            errors.clear()
    if cancelled is not None:
        raise cancelled
    return results[0]


def _thread_for(loop: Any, name: str, *, fresh: bool) -> tuple[StandbyThread, bool]:
    """(thread, whether it was started for this work). `fresh`: start a thread if possible."""
    idlest = min(_standby_threads.get(loop, []), key=lambda each: each.jobs, default=None)
    if idlest is None or idlest.jobs or fresh:
        try:
            return StandbyThread(f"asyncrl-{name}"), True
        except RuntimeError:  # no thread can be started
            if idlest is None:
                raise
    return idlest, False


def offloaded_work() -> str | None:
    """The names and current frames of running `offload` work, for messages; None if nothing runs."""
    descriptions = [
        f"{name} in {top_user_frame(thread) or 'no Python code'}" for thread, name in list(_running.items())
    ]
    return ", ".join(descriptions) or None
