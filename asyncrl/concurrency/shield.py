"""Helpers for asyncio: waits in spite of cancellations, calls into a loop that may be closed, and the recording of waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder
    from ..telemetry.records import Cause


async def wait_shielded(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `future` is done, even if the waiting task is cancelled. Returns the last cancellation, or None.

    The caller must raise the returned cancellation. The anyio shield keeps an outer cancel scope from cancelling again in every
    iteration. A native `Task.cancel` passes the shield and is caught below.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                # Unlike `await future`, asyncio.wait does not cancel the future together with the waiting task.
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
    return cancelled


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    """`loop.call_soon_threadsafe`, or nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def record_wait(recorder: Recorder | None, what: str, on: str, cause: Cause | None) -> AbstractContextManager[object]:
    """`Recorder.wait` with the name of the current task as `who`. Without a recorder the block records nothing."""
    if recorder is None:
        return nullcontext()
    task = asyncio.current_task()
    return recorder.wait(task.get_name() if task else "?", what, on=on, cause=cause)
