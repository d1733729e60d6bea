"""Puts records into the ring of another process: `Producer` for threads, `AsyncProducer` for one event loop.

When `put()` returns, the record is accepted: it is in shared memory and survives the death of either process.

* Full ring: `put` waits without polling until the owner releases a record. At the deadline `put` raises `RingFull`.
* Death of the owner: records are accepted while the ring has room, and the next owner finds them. A `put` without an owner
  first tries to attach to a new owner.
* Close by the owner: if there is no new owner, one `put` raises `RingDetached`, as a notice. Later puts wait for an owner.

If the owner ends during a `put` and the `put` raises, the record may be stored. Put the same record again: owners remove
duplicates by (epoch, group, member). `asyncrl.client` uses this module, so this module imports only numpy and the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ...errors import LifecycleError, RingDetached, RingFull
from ...records.write import Plan
from ..memory import segment as segments
from ..memory.segment import Segment, path_of
from ..memory.words import fault
from .attachment import Attachment, attach
from .ring import RingMemory, RingWriter

# Waits are split into parts of at most this many seconds, because `_suspended_s` notices only suspensions that outlast the part.
_SLICE_S = 10.0

T = TypeVar("T")


class ThreadWaits:
    """How a `Producer` waits: by blocking the thread. `_attach` and `_complete_put` serve both kinds of producers. With
    `ThreadWaits` these two coroutines never suspend, so `_run_blocking` runs them without an event loop."""

    @staticmethod
    async def readable(fds: Sequence[int], seconds: float) -> None:
        """Wait until one of the descriptors is readable, at most `seconds`. Without descriptors: sleep."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(max(1.0, seconds * 1000))  # 0 ms would not wait

    @staticmethod
    async def call(work: Callable[[], T]) -> T:
        """The result of `work`, which may block."""
        return work()


class LoopWaits:
    """How an `AsyncProducer` waits: on the running event loop."""

    @staticmethod
    async def readable(fds: Sequence[int], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        for fd in fds:
            loop.add_reader(fd, woken.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await woken.wait()
        finally:
            for fd in fds:
                loop.remove_reader(fd)

    @staticmethod
    async def call(work: Callable[[], T]) -> T:
        """Calls `work` in another thread. A cancelled caller waits for the end of `work`, so that no work outlives its caller."""
        future = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # asyncio logs exceptions that are never retrieved
            raise


Waits: TypeAlias = type[ThreadWaits] | type[LoopWaits]


class Need(Enum):
    """What a put waits for."""

    NOTHING = "nothing"  # the record is accepted
    SPACE = "space"  # a release
    OWNER = "owner"  # an attachment to an owner


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """Counts of this producer, and the use of its ring."""

    puts: int
    waits: int  # puts that waited for a release
    attached: bool
    attachments: int
    records_held: int  # accepted and not released
    bytes_held: int


class ProducerCore:
    """Base of both producers: everything but the waits and the lock. The subclass holds its lock during a put and a close."""

    def __init__(self, name: str) -> None:
        """A producer that is not attached yet. Errors: ConfigError for an invalid name."""
        path_of(name)
        self.name = name
        self.identity = secrets.token_bytes(16)
        self.closed = False
        self.unnotified = False  # whether an accepted record may be unknown to the owner
        self.puts = self.waits = self.attachments = 0
        self._segment: Segment | None = None
        self._writer: RingWriter | None = None
        # Held to replace or close the ring, and to read the ring in a call that does not hold the lock of puts.
        self._ring_lock = threading.RLock()
        self._attachment: Attachment | None = None
        self._end_raised = False  # whether a put has already raised for this owner's end
        self._poll = select.poll()
        self._forks = segments.forks

    def check(self) -> None:
        """Errors: LifecycleError for a closed producer, and in a forked child for a producer that the parent made."""
        if self.closed:
            raise LifecycleError(f"the producer of ring {self.name!r} is closed; attach a new one")
        if self._forks != segments.forks:
            raise LifecycleError(
                f"the producer of ring {self.name!r} was made before a fork; attach again, because a ring has one writer"
            )

    def try_attach(self, deadline: float) -> Attachment | None:
        """Try to attach once. Returns None if the ring has no owner. Errors: RingDetached if the owner refuses or is late."""
        self.check()
        self._detach()
        try:
            segment = Segment.attach(self.name)
            try:
                attachment = attach(segment, self.identity, deadline)
            finally:
                segment.close(unlink=False)
            if attachment is None:
                return None
            try:
                self._open_ring(attachment.ring)
            except BaseException:
                attachment.close()
                raise
        except FileNotFoundError:  # no such name, or the owner has just removed it
            return None
        self._attachment = attachment
        self._end_raised = False
        self.unnotified = False  # an owner polls the ring of each producer that attaches
        self.attachments += 1
        self._poll = select.poll()
        self._poll.register(attachment.connection, select.POLLIN)
        return attachment

    def try_put(self, plan: Plan, *, ownerless: bool) -> Need:
        """Try once to put, and return what the put must wait for. `ownerless`: no owner listens, so put without notifying."""
        self.check()
        writer, segment, attachment = self._writer, self._segment, self._attachment
        if writer is None or segment is None or segment.sealed:
            return Need.OWNER
        if attachment is None and not ownerless:
            return Need.OWNER
        if not writer.try_put(plan):
            return Need.OWNER if attachment is None else Need.SPACE
        fault("producer.notify")
        self.unnotified = True
        if attachment is not None:
            os.eventfd_write(attachment.data, 1)
            # If the owner is connected after the write, the write has notified it. If not, a new owner may not know of the record.
            self.unnotified = self._detach_if_disconnected()
        if segment.sealed:
            # The owner may have polled for the last time before this record was stored: put the record again, for the next owner.
            return Need.OWNER
        self.puts += 1
        return Need.NOTHING

    def space_descriptors(self) -> list[int]:
        """The descriptors to wait for: readable after a release, or after the owner's end."""
        attachment = self._attachment
        return [] if attachment is None else [attachment.space, attachment.connection.fileno()]

    def clear_space_event(self) -> None:
        """Call this before the next `try_put`. Then a release that comes after the try wakes the next wait."""
        if self._attachment is not None and not self._detach_if_disconnected():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._attachment.space)

    def raise_at_owner_end(self) -> None:
        """Errors: RingDetached if the owner has closed the ring. Raises once for each close, so later puts wait for a new owner."""
        if self._segment is not None and self._segment.sealed and not self._end_raised:
            self._end_raised = True
            raise RingDetached(
                f"the owner of ring {self.name!r} ended in good order and takes no more records. Accepted records are "
                "trained, dropped or kept for the next owner. Put this record again to wait for the next owner"
            )

    def timeout_error(self, plan: Plan, timeout: float) -> RingFull | RingDetached:
        """The error of a put at its deadline."""
        with self._ring_lock:
            sealed, writer = self._segment is not None and self._segment.sealed, self._writer
            slots, capacity = (0, 0) if writer is None else (writer.memory.slots, writer.capacity)
            records, used = (0, 0) if writer is None else writer.used()
        if sealed:
            return RingDetached(
                f"nobody owns ring {self.name!r}: its owner ended in good order, and no other came within {timeout:g} s. "
                "Put this record again when the next run has started"
            )
        owner = "attached" if self._attachment is not None else "gone"
        return RingFull(
            f"ring {self.name!r}: no room for {plan.size:,} bytes within {timeout:g} s; {records} of {slots} records and "
            f"{used:,} of {capacity:,} bytes wait to be trained or dropped (owner: {owner}). Put this record again later"
        )

    @property
    def policy_version(self) -> int:
        """The newest policy version that the owner has published; -1 before the first version."""
        with self._ring_lock:
            self.check()
            return -1 if self._writer is None else self._writer.memory.owner[1] - 1

    def statistics(self) -> ProducerStatistics:
        """Counts and the use of the ring, as of now."""
        with self._ring_lock:
            used = (0, 0) if self._writer is None else self._writer.used()
        return ProducerStatistics(self.puts, self.waits, self._attachment is not None, self.attachments, *used)

    def close_now(self) -> None:
        """Close the ring without taking the lock of puts. Accepted records stay. Closing twice is fine."""
        if self.closed or self._forks != segments.forks:
            self.closed = True
            return
        self.closed = True
        if self._writer is not None:
            self._writer.mark_closed()
        self._detach()
        self._close_ring()

    def _detach_if_disconnected(self) -> bool:
        """Detach and return True if the connection has ended. The owner sends nothing more, so a readable connection has ended."""
        if self._attachment is None or not self._poll.poll(0):
            return False
        self._detach()
        return True

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    def _open_ring(self, name: str) -> None:
        if self._segment is not None and self._segment.name == name:
            return
        segment = Segment.attach(name)
        try:
            writer = RingWriter(RingMemory(segment.data))
        except BaseException:
            segment.close(unlink=False)
            raise
        with self._ring_lock:
            self._close_ring()
            self._segment, self._writer = segment, writer

    def _close_ring(self) -> None:
        with self._ring_lock:
            if self._writer is not None and self._segment is not None:
                self._writer.memory.release_views()
                self._segment.close(unlink=False)
            self._segment = self._writer = None


class Producer(ProducerCore):
    """Blocking producer for any number of threads of one process. A context manager."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0) -> Producer:
        """Attach to the ring `name` of a running owner; wait at most `timeout` seconds for the owner.

        Errors: RingDetached if there is no owner or the owner refuses; PlatformError; ConfigError for an invalid name.
        """
        producer = cls(name)
        try:
            _run_blocking(_attach(producer, ThreadWaits, time.monotonic() + timeout))
        except BaseException:
            producer.close()
            raise
        return producer

    def put(self, plan: Plan, *, timeout: float = 60.0) -> None:
        """Put a record, and return when it is accepted. Errors: RingFull, RingDetached, RecordTooLarge, LifecycleError."""
        deadline = time.monotonic() + timeout
        # `acquire(False)` first, because `acquire` with a timeout is slower.
        if not (self._lock.acquire(False) or self._lock.acquire(timeout=timeout)):
            raise self.timeout_error(plan, timeout)
        try:
            need = self.try_put(plan, ownerless=False)
            if need is not Need.NOTHING or self.unnotified:
                _run_blocking(_complete_put(self, ThreadWaits, plan, need, deadline, timeout))
        finally:
            self._lock.release()

    def close(self) -> None:
        """Wait for the put of another thread, if one is running, and close. Accepted records stay. Closing twice is fine."""
        with self._lock:
            self.close_now()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncProducer(ProducerCore):
    """Producer for one event loop (asyncio or uvloop). `async with await AsyncProducer.attach(name) as producer`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = asyncio.Lock()

    @classmethod
    async def attach(cls, name: str, *, timeout: float = 30.0) -> AsyncProducer:
        """As `Producer.attach`, without blocking the loop."""
        producer = cls(name)
        try:
            await _attach(producer, LoopWaits, time.monotonic() + timeout)
        except BaseException:
            producer.close_now()
            raise
        return producer

    async def put(self, plan: Plan, *, timeout: float = 60.0) -> None:
        """As `Producer.put`. A cancelled put stores nothing. Exception: if the owner has ended, the record may be stored."""
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise self.timeout_error(plan, timeout) from None
        try:
            need = self.try_put(plan, ownerless=False)
            if need is not Need.NOTHING or self.unnotified:
                await _complete_put(self, LoopWaits, plan, need, deadline, timeout)
        finally:
            self._lock.release()

    async def close(self) -> None:
        """As `Producer.close`, but waits for the put of another task."""
        async with self._lock:
            self.close_now()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _attach(core: ProducerCore, waits: Waits, deadline: float) -> None:
    """Attach. Errors: RingDetached at the deadline, or if the owner refuses."""
    pauses = _pauses()
    while await waits.call(partial(core.try_attach, deadline)) is None:
        if time.monotonic() >= deadline:
            raise RingDetached(
                f"nobody owns a ring named {core.name!r} ({path_of(core.name)}); start the run that owns it first"
            )
        began, pause = time.monotonic(), next(pauses)
        await waits.readable((), pause)
        # The time in which this process was suspended (SIGSTOP) does not count.
        deadline += _suspended_s(began, pause)


async def _complete_put(
    core: ProducerCore, waits: Waits, plan: Plan, need: Need, deadline: float, timeout: float
) -> None:
    """The rest of a put: wait for `need`, put, and make sure that an owner learns of the record."""
    ownerless, was_full, pauses = False, False, _pauses()
    while True:
        while need is not Need.NOTHING:
            began = time.monotonic()
            seconds = min(deadline - began, _SLICE_S)
            if seconds <= 0:
                raise core.timeout_error(plan, timeout)
            if need is Need.SPACE:
                core.waits += not was_full  # count each put once
                was_full = True
                await waits.readable(core.space_descriptors(), seconds)
                core.clear_space_event()
            elif ownerless:  # the last try to attach found no owner
                seconds = min(next(pauses), seconds)
                await waits.readable((), seconds)
            # The time in which this process was suspended does not count: the owner may have been suspended too.
            deadline += _suspended_s(began, seconds)
            if need is Need.OWNER:
                ownerless = await waits.call(partial(core.try_attach, deadline)) is None
                if ownerless:
                    core.raise_at_owner_end()
            need = core.try_put(plan, ownerless=ownerless)
        if not core.unnotified:
            return
        # A new owner may have polled the ring before the put. Attach to it, because an owner polls the ring of each producer that
        # attaches. An owner listens before it polls its rings. So if nobody listens now, the next owner will find the record.
        try:
            attachment = await waits.call(partial(core.try_attach, deadline))
        except RingDetached:
            return
        if attachment is None or not attachment.fresh:
            return
        # A new ring: the ring with the record was damaged, and nobody reads it any more. Put the record into the new ring.
        need = core.try_put(plan, ownerless=False)


def _pauses() -> Iterator[float]:
    """Growing pauses in seconds between tries to attach: the kernel has no event for a new owner."""
    seconds = 0.005
    while True:
        yield seconds
        seconds = min(2 * seconds, 0.25)


def _suspended_s(began: float, limit_s: float) -> float:
    """Seconds since `began`, if they exceed `limit_s` by over 1 s: this process was probably suspended. If they do not: 0."""
    elapsed = time.monotonic() - began
    return elapsed if elapsed > limit_s + 1.0 else 0.0


def _run_blocking(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run to its end a coroutine that awaits only `ThreadWaits`, and so never suspends."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
