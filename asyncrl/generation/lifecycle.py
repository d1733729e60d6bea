"""Opens and closes an engine. An engine can be opened once. While it is open, one task, its *owner*, does the work.

When the owner task ends (by closing, an error or a cancellation), all waiting calls get an exception, so none of them hangs. An
error of the owner is also raised by `async with engine`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from asyncrl.errors import EngineClosed, LifecycleError

# Name of the owner task, and of the engine's track in traces.
TRACK = "engine"


@dataclass(eq=False, slots=True)
class WeightUpdate:
    """A waiting call of `update_weights`. It ends when all later tokens will come from `version` or a newer version."""

    version: int
    future: asyncio.Future[None]


class BaseEngine(ABC):
    """Base class of all engines. See the module docstring."""

    def __init__(self) -> None:
        self._closed = False
        self._failure: BaseException | None = None
        self._tasks: TaskGroup | None = None
        self._opened_in: asyncio.Task[Any] | None = None  # None: never opened

    @abstractmethod
    async def _run_owner(self) -> None:
        """The owner task, which runs until it is cancelled. An error ends the engine."""

    @abstractmethod
    def _take_futures(self) -> list[asyncio.Future[Any]]:
        """Drop all requests after the owner has ended. Returns the futures of the waiting calls."""

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None."""
        return self._failure

    async def __aenter__(self) -> Self:
        if self._opened_in is not None:
            state = "closed" if self._closed else "open"
            raise LifecycleError(f"this engine is {state}: an engine is opened once; create a new one")
        self._opened_in = asyncio.current_task()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run, name=TRACK)
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        if self._tasks is None:
            return None
        if asyncio.current_task() is not self._opened_in:
            raise LifecycleError("this task did not open the engine; close the engine in the task that opened it")
        tasks, self._tasks = self._tasks, None
        self._closed = True
        tasks.cancel_scope.cancel()
        # If the owner fails, the task group cancels the body of `async with`, and must get that cancellation back. Any other
        # exception of the body must not go to the task group: the group would wrap it, and `async with` must raise it unchanged.
        cancelled_by_group = self._failure is not None and isinstance(exc[1], asyncio.CancelledError)
        try:
            await tasks.__aexit__(*(exc if cancelled_by_group else (None, None, None)))
        except BaseExceptionGroup:
            if self._failure is None:
                raise
        finally:
            # Needed if the owner task is cancelled before it has started: then `_run` never calls `_end`.
            self._end(None)
        if self._failure is not None:
            raise self._failure from self._failure.__cause__  # `from` hides the context
        return None

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._closed_error()
        if self._opened_in is None:
            raise EngineClosed("the engine was never opened: use it inside `async with engine`")
        if self._closed:
            raise EngineClosed("the engine is closed")

    async def _run(self) -> None:
        try:
            await self._run_owner()
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Fail all waiting calls after the end of the owner. `_end` may run more than once; the first error stays."""
        failed = error is not None and not isinstance(error, asyncio.CancelledError)
        if failed and self._failure is None:
            self._failure = error
        self._closed = True
        for future in self._take_futures():
            if not future.done():
                future.set_exception(self._closed_error())

    def _closed_error(self) -> EngineClosed:
        """A new exception for one waiting call, with the failure as its cause. EngineClosed is no fault of the request,
        so the caller does not count the request's group as failed."""
        if self._failure is None:
            return EngineClosed("the engine closed while this request was waiting")
        error = EngineClosed(f"the engine failed: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error
