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
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

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
    """What each end of a queue has: `async with` closes it. `shared`: what its clones share."""

    _closed = False

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def clone(self) -> Self:
        """Another end of this side, to be closed by itself. Errors: anyio.ClosedResourceError."""
        if self._closed:
            raise anyio.ClosedResourceError
        return type(self)(self._shared)

    @abstractmethod
    def close(self) -> None:
        """Closing the last clone lets the other side end. Twice is fine."""

    @abstractmethod
    def statistics(self) -> QueueStatistics:
        """A snapshot, as this end knows it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class SendEnd(QueueEnd, Generic[T]):
    """The send end of any queue, in a process or between two. One per producer: `clone` it, and close every clone."""

    @abstractmethod
    def put_nowait(self, item: T) -> None:
        """Put, or raise anyio.WouldBlock. Other errors: anyio.BrokenResourceError without a receiver,
        anyio.ClosedResourceError."""

    @abstractmethod
    async def put(self, item: T) -> None:
        """Wait for room, then put. Errors: as `put_nowait`, also while it waits. A `put` that is cancelled did not put."""


class ReceiveEnd(QueueEnd, Generic[T]):
    """The receive end of any queue: `async for`, until the last sender is closed. Clones share the items: each goes to one."""

    @abstractmethod
    def get_nowait(self) -> T:
        """The next item, or anyio.WouldBlock. Other errors: anyio.EndOfStream after the last item, anyio.BrokenResourceError
        where the sender died, anyio.ClosedResourceError."""

    @abstractmethod
    def _waiting(self) -> tuple[deque[asyncio.Future[None]], AbstractContextManager[object]]:
        """Who waits for an item, and what is told meanwhile."""

    async def get(self) -> T:
        """Wait for an item. Errors: as `get_nowait`, also while it waits. A `get` that is cancelled did not take."""
        while True:
            try:
                return self.get_nowait()
            except anyio.WouldBlock:
                pass
            waiters, told = self._waiting()
            with told:
                await wait_in(waiters)

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


class QueueSender(SendEnd[T]):
    """See `SendEnd` and the module docstring."""

    _shared: _State[T]

    def __init__(self, state: _State[T]) -> None:
        super().__init__(state)
        state.senders += 1

    def put_nowait(self, item: T) -> None:
        """As `SendEnd.put_nowait`."""
        state = self._shared
        self._check_open()
        if len(state.items) >= state.capacity:
            raise anyio.WouldBlock
        state.items.append(item)
        state.puts += 1
        state.moved()
        wake_one(state.getters)

    async def put(self, item: T) -> None:
        """As `SendEnd.put`."""
        state = self._shared
        while True:
            self._check_open()
            if len(state.items) < state.capacity:
                return self.put_nowait(item)
            with state.waiting("room", "the receiver"):
                await wait_in(state.putters)

    def close(self) -> None:
        """As `QueueEnd.close`."""
        if not self._closed:
            self._closed = True
            self._shared.senders -= 1
            if not self._shared.senders:
                wake_all(self._shared.getters)
            wake_all(self._shared.putters)  # those who wait on this very end must hear that it is closed

    def statistics(self) -> QueueStatistics:
        """A snapshot, the same from either end."""
        return self._shared.statistics()

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._shared.receivers:
            raise anyio.BrokenResourceError


class QueueReceiver(ReceiveEnd[T]):
    """See `ReceiveEnd` and the module docstring."""

    _shared: _State[T]

    def __init__(self, state: _State[T]) -> None:
        super().__init__(state)
        state.receivers += 1

    def get_nowait(self) -> T:
        """As `ReceiveEnd.get_nowait`."""
        state = self._shared
        if self._closed:
            raise anyio.ClosedResourceError
        if not state.items:
            raise anyio.EndOfStream if not state.senders else anyio.WouldBlock
        item = state.items.popleft()
        state.gets += 1
        state.moved()
        wake_one(state.putters)
        return item

    def _waiting(self) -> tuple[deque[asyncio.Future[None]], AbstractContextManager[object]]:
        return self._shared.getters, self._shared.waiting("an item", "a sender")

    def close(self) -> None:
        """Closing twice is fine. Items left in the queue stay with it and are dropped with it."""
        if not self._closed:
            self._closed = True
            self._shared.receivers -= 1
            if not self._shared.receivers:
                wake_all(self._shared.putters)
            wake_all(self._shared.getters)

    def statistics(self) -> QueueStatistics:
        """A snapshot, the same from either end."""
        return self._shared.statistics()


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
