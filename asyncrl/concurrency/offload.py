"""Blocking work on another thread, so that the event loop stays free while files are read and written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from asyncrl.telemetry.lag import top_user_frame

from .shield import call_soon, wait_shielded

T = TypeVar("T")
_running: dict[int, str] = {}  # id of a thread -> name of its work


class StandbyThread(threading.Thread):
    """A thread, started by its constructor, that runs the functions in `work` one after the other until `end`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # an idle thread must not keep objects alive

    def end(self, limit_s: float | None = None) -> None:
        """End the thread after the functions in `work`. Wait for its end for at most `limit_s` seconds; None: without a limit."""
        self.work.put(None)
        self.join(limit_s)


async def offload(function: Callable[[], T], name: str, *, abandon: bool = False) -> T:
    """Run `function` on a new thread and return its result. A cancelled caller waits until `function` has ended; an error of
    `function` is raised instead of the cancellation.

    With `abandon` a cancelled caller does not wait, and the result is lost. Use `abandon` for a `function` that may never end.
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

    # A daemon: an abandoned thread does not keep the process alive.
    thread = threading.Thread(target=work, name=f"asyncrl-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system refuses a thread: block the loop instead
        if abandon:
            raise
        return function()
    cancelled = None
    if abandon:
        await asyncio.wait([done])
    else:
        cancelled = await wait_shielded(done)
    thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            # Avoid a reference cycle: the exception's traceback holds this frame.
            errors.clear()
    if cancelled is not None:
        raise cancelled
    return results[0]


def offloaded_work() -> str | None:
    """Names and current frames of the functions that `offload` runs now, for messages; None if nothing runs."""
    descriptions = [
        f"{name} in {top_user_frame(thread) or 'no Python code'}" for thread, name in list(_running.items())
    ]
    return ", ".join(descriptions) or None
