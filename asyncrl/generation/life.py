"""The life of an engine, whoever computes: opened once, one owner task, and the promise that no waiter ever hangs.

Whatever ends the owner (closing, an error, a cancellation) fails everybody who waits, and an error leaves through
`async with engine` as well.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from asyncrl.errors import EngineClosed, LifecycleError

WHO = "engine"


class EngineState(Enum):
    """The life of an engine."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class EngineLife(ABC):
    """Base of all engines; see the module docstring."""

    def __init__(self) -> None:
        self._state = EngineState.NEW
        self._failure: BaseException | None = None
        self._tasks: TaskGroup | None = None
        self._opened_in: asyncio.Task[Any] | None = None

    @abstractmethod
    async def _own(self) -> None:
        """The owner task, for ever: it serves until it is cancelled. An error of it is the engine's."""

    @abstractmethod
    def _forget(self) -> list[asyncio.Future[Any]]:
        """The owner is done: what everybody waits for, which is nobody's any more."""

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return self._failure is not None

    async def __aenter__(self) -> Self:
        if self._state is not EngineState.NEW:
            raise LifecycleError(f"this engine is {self._state.value}: an engine is opened once; make a new one")
        self._state = EngineState.OPEN
        self._opened_in = asyncio.current_task()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run, name=WHO)
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        if self._tasks is None:
            return None
        if asyncio.current_task() is not self._opened_in:
            raise LifecycleError("an engine is closed in the task that opened it; this is another one")
        tasks, self._tasks = self._tasks, None
        self._state = EngineState.CLOSED
        tasks.cancel_scope.cancel()
        # A cancellation that our own failed owner caused must be given back to its scope; anything else goes on as it
        # came.
        ours = self._failure is not None and isinstance(exc[1], asyncio.CancelledError)
        try:
            await tasks.__aexit__(*(exc if ours else (None, None, None)))
        except BaseExceptionGroup:
            if self._failure is None:
                raise
        finally:
            self._end(None)  # also where the owner was cancelled before its first step
        if self._failure is not None:
            raise self._failure from self._failure.__cause__
        return None

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._reason()
        if self._state is not EngineState.OPEN:
            raise EngineClosed(
                "the engine was never opened: use it inside `async with engine`"
                if self._state is EngineState.NEW
                else "the engine is closed"
            )

    async def _run(self) -> None:
        try:
            await self._own()
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """The owner is done: nobody may wait any longer. Called for the reason, and again for what came after it."""
        failed = error is not None and not isinstance(error, asyncio.CancelledError)
        if failed and self._failure is None:
            self._failure = error
        self._state = EngineState.CLOSED
        for future in self._forget():
            if not future.done():
                future.set_exception(self._reason())

    def _reason(self) -> EngineClosed:
        """A fresh exception for each waiter (they get tracebacks of their own), with the failure as its cause. Not a failure of
        their requests: whoever waits for a group must not count it as one that cannot be played."""
        if self._failure is None:
            return EngineClosed("the engine closed while this request was waiting")
        reason = EngineClosed(f"the engine failed: {type(self._failure).__name__}: {self._failure}")
        reason.__cause__ = self._failure
        return reason
