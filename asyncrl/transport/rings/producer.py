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
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from ...errors import RingDetached
from ...records.write import Plan
from ..memory.segment import path_of
from ..rendezvous import Attachment
from .producer_core import Core, Need, ProducerStatistics


class Producer:
    """Synchronous, for any number of threads of one process. A context manager."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()

    @classmethod
    def attach(cls, name: str, *, timeout: float = 30.0) -> Producer:
        """Attach to the ring `name` of a running owner, waiting for it at most `timeout` seconds.

        Errors: RingDetached where there is none or it refuses, PlatformError, ConfigError for the name.
        """
        core = Core(name)
        deadline, pause = time.monotonic() + timeout, _Pause()
        try:
            while _attach_once(core, deadline) is None:
                _check_deadline(deadline, name)
                time.sleep(pause.next())
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
            if need is not Need.NOTHING:
                self._wait_and_put(plan, need, deadline, timeout)
            if core.unannounced:
                _announce(core, deadline)
        finally:
            self._lock.release()

    def _wait_and_put(self, plan: Plan, need: Need, deadline: float, timeout: float) -> None:
        core, ownerless, full, pause = self._core, False, False, _Pause()
        while need is not Need.NOTHING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise core.late(plan, timeout)
            if need is Need.SPACE:
                core.waits += not full  # each put once
                full = True
                _wait_readable(core.space(), left)
                core.drain()
            else:
                if ownerless:  # nobody listened a moment ago, and no event tells that one does: see `_Pause`
                    time.sleep(min(pause.next(), left))
                ownerless = _attach_once(core, deadline) is None
                if ownerless:
                    core.hear_end()
            need = core.advance(plan, ownerless=ownerless)

    @property
    def policy_version(self) -> int:
        return self._core.policy_version

    @property
    def identity(self) -> bytes:
        return self._core.identity

    def statistics(self) -> ProducerStatistics:
        return self._core.statistics()

    def close(self) -> None:
        """Waits for a put in another thread. What was accepted stays. Twice is fine."""
        with self._lock:
            self._core.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncProducer:
    """For one event loop (asyncio or uvloop). `async with await AsyncProducer.attach(name) as producer`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = asyncio.Lock()

    @classmethod
    async def attach(cls, name: str, *, timeout: float = 30.0) -> AsyncProducer:
        """As `Producer.attach`."""
        core = Core(name)
        deadline, pause = time.monotonic() + timeout, _Pause()
        try:
            while await _in_thread(lambda: _attach_once(core, deadline)) is None:
                _check_deadline(deadline, name)
                await asyncio.sleep(pause.next())
        except BaseException:
            core.close()
            raise
        return cls(core)

    async def put(self, plan: Plan, *, timeout: float = 60.0) -> None:
        """Returns when the record is accepted; a cancelled put did not put, unless the owner went away meanwhile."""
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise self._core.late(plan, timeout) from None
        try:
            need = self._core.advance(plan, ownerless=False)
            if need is not Need.NOTHING:
                await self._wait_and_put(plan, need, deadline, timeout)
            if self._core.unannounced:
                await _in_thread(lambda: _announce(self._core, deadline))
        finally:
            self._lock.release()

    async def _wait_and_put(self, plan: Plan, need: Need, deadline: float, timeout: float) -> None:
        core, ownerless, full, pause = self._core, False, False, _Pause()
        while need is not Need.NOTHING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise core.late(plan, timeout)
            if need is Need.SPACE:
                core.waits += not full  # each put once
                full = True
                await _readable(core.space(), left)
                core.drain()
            else:
                if ownerless:  # see the synchronous one
                    await asyncio.sleep(min(pause.next(), left))
                ownerless = await _in_thread(lambda: _attach_once(core, deadline)) is None
                if ownerless:
                    core.hear_end()
            need = core.advance(plan, ownerless=ownerless)

    @property
    def policy_version(self) -> int:
        return self._core.policy_version

    @property
    def identity(self) -> bytes:
        return self._core.identity

    def statistics(self) -> ProducerStatistics:
        return self._core.statistics()

    async def close(self) -> None:
        async with self._lock:
            self._core.close()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Pause:
    """Growing pauses between looks for an owner: the kernel has no event for "a name was bound"."""

    def __init__(self) -> None:
        self._next = 0.005

    def next(self) -> float:
        now, self._next = self._next, min(2 * self._next, 0.25)
        return now


def _check_deadline(deadline: float, name: str) -> None:
    if time.monotonic() >= deadline:
        raise RingDetached(f"nobody owns a ring named {name!r} ({path_of(name)}); start the run that owns it first")


def _attach_once(core: Core, deadline: float) -> Attachment | None:
    try:
        return core.attach(deadline)
    except FileNotFoundError:
        return None


def _announce(core: Core, deadline: float) -> None:
    """After a put that no owner heard of: look for one again, because one may have come, and looked, in between.

    An owner listens before it looks at the rings. So if nobody listens even now, the look is still to come and will find
    the record; and if somebody does, attaching makes it look. The record is accepted either way.
    """
    with contextlib.suppress(RingDetached):
        _attach_once(core, deadline)


def _wait_readable(fds: list[int], timeout: float) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll(max(1.0, timeout * 1000))


async def _readable(fds: list[int], timeout: float) -> None:
    """Until one of the descriptors is readable, or the time is over."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    for fd in fds:
        loop.add_reader(fd, wake)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await woken
    finally:
        for fd in fds:
            loop.remove_reader(fd)


async def _in_thread(work: Callable[[], Any]) -> Any:
    """In a thread; a cancelled caller waits for its end first, so that nothing goes on behind its back."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        if not done.cancelled():
            done.exception()  # looked at, so that nobody complains that nobody did
        raise
