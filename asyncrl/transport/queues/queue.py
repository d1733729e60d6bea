"""The in-process tensor queue: the contract that the queues between processes share.

    sender, receiver = open_queue("scored", capacity=16)
    producer:  async with sender.clone() as out: await out.put(item)         consumer:  async for item in receiver: ...

Guarantees
* It ends by closing: when the last clone of the send end is closed, the receiver gets what is left and then the end
  (`anyio.EndOfStream` from `get`, the end of `async for`). When the receiver is closed, `put` raises
  `anyio.BrokenResourceError`: nobody would ever take the item. A closed end raises `anyio.ClosedResourceError`.
* Cancellation loses and doubles nothing, at any await: a cancelled `put` did not put, a cancelled `get` did not take.
  (anyio's own memory stream hands an item over before the receiver runs again, and loses it to a `Task.cancel` in
  between; here a waiter is only woken, and takes for itself.)
* Items are objects or handles: the queue moves references, never bytes. Order is kept per producer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder
    from ...telemetry.records import Cause

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """What is in a queue, who waits at it, and what went through so far."""

    depth: int
    capacity: int
    most_depth: int  # high-water mark
    puts: int
    gets: int
    open_senders: int
    open_receivers: int
    waiting_puts: int
    waiting_gets: int


def waiting(recorder: Recorder | None, what: str, on: str, cause: Cause) -> AbstractContextManager[object]:
    """To be entered while this task waits for `what`, which `on` brings."""
    if recorder is None:
        return nullcontext()
    task = asyncio.current_task()
    return recorder.wait(task.get_name() if task else "?", what, on=on, cause=cause)


class QueueEnd(ABC):
    """What each end of a queue has: `async with` closes it."""

    _closed = False

    @abstractmethod
    def close(self) -> None:
        """Closing twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class ReceiveEnd(QueueEnd, Generic[T]):
    """What each receive end has besides: `async for`, until the last sender is closed."""

    @abstractmethod
    async def get(self) -> T:
        """Wait for an item. Errors: anyio.EndOfStream after the last one."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


@dataclass(slots=True, eq=False)
class _State(Generic[T]):
    name: str
    capacity: int
    recorder: Recorder | None
    items: deque[T] = field(default_factory=deque)
    senders: int = 0
    receivers: int = 0
    puts: int = 0
    gets: int = 0
    most_depth: int = 0
    putters: deque[asyncio.Future[None]] = field(default_factory=deque)
    getters: deque[asyncio.Future[None]] = field(default_factory=deque)

    def moved(self) -> None:
        self.most_depth = max(self.most_depth, len(self.items))
        if self.recorder is not None:
            self.recorder.gauge(f"queue/{self.name}/depth", len(self.items))

    def waiting(self, what: str, on: str) -> AbstractContextManager[object]:
        return waiting(self.recorder, what, f"{on} of queue {self.name}", "group")

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(
            depth=len(self.items),
            capacity=self.capacity,
            most_depth=self.most_depth,
            puts=self.puts,
            gets=self.gets,
            open_senders=self.senders,
            open_receivers=self.receivers,
            waiting_puts=sum(not f.done() for f in self.putters),
            waiting_gets=sum(not f.done() for f in self.getters),
        )


def open_queue(name: str, capacity: int, recorder: Recorder | None = None) -> tuple[QueueSender[T], QueueReceiver[T]]:
    """Both ends of a new queue for at most `capacity` >= 1 items."""
    if capacity < 1:
        raise ValueError(f"queue {name!r}: capacity must be at least 1, found {capacity}")
    state: _State[T] = _State(name, capacity, recorder)
    return QueueSender(state), QueueReceiver(state)


class QueueSender(QueueEnd, Generic[T]):
    """The send end. One per producer: `clone` it, and close every clone."""

    def __init__(self, state: _State[T]) -> None:
        self._state = state
        state.senders += 1

    def put_nowait(self, item: T) -> None:
        """Errors: anyio.WouldBlock when the queue is full; the closed ones of the module docstring."""
        state = self._state
        self._check_open()
        if len(state.items) >= state.capacity:
            raise anyio.WouldBlock
        state.items.append(item)
        state.puts += 1
        state.moved()
        wake_one(state.getters)

    async def put(self, item: T) -> None:
        """Wait for room, then put. Errors: the closed ones of the module docstring, also while it waits."""
        state = self._state
        while True:
            self._check_open()
            if len(state.items) < state.capacity:
                return self.put_nowait(item)
            with state.waiting("room", "the receiver"):
                await wait_in(state.putters)

    def clone(self) -> QueueSender[T]:
        """Another send end, to be closed by itself. Errors: anyio.ClosedResourceError."""
        if self._closed:
            raise anyio.ClosedResourceError
        return QueueSender(self._state)

    def close(self) -> None:
        """Closing twice is fine. Closing the last clone lets the receiver end."""
        if not self._closed:
            self._closed = True
            self._state.senders -= 1
            if not self._state.senders:
                wake_all(self._state.getters)
            wake_all(self._state.putters)  # those who wait on this very end must hear that it is closed

    def statistics(self) -> QueueStatistics:
        """A snapshot, the same from either end."""
        return self._state.statistics()

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._state.receivers:
            raise anyio.BrokenResourceError


class QueueReceiver(ReceiveEnd[T]):
    """The receive end. Clones share the items: each item goes to one of them."""

    def __init__(self, state: _State[T]) -> None:
        self._state = state
        state.receivers += 1

    def get_nowait(self) -> T:
        """Errors: anyio.WouldBlock when nothing is there, anyio.EndOfStream when nothing ever will be."""
        state = self._state
        if self._closed:
            raise anyio.ClosedResourceError
        if not state.items:
            raise anyio.EndOfStream if not state.senders else anyio.WouldBlock
        item = state.items.popleft()
        state.gets += 1
        state.moved()
        wake_one(state.putters)
        return item

    async def get(self) -> T:
        """Wait for an item. Errors: anyio.EndOfStream after the last one, anyio.ClosedResourceError."""
        state = self._state
        while True:
            try:
                return self.get_nowait()
            except anyio.WouldBlock:
                pass
            with state.waiting("an item", "a sender"):
                await wait_in(state.getters)

    def clone(self) -> QueueReceiver[T]:
        """Another receive end, to be closed by itself. Errors: anyio.ClosedResourceError."""
        if self._closed:
            raise anyio.ClosedResourceError
        return QueueReceiver(self._state)

    def close(self) -> None:
        """Closing twice is fine. Items left in the queue stay with it and are dropped with it."""
        if not self._closed:
            self._closed = True
            self._state.receivers -= 1
            if not self._state.receivers:
                wake_all(self._state.putters)
            wake_all(self._state.getters)

    def statistics(self) -> QueueStatistics:
        """A snapshot, the same from either end."""
        return self._state.statistics()


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
    """Everybody who waits."""
    while waiters:
        wake_one(waiters)
