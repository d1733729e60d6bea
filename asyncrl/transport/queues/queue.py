"""Queues: the one between two tasks of a process, and the contract of those between processes (`tensor_queue`).

    sender, receiver = open_queue("scored", capacity=16)
    producers:  async with sender: await sender.put(item)         consumers:  async for item in receiver: ...

Guarantees
* It ends by closing. When the send end is closed, the receivers get the items that are left and then the end
  (`anyio.EndOfStream` from `get`, the end of `async for`). When the receive end is closed, `put` raises
  `anyio.BrokenResourceError`. A closed end raises `anyio.ClosedResourceError`.
* A cancelled `get` did not take. A cancelled `put` did not put between processes; in a process its item may have been taken
  in the same moment, so nobody puts it again. In a process this holds for the cancel scopes of anyio, which do not interrupt
  a task whose item was handed over. `asyncio.Task.cancel` does, and the item is lost: no task of a run is cancelled that way
  by itself.
* A queue in a process moves references, never bytes. Order is kept per producer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder
    from ...telemetry.records import Cause

T = TypeVar("T")


def waiting(recorder: Recorder | None, what: str, on: str, cause: Cause) -> AbstractContextManager[object]:
    """To be entered while this task waits for `what`, which `on` brings."""
    if recorder is None:
        return nullcontext()
    task = asyncio.current_task()
    return recorder.wait(task.get_name() if task else "?", what, on=on, cause=cause)


class QueueEnd(ABC):
    """One end of a queue, in a process or between two: `async with` closes it."""

    @abstractmethod
    def close(self) -> None:
        """End this side of the queue. Closing twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class _LocalEnd(QueueEnd, Generic[T]):
    """What both ends in a process share: the name, the gauge of the depth, and what the recorder shows of a wait."""

    def __init__(
        self,
        name: str,
        stream: MemoryObjectSendStream[T] | MemoryObjectReceiveStream[T],
        recorder: Recorder | None,
    ) -> None:
        self._name = name
        self._stream = stream
        self._recorder = recorder

    def _record_depth(self) -> None:
        if self._recorder is not None:
            self._recorder.gauge(f"queue/{self._name}/depth", self._stream.statistics().current_buffer_used)

    def _waiting(self, what: str, on: str) -> AbstractContextManager[object]:
        return waiting(self._recorder, what, f"{on} of queue {self._name}", "group")

    def close(self) -> None:
        """As `QueueEnd.close`; one end serves all tasks of its side."""
        self._stream.close()


class QueueSender(_LocalEnd[T]):
    """The send end in a process. Every producer uses the same one; whoever opened the queue closes it after the last."""

    _stream: MemoryObjectSendStream[T]

    def put_nowait(self, item: T) -> None:
        """Put the item, or raise anyio.WouldBlock. Other errors: those of the module docstring."""
        self._stream.send_nowait(item)
        self._record_depth()

    async def put(self, item: T) -> None:
        """Wait for room, then put the item. Does not yield where there is room. Errors: those of the module docstring."""
        try:
            self._stream.send_nowait(item)
        except anyio.WouldBlock:
            with self._waiting("room", "the receiver"):
                await self._stream.send(item)
        self._record_depth()


class QueueReceiver(_LocalEnd[T]):
    """The receive end in a process. Each item goes to one of the tasks that iterate over it."""

    _stream: MemoryObjectReceiveStream[T]

    async def get(self) -> T:
        """Wait for an item. Does not yield where there is one. Errors: those of the module docstring."""
        try:
            item = self._stream.receive_nowait()
        except anyio.WouldBlock:
            with self._waiting("an item", "a sender"):
                item = await self._stream.receive()
        self._record_depth()
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


def open_queue(name: str, capacity: int, recorder: Recorder | None = None) -> tuple[QueueSender[T], QueueReceiver[T]]:
    """Both ends of a new queue in this process for at most `capacity` >= 1 items."""
    if capacity < 1:
        raise ValueError(f"queue {name!r}: capacity must be at least 1, found {capacity}")
    send, receive = anyio.create_memory_object_stream[T](capacity)
    return QueueSender(name, send, recorder), QueueReceiver(name, receive, recorder)


async def wait_in(waiters: deque[asyncio.Future[None]]) -> None:
    """Wait to be woken; a wake-up that meets a cancelled waiter is passed on."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        await future
    except asyncio.CancelledError:
        if future.cancelled():
            if future in waiters:
                waiters.remove(future)
        else:
            wake_one(waiters)
        raise


def wake_one(waiters: deque[asyncio.Future[None]]) -> None:
    """The first that still waits."""
    while waiters:
        future = waiters.popleft()
        if not future.done():
            future.set_result(None)
            return


def wake_all(waiters: deque[asyncio.Future[None]]) -> None:
    """Wake every task that waits."""
    while waiters:
        wake_one(waiters)
