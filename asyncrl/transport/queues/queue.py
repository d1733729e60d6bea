"""The queue between tasks of one process: anyio's memory stream, with a name, a gauge and the recording of waits.

    sender, receiver = open_queue("scored", capacity=16)
    producers:  async with sender: await sender.put(item)         consumers:  async for item in receiver: ...

Contract
* Closing an end ends the queue. After the send end is closed, the receivers get the remaining items. Then `get` raises
  `anyio.EndOfStream`, and `async for` ends. After the receive end is closed, `put` raises `anyio.BrokenResourceError`.
  A closed end raises `anyio.ClosedResourceError`.
* Use cancel scopes of anyio, which do not interrupt a `get` that has just received an item. `asyncio.Task.cancel` does
  interrupt it, and the item is lost, so never cancel a single task of a run by this method.
  The item of a cancelled `put` may have been taken at the same moment, so never put the item again.
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
    """Base of both ends: the name, the gauge of the depth, and the recording of waits. `async with` closes the end."""

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
        """Close this end, which all tasks on this side share. Closing twice is fine."""
        self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class QueueSender(_QueueEnd[T]):
    """The send end. All producers share the end; close it after the last producer has ended."""

    _stream: MemoryObjectSendStream[T]

    def put_nowait(self, item: T) -> None:
        """Put the item, or raise anyio.WouldBlock if the queue is full. Other errors: see the module."""
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
    """The receive end. Tasks that iterate over it share the items; each item goes to one task."""

    _stream: MemoryObjectReceiveStream[T]

    async def get(self) -> T:
        """Wait for an item. Does not yield to the loop if an item is ready. Errors: see the module."""
        try:
            item = self._stream.receive_nowait()
        except anyio.WouldBlock:
            # No cause of idle time: a receiver without work would hide the causes of other tasks.
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
