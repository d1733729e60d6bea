"""Blocking work on a thread of its own, so that the event loop stays free while files are read and models are described."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from asyncrl.telemetry.lag import top_user_frame

from .shield import wait_shielded

T = TypeVar("T")
_running: dict[int, str] = {}  # threads and what they do, for the watchdog


async def offload(function: Callable[[], T], name: str) -> T:
    """The result of `function`, run on a fresh thread. A cancelled caller waits for its end; an error of it is raised first.

    Not a pool: a Runtime inside a foreign loop leaves no idle worker thread behind.
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
        loop.call_soon_threadsafe(done.set_result, None)

    thread = threading.Thread(target=work, name=f"asyncrl-{name}", daemon=True)
    thread.start()
    cancelled = await wait_shielded(done)
    thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # the exception's traceback holds this frame, which must not hold the exception
    if cancelled is not None:
        raise cancelled
    return results[0]


def where() -> str | None:
    """What the threads of `offload` execute now, in words; None if there is none."""
    places = [f"{name} in {top_user_frame(thread) or 'no Python code'}" for thread, name in list(_running.items())]
    return ", ".join(places) or None
