"""Putting records into somebody else's ring: `Producer` for threads, `AsyncProducer` for one event loop.

`put()` returned means accepted: the record is in shared memory and survives the death of either process (not a reboot).
A full ring is backpressure: `put` sleeps in the kernel until the owner released something, and raises `RingFull` at its
deadline, with nothing put. Where the owner dies, records are accepted as long as there is room, the producer attaches to
the next owner by itself, and that one finds everything. Where the owner closed in good order, the `put` that waits, or the
next one, raises `RingDetached` at once; a `put` after that waits for another owner.
A `put` that raised `RingDetached` may have left its record behind: put the same one again, the owner removes duplicates by
(epoch, group, member).

Numpy and the standard library only: this is what `asyncrl.client` is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

from ...errors import LifecycleError, RingDetached, RingFull
from ...records.write import Plan
from .. import rendezvous
from ..memory import segment as segments
from ..memory.segment import Segment, path_of
from ..memory.words import fault
from ..rendezvous import Attachment
from .ring import RingMemory, RingWriter
from .waits import SLICE_S, Call, Pause, Readable, Waits, block, stopped_s, wait


class Need(Enum):
    """What a put waits for."""

    NOTHING = "nothing"  # it was accepted
    SPACE = "space"
    OWNER = "owner"


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """What this producer put, and how full its ring is."""

    puts: int
    bytes: int
    waits: int  # puts that found the ring full
    attached: bool
    attachments: int
    records_held: int  # accepted and not yet released
    bytes_held: int
    capacity: int  # bytes


class ProducerCore:
    """The protocol without any waiting: one try to attach, one try to put. Not thread-safe: the two classes below lock."""

    def __init__(self, name: str) -> None:
        path_of(name)  # a bad name is an error here
        self.name = name
        self.identity = secrets.token_bytes(16)
        self.closed = False
        self.unannounced = False  # a record was accepted that perhaps no owner knows of
        self.puts = self.bytes = self.waits = self.attachments = 0
        self._segment: Segment | None = None
        self._writer: RingWriter | None = None
        self._attachment: Attachment | None = None
        self._heard = False  # that the owner ended
        self._poll = select.poll()
        self._forks = segments.forks

    def check(self) -> None:
        """Errors: LifecycleError for a producer that was closed, or made before a fork."""
        if self.closed:
            raise LifecycleError(f"the producer of ring {self.name!r} is closed")
        if self._forks != segments.forks:
            raise LifecycleError(
                f"the producer of ring {self.name!r} was made before a fork; each process attaches by itself, because a ring "
                "has one writer"
            )

    def attach(self, deadline: float) -> Attachment | None:
        """One try. None where nobody owns a ring of this name now. Errors: RingDetached where the owner refuses."""
        self.check()
        self._forget_attachment()
        run = Segment.attach(self.name)
        try:
            found = rendezvous.attach(run, self.identity, deadline)
        finally:
            run.close(unlink=False)
        if found is None:
            return None
        try:
            self._use_ring(found.ring)
        except BaseException:
            found.close()
            raise
        self._attachment = found
        self._heard = False
        self.unannounced = False  # whoever lets us in looks at the ring
        self.attachments += 1
        self._poll = select.poll()
        self._poll.register(found.connection, select.POLLIN)
        return found

    def advance(self, plan: Plan, *, ownerless: bool) -> Need:
        """One try to put. `ownerless`: nobody listens now, so put into the ring as it lies there, if it may be kept."""
        self.check()
        writer, segment, attachment = self._writer, self._segment, self._attachment
        if writer is None or segment is None or segment.sealed:
            return Need.OWNER
        if attachment is None and not ownerless:
            return Need.OWNER
        if not writer.try_put(plan):
            return Need.OWNER if attachment is None else Need.SPACE
        fault("producer.notify")
        self.unannounced = True
        if attachment is not None:
            os.eventfd_write(attachment.data, 1)
            # Looked at after the record was there: an owner that lived until now was told, or the next one will look.
            self.unannounced = self._owner_left()
        if segment.sealed:
            # The owner may have looked before the record was there: put it again, elsewhere.
            return Need.OWNER
        self.puts += 1
        self.bytes += plan.size
        return Need.NOTHING

    def space(self) -> list[int]:
        """The descriptors that become readable when there may be room, or when the owner is gone."""
        attachment = self._attachment
        return [] if attachment is None else [attachment.space, attachment.connection.fileno()]

    def drain(self) -> None:
        """Before looking for room again: what is signalled from here on is news."""
        if self._attachment is not None and not self._owner_left():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._attachment.space)

    def hear_end(self) -> None:
        """Errors: RingDetached where the owner closed in good order, once for each end: the next put waits for another one."""
        if self._segment is not None and self._segment.sealed and not self._heard:
            self._heard = True
            raise RingDetached(
                f"the owner of ring {self.name!r} ended in good order and takes no records any more; what it accepted is "
                "trained, dropped or kept for the next owner. Put this one again to wait for that"
            )

    def late(self, plan: Plan, timeout: float) -> RingFull | RingDetached:
        """The error of a put whose time is up."""
        if self._segment is not None and self._segment.sealed:
            return RingDetached(
                f"nobody owns ring {self.name!r}: its owner ended in good order, and no other came within {timeout:g} s. "
                "Put this one again once the next run is there"
            )
        slots = self._writer.memory.slots if self._writer is not None else 0
        records, used, capacity = self._used()
        owner = "attached" if self._attachment is not None else "gone"
        return RingFull(
            f"ring {self.name!r}: no room for {plan.size:,} bytes within {timeout:g} s; {records} of {slots} records and "
            f"{used:,} of {capacity:,} bytes wait to be trained or dropped (owner: {owner}). Nothing was put"
        )

    @property
    def policy_version(self) -> int:
        """The version the owner last made known; -1 before it did."""
        self.check()
        return -1 if self._writer is None else self._writer.memory.owner[1] - 1

    def statistics(self) -> ProducerStatistics:
        """A snapshot of what this producer put."""
        attached = self._attachment is not None
        return ProducerStatistics(self.puts, self.bytes, self.waits, attached, self.attachments, *self._used())

    def _used(self) -> tuple[int, int, int]:
        """(records, bytes) that are accepted and not released, and the bytes that there is room for."""
        return (0, 0, 0) if self._writer is None else (*self._writer.used(), self._writer.capacity)

    def close(self) -> None:
        """What was accepted stays. Twice is fine."""
        if self.closed or self._forks != segments.forks:
            self.closed = True
            return
        self.closed = True
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._forget_attachment()
        self._forget_ring()

    def _owner_left(self) -> bool:
        """The owner speaks only by going away."""
        if self._attachment is None or not self._poll.poll(0):
            return False
        self._forget_attachment()
        return True

    def _forget_attachment(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    def _use_ring(self, name: str) -> None:
        if self._segment is not None and self._segment.name == name:
            return
        segment = Segment.attach(name)
        try:
            segment.populate()
            writer = RingWriter(RingMemory(segment.data))
        except BaseException:
            segment.close(unlink=False)
            raise
        self._forget_ring()
        self._segment, self._writer = segment, writer

    def _forget_ring(self) -> None:
        if self._writer is not None:
            self._writer.memory.release_views()
            self._writer = None
        if self._segment is not None:
            self._segment.close(unlink=False)
            self._segment = None


class _Shared:
    """What the two producers have in common beside the waits."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    @property
    def policy_version(self) -> int:
        return self._core.policy_version

    @property
    def identity(self) -> bytes:
        return self._core.identity

    def statistics(self) -> ProducerStatistics:
        return self._core.statistics()


class Producer(_Shared):
    """Synchronous, for any number of threads of one process. A context manager."""

    def __init__(self, core: ProducerCore) -> None:
        super().__init__(core)
        self._lock = threading.Lock()

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0) -> Producer:
        """Attach to the ring `name` of a running owner, waiting for it at most `timeout` seconds.

        Errors: RingDetached where there is none or it refuses, PlatformError, ConfigError for the name.
        """
        core = ProducerCore(name)
        try:
            block(_attach(core, time.monotonic() + timeout))
        except BaseException:
            core.close()
            raise
        return cls(core)

    def put(self, plan: Plan, *, timeout: float = 60.0) -> None:
        """Returns when the record is accepted. Errors: RingFull, RingDetached, RecordTooLarge, LifecycleError."""
        core, deadline = self._core, time.monotonic() + timeout
        if not (self._lock.acquire(False) or self._lock.acquire(timeout=timeout)):
            raise core.late(plan, timeout)
        try:
            need = core.advance(plan, ownerless=False)
            if need is not Need.NOTHING or core.unannounced:
                block(_finish(core, plan, need, deadline, timeout))
        finally:
            self._lock.release()

    def close(self) -> None:
        """Waits for a put in another thread. What was accepted stays. Twice is fine."""
        with self._lock:
            self._core.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncProducer(_Shared):
    """For one event loop (asyncio or uvloop). `async with await AsyncProducer.attach(name) as producer`."""

    def __init__(self, core: ProducerCore) -> None:
        super().__init__(core)
        self._lock = asyncio.Lock()

    @classmethod
    async def attach(cls, name: str, *, timeout: float = 30.0) -> AsyncProducer:
        """As `Producer.attach`; the loop goes on meanwhile."""
        core = ProducerCore(name)
        try:
            await wait(_attach(core, time.monotonic() + timeout))
        except BaseException:
            core.close()
            raise
        return cls(core)

    async def put(self, plan: Plan, *, timeout: float = 60.0) -> None:
        """Returns when the record is accepted; a cancelled put did not put, unless the owner went away meanwhile."""
        core, deadline = self._core, time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise core.late(plan, timeout) from None
        try:
            need = core.advance(plan, ownerless=False)
            if need is not Need.NOTHING or core.unannounced:
                await wait(_finish(core, plan, need, deadline, timeout))
        finally:
            self._lock.release()

    async def close(self) -> None:
        """As `Producer.close`, for a put in another task."""
        async with self._lock:
            self._core.close()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _attach(core: ProducerCore, deadline: float) -> Waits:
    """Errors: RingDetached at the deadline, or where the owner refuses."""
    pauses = _pauses()
    while (yield Call(partial(_attach_once, core, deadline))) is None:
        if time.monotonic() >= deadline:
            raise RingDetached(
                f"nobody owns a ring named {core.name!r} ({path_of(core.name)}); start the run that owns it first"
            )
        began, pause = time.monotonic(), next(pauses)
        yield Pause(pause)
        deadline += stopped_s(began, pause)


def _finish(core: ProducerCore, plan: Plan, need: Need, deadline: float, timeout: float) -> Waits:
    """The rest of a put that has to wait for `need`, or that no owner heard of."""
    ownerless, full, pauses = False, False, _pauses()
    while True:
        while need is not Need.NOTHING:
            began = time.monotonic()
            left = min(deadline - began, SLICE_S)
            if left <= 0:
                raise core.late(plan, timeout)
            if need is Need.SPACE:
                core.waits += not full  # each put once
                full = True
                yield Readable(core.space(), left)
                core.drain()
            elif ownerless:  # nobody listened a moment ago
                left = min(next(pauses), left)
                yield Pause(left)
            # A job that was suspended as a whole finds its owner where it was.
            deadline += stopped_s(began, left)
            if need is Need.OWNER:
                ownerless = (yield Call(partial(_attach_once, core, deadline))) is None
                if ownerless:
                    core.hear_end()
            need = core.advance(plan, ownerless=ownerless)
        if not core.unannounced:
            return
        found = yield Call(partial(_announce, core, deadline))
        if found is None or not found.fresh:
            return
        # Nobody looks at the ring any more that it lies in (it was damaged): again, into the new one.
        need = core.advance(plan, ownerless=False)


def _pauses() -> Iterator[float]:
    """Growing seconds between looks for an owner: the kernel has no event for "a name was bound"."""
    seconds = 0.005
    while True:
        yield seconds
        seconds = min(2 * seconds, 0.25)


def _attach_once(core: ProducerCore, deadline: float) -> Attachment | None:
    try:
        return core.attach(deadline)
    except FileNotFoundError:
        return None


def _announce(core: ProducerCore, deadline: float) -> Attachment | None:
    """After a put that no owner heard of: look for one again, because one may have come, and looked, in between.

    An owner listens before it looks at the rings. So if nobody listens even now, the look is still to come and will find
    the record; and if somebody does, attaching makes it look. The record is accepted either way.
    """
    with contextlib.suppress(RingDetached):
        return _attach_once(core, deadline)
    return None
