"""Putting records into somebody else's ring: `Producer` for threads, `AsyncProducer` for one event loop.

`put()` returned means accepted: the record is in shared memory and survives the death of either process (not a reboot).
A full ring is backpressure: `put` sleeps in the kernel until the owner released something, and raises `RingFull` at its
deadline, with nothing put. Where the owner dies, records are accepted as long as there is room, the producer attaches to
the next owner by itself, and that one finds everything. Where the owner closed in good order, the `put` that waits, or the
next one, hears it at once (`RingDetached`); a `put` after that waits for another owner.
A `put` that raised `RingDetached` may have left its record behind: put the same one again, the owner removes duplicates by
(epoch, group, member).

Numpy and the standard library only: this is what `asyncrl.client` is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

from ...errors import RingDetached
from ...records.write import Plan
from ..memory.segment import path_of
from ..rendezvous import Attachment
from .producer_core import Core, Need, ProducerStatistics
from .waits import Call, Pause, Readable, Waits, block, wait


class _Shared:
    """What the two producers have in common beside the waits."""

    def __init__(self, core: Core) -> None:
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

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._lock = threading.Lock()

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0) -> Producer:
        """Attach to the ring `name` of a running owner, waiting for it at most `timeout` seconds.

        Errors: RingDetached where there is none or it refuses, PlatformError, ConfigError for the name.
        """
        core = Core(name)
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

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._lock = asyncio.Lock()

    @classmethod
    async def attach(cls, name: str, *, timeout: float = 30.0) -> AsyncProducer:
        """As `Producer.attach`."""
        core = Core(name)
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
        """As `Producer.close`."""
        async with self._lock:
            self._core.close()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _attach(core: Core, deadline: float) -> Waits:
    """Errors: RingDetached at the deadline, or where the owner refuses."""
    pauses = _pauses()
    while (yield Call(lambda: _attach_once(core, deadline))) is None:
        if time.monotonic() >= deadline:
            raise RingDetached(
                f"nobody owns a ring named {core.name!r} ({path_of(core.name)}); start the run that owns it first"
            )
        yield Pause(next(pauses))


def _finish(core: Core, plan: Plan, need: Need, deadline: float, timeout: float) -> Waits:
    """The rest of a put that has to wait for `need`, or that no owner heard of."""
    ownerless, full, pauses = False, False, _pauses()
    while True:
        while need is not Need.NOTHING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise core.late(plan, timeout)
            if need is Need.SPACE:
                core.waits += not full  # each put once
                full = True
                yield Readable(core.space(), left)
                core.drain()
            else:
                if ownerless:  # nobody listened a moment ago
                    yield Pause(min(next(pauses), left))
                ownerless = (yield Call(lambda: _attach_once(core, deadline))) is None
                if ownerless:
                    core.hear_end()
            need = core.advance(plan, ownerless=ownerless)
        if not core.unannounced:
            return
        found = yield Call(lambda: _announce(core, deadline))
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


def _attach_once(core: Core, deadline: float) -> Attachment | None:
    try:
        return core.attach(deadline)
    except FileNotFoundError:
        return None


def _announce(core: Core, deadline: float) -> Attachment | None:
    """After a put that no owner heard of: look for one again, because one may have come, and looked, in between.

    An owner listens before it looks at the rings. So if nobody listens even now, the look is still to come and will find
    the record; and if somebody does, attaching makes it look. The record is accepted either way.
    """
    with contextlib.suppress(RingDetached):
        return _attach_once(core, deadline)
    return None
