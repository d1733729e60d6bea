"""A Runtime that one cell of a notebook opens and another one closes.

Each cell is a task of its own, and what `async with` opened must be closed by the task that opened it. So a task of its own
holds the Runtime open in between.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Self

from asyncrl.errors import LifecycleError

from .runtime import Runtime


class NotebookRuntime(Runtime):
    """`rt = await NotebookRuntime(config).open()` in one cell, `await rt.close()` in another. Programs use `async with Runtime`."""

    _holder: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Errors: those of opening a Runtime, LifecycleError."""
        if self._holder is not None:
            raise LifecycleError("NotebookRuntime.open was called twice; make a new one")
        self._close_asked = asyncio.Event()
        opened = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(opened), name="asyncrl notebook")
        try:
            await asyncio.wait([opened, self._holder], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the cell was interrupted: what it began is ended
            self._holder.cancel()
            await asyncio.wait([self._holder])
            raise
        if not opened.done():
            await self._holder  # raises what went wrong
        self._holder.add_done_callback(self._say_end)
        return self

    async def close(self) -> None:
        """Trains what was submitted, and closes. Errors: what ended the training, also where that was long before."""
        if self._holder is None:
            raise LifecycleError("NotebookRuntime.close: it was never opened")
        self._close_asked.set()
        await asyncio.shield(self._holder)

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        async with self:
            opened.set_result(None)
            await self._close_asked.wait()

    def _say_end(self, holder: asyncio.Task[None]) -> None:
        error = None if holder.cancelled() else holder.exception()
        if error is not None and not self._close_asked.is_set():
            print(f"asyncrl: the training ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
