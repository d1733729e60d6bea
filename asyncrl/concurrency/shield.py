"""Waiting for something that cannot be cancelled, and waking a loop that may be gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio


async def wait_shielded(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `future` is done, whatever is cancelled meanwhile; the last cancellation that arrived, or None.

    The caller owns `future` and raises what is returned. The anyio shield keeps an outer cancel scope from delivering
    its cancellation again in every iteration of the loop; a native `Task.cancel` pierces that shield and is caught.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                # asyncio.wait leaves the future alone when the waiting task is cancelled.
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
    return cancelled


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    """`call_soon_threadsafe` on a loop that may have been closed: then nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
