"""Two helpers for asyncio: waiting in spite of cancellations, and calling into a loop that may be closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio


async def wait_shielded(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `future` is done, also if the waiting task is cancelled. Returns the last cancellation, or None.

    The caller raises the returned cancellation. The anyio shield stops an outer cancel scope from cancelling again in every
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
