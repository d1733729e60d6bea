"""The queue between tasks of one process: anyio's memory stream, with a name, a gauge and the recording of waits.

    sender, receiver = open_queue("scored", capacity=16)
    a single producer:  async with sender: await sender.put(item)         a consumer:  async for item in receiver: ...

Contract
* Closing either end ends the queue. After `sender.close()` the receiver gets the remaining items; then `get` raises
  `anyio.EndOfStream`, and `async for` ends. After `receiver.close()`, `put` raises `anyio.BrokenResourceError`.
  A call on a closed end raises `anyio.ClosedResourceError`.
* Cancel tasks by anyio's cancel scopes: these do not interrupt a `get` that has just received an item. `asyncio.Task.cancel`
  interrupts such a `get`, and the item is lost.
* Never repeat a cancelled `put`: a receiver may have taken the item at the same moment.
* A queue moves references, never bytes. The items of one producer keep their order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ...concurrency.shield import record_wait

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder
    from ...telemetry.records import Cause

T = TypeVar("T")


class _QueueEnd(Generic[T]):
    """Base of both ends: the name, the gauge of the queue's depth, and the recording of waits. `async with` closes the end."""

    def __init__(
        self, name: str, stream: MemoryObjectSendStream[T] | MemoryObjectReceiveStream[T], recorder: Recorder | None
    ) -> None:
        self._name = name
        self._stream = stream
        self._recorder = recorder

    def _record_depth(self) -> None:
        if self._recorder is not None:
            self._recorder.gauge(f"queue/{self._name}/depth", self._stream.statistics().current_buffer_used)

    def _record_wait(self, need: str, source: str, cause: Cause | None) -> AbstractContextManager[object]:
        return record_wait(self._recorder, need, f"{source} of queue {self._name}", cause)

    def close(self) -> None:
        """Close this end for all tasks that share it. Closing twice is fine."""
        self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class QueueSender(_QueueEnd[T]):
    """The send end. All producers share this object; close it after the last producer has ended."""

    _stream: MemoryObjectSendStream[T]

    def put_nowait(self, item: T) -> None:
        """Put the item. Errors: anyio.WouldBlock if the queue is full; see the module for others."""
        self._stream.send_nowait(item)
        self._record_depth()

    async def put(self, item: T) -> None:
        """Wait for room, then put the item. Does not yield to the loop if there is room. Errors: see the module."""
        try:
            self._stream.send_nowait(item)
        except anyio.WouldBlock:
            with self._record_wait("room", "the receiver", "group"):
                await self._stream.send(item)
        self._record_depth()


class QueueReceiver(_QueueEnd[T]):
    """The receive end. Several tasks may iterate over it: each item goes to one of them."""

    _stream: MemoryObjectReceiveStream[T]

    async def get(self) -> T:
        """Wait for an item. Does not yield to the loop if an item is ready. Errors: see the module."""
        try:
            item = self._stream.receive_nowait()
        except anyio.WouldBlock:
            # None: a receiver without work is no cause of idle time. With a cause, its wait would hide the causes of other waits.
            with self._record_wait("an item", "a sender", None):
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
    """Both ends of a new queue for at most `capacity` items."""
    send, receive = anyio.create_memory_object_stream[T](capacity)
    return QueueSender(name, send, recorder), QueueReceiver(name, receive, recorder)
