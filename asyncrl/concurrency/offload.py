"""Blocking work on another thread, so that the event loop stays free while files are read and models are described.

A run has two threads that stand by for it from the start on. More work gets fresh ones; where none can be had it waits for those
two, and so the last metrics and the last checkpoint are written all the same.
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
    """Started by its making; does what is put into `work`, one after the other, until `end`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.jobs = 0  # of `offload`, whose loop alone changes it
        self.start()

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # else an idle thread would keep what it worked on

    def end(self, limit_s: float | None = None) -> None:
        """Wait for it, for so long."""
        self.work.put(None)
        self.join(limit_s)


_standing: WeakKeyDictionary[asyncio.AbstractEventLoop, list[StandbyThread]] = WeakKeyDictionary()


@contextlib.contextmanager
def standing_by() -> Iterator[None]:
    """Two threads more for this loop, inside."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            thread = StandbyThread("asyncrl-standing")
            stack.callback(thread.end)
            _standing.setdefault(loop, []).append(thread)
            stack.callback(_standing[loop].remove, thread)
        yield


async def offload(function: Callable[[], T], name: str, *, abandon: bool = False) -> T:
    """The result of `function`, run on another thread. A cancelled caller waits for its end; an error of it is raised first.

    With `abandon` a cancelled caller leaves at once, and nobody learns how `function` ended: for waits that may never end.
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
    """A thread, and whether it was started for this work. `fresh` asks for such a one, which there may not be."""
    idlest = min(_standing.get(loop, []), key=lambda each: each.jobs, default=None)
    if idlest is None or idlest.jobs or fresh:
        try:
            return StandbyThread(f"asyncrl-{name}"), True
        except RuntimeError:  # no thread can be started
            if idlest is None:
                raise
    return idlest, False


def where() -> str | None:
    """What the threads of `offload` execute now, in words; None if there is none."""
    places = [f"{name} in {top_user_frame(thread) or 'no Python code'}" for thread, name in list(_running.items())]
    return ", ".join(places) or None
