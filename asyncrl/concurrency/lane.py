"""Lanes: the one OS thread that owns a device, and its twin without a thread for tests and dry runs.

    caller (loop) --run(fn)--> priority queue --> lane thread --call_soon_threadsafe, once--> caller

Guarantees, the same for both lanes: one closure at a time; highest priority first, submission order within a priority;
a caller that is cancelled before its closure started takes it out of the queue and it never runs; one that is cancelled
later waits for the end of its closure, and only then the cancellation goes on. So whoever holds control may touch what
its closures touched.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import LifecycleError, name_shortage
from . import awake
from .job import LaneJob
from .shield import call_soon, wait_shielded

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder

T = TypeVar("T")


class Lane(Protocol):
    """Runs closures one at a time, highest priority first, in submission order within a priority.

    A closure cannot be cancelled: a caller that is cancelled waits (shielded) until its closure ended, then the
    cancellation is raised. An exception of the closure, BaseException included, is raised in the caller; one of a thread that
    found no memory as OutOfMemory.
    """

    name: str

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        """`name` labels the span; `cost` is the simulated duration in seconds, used by the simulated lane alone."""
        ...


class LaneState(Enum):
    """The life of a lane."""

    NEW = "new"
    OPEN = "open"
    CLOSING = "closing"  # accepts nothing, drains
    CLOSED = "closed"


class ThreadLane:
    """A lane with a thread. `async with ThreadLane(...) as lane`; closing drains the queue.

    on_start: called first on the new thread (device selection, thread counts); its exception is raised by `open`.
    close_timeout_s: how long closing waits for closures that are queued or running, in seconds. A closure that is still
        there afterwards is named in a `LifecycleError` and left behind on its daemon thread: it cannot be stopped.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder | None = None,
        on_start: Callable[[], object] | None = None,
        *,
        close_timeout_s: float = 30.0,
    ) -> None:
        self.name = name
        self.state = LaneState.NEW
        self._recorder = recorder
        self._on_start = on_start
        self._close_timeout_s = close_timeout_s
        self._wakeup = threading.Condition(threading.Lock())
        self._queue: list[tuple[int, int, LaneJob]] = []  # guarded by _wakeup
        self._submitted = 0
        self._current: tuple[str, float] | None = None
        self._thread: threading.Thread | None = None
        self._end_callbacks: list[Callable[[], None]] = []  # guarded by _wakeup; called by the thread as it ends

    async def __aenter__(self) -> ThreadLane:
        if self.state is not LaneState.NEW:
            raise LifecycleError(f"lane {self.name!r} was opened twice (it is {self.state.value})")
        self.state = LaneState.OPEN
        if self._recorder is not None:
            self._recorder.register_lane(self.name)
        self._thread = threading.Thread(target=self._main, name=f"lane:{self.name}", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_interpreter)
        try:
            await self.run(self._on_start or (lambda: None), name="start")
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take no more closures, run those that are queued, end the thread. Closing twice is fine."""
        with self._wakeup:
            if self.state in (LaneState.NEW, LaneState.CLOSED):
                self.state = LaneState.CLOSED
                return
            self.state = LaneState.CLOSING
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[bool] = loop.create_future()
            self._end_callbacks.append(lambda: call_soon(loop, _resolve, ended, True))
            self._wakeup.notify()
            assert self._thread is not None
            if not self._thread.is_alive():
                _resolve(ended, True)
        cancel_timer = awake.call_later(loop, self._close_timeout_s, lambda: _resolve(ended, False))
        cancelled = await wait_shielded(ended)
        cancel_timer()
        self.state = LaneState.CLOSED
        atexit.unregister(self._end_with_interpreter)
        if not ended.result():
            name, since = self._current or ("(between two closures)", awake.now())
            raise LifecycleError(
                f"lane {self.name!r} did not close within {self._close_timeout_s:g} s: closure {name!r} has been "
                f"running for {awake.now() - since:.1f} s, {len(self._queue)} more are queued; "
                "its thread is left behind"
            )
        # It has left its loop: only the interpreter's own bookkeeping is left.
        self._thread.join(timeout=1.0)
        if cancelled is not None:
            raise cancelled

    def _end_with_interpreter(self) -> None:
        """The program ends without having closed the lane: a thread that came back from C++ later would abort the process."""
        with self._wakeup:
            self.state = LaneState.CLOSED
            self._queue.clear()  # no loop is left that could wait for them
            self._wakeup.notify()
        assert self._thread is not None
        self._thread.join(self._close_timeout_s)

    def current(self) -> tuple[str, float] | None:
        """The running closure's name and its start (`awake.now`), from any thread; None while idle."""
        return self._current

    @property
    def thread_id(self) -> int | None:
        """Identity of the thread, so that the watchdog can show where a closure is; None before it starts."""
        return None if self._thread is None else self._thread.ident

    def statistics(self) -> dict[str, float]:
        """`submitted` closures so far, `queued` and `running` now."""
        return {
            "submitted": float(self._submitted),
            "queued": float(len(self._queue)),
            "running": float(self._current is not None),
        }

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        """See `Lane.run`. Raises LifecycleError when the lane is not open."""
        job = self._submit(fn, name, priority)
        try:
            await job.future
        except asyncio.CancelledError as exc:
            cancelled = exc
            if not job.ended:
                if self._withdraw(job):
                    raise
                job.future = job.loop.create_future()  # the first one died with the cancellation
                cancelled = await wait_shielded(job.future) or exc
            raise cancelled from job.error
        if self._recorder is not None:
            self._recorder.lane_resumed(self.name, job.finished_at)
        if job.error is not None:
            try:
                raise job.error
            finally:
                # The exception's frame would hold the job that holds the exception.
                del job
        return job.result  # type: ignore[no-any-return]  # set by its closure, a T

    def _submit(self, fn: Callable[[], Any], name: str, priority: int) -> LaneJob:
        loop = asyncio.get_running_loop()
        with self._wakeup:
            if self.state is not LaneState.OPEN:
                raise LifecycleError(f"lane {self.name!r} is {self.state.value}: it cannot run {name!r}")
            if threading.current_thread() is self._thread:
                raise LifecycleError(f"{name!r} was submitted from lane {self.name!r} itself: it would wait for itself")
            job = LaneJob(fn, name, loop, 0.0 if self._recorder is None else self._recorder.clock())
            self._submitted += 1
            heapq.heappush(self._queue, (-priority, self._submitted, job))
            self._wakeup.notify()
        return job

    def _withdraw(self, job: LaneJob) -> bool:
        """Take a closure that has not started out of the queue; False if it has."""
        with self._wakeup:
            if job.started:
                return False
            self._queue = [entry for entry in self._queue if entry[2] is not job]
            heapq.heapify(self._queue)
            return True

    def _main(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._execute(job)
                # Without this the thread would keep the last closure, and what it holds, alive while it is idle.
                del job
        finally:
            with self._wakeup:
                callbacks = self._end_callbacks
            for callback in callbacks:
                callback()

    def _next(self) -> LaneJob | None:
        with self._wakeup:
            while not self._queue:
                if self.state is not LaneState.OPEN:
                    return None
                self._wakeup.wait()
            job = heapq.heappop(self._queue)[2]
            job.started = True
            self._current = (job.name, awake.now())
            return job

    def _execute(self, job: LaneJob) -> None:
        try:
            if self._recorder is None:
                job.result = job.fn()
            else:
                span = self._recorder.lane_busy(self.name, job.name, submitted=job.submitted_at)
                try:
                    with span:
                        job.result = job.fn()
                finally:
                    job.finished_at = span.ended
        except BaseException as exc:
            # Carried to the caller, who decides; the lane itself survives everything.
            job.error = name_shortage(exc, f"{job.name} on {self.name}")
        self._current = None
        call_soon(job.loop, job.notify)


class SimulatedLane:
    """A lane without a thread: the closure runs inline, then its caller waits `cost` seconds of the loop's time.

    Deterministic under the virtual clock, and a stand-in with real durations on any other loop. The effects of a
    closure are visible from its start on, its result only after its cost.
    """

    def __init__(self, name: str, recorder: Recorder | None = None) -> None:
        self.name = name
        self.state = LaneState.NEW
        self._recorder = recorder
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._submitted = 0
        self._busy = False
        self._current: tuple[str, float] | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> SimulatedLane:
        if self.state is not LaneState.NEW:
            raise LifecycleError(f"lane {self.name!r} was opened twice (it is {self.state.value})")
        self.state = LaneState.OPEN
        if self._recorder is not None:
            self._recorder.register_lane(self.name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take no more closures and wait for those that are queued. Closing twice is fine."""
        cancelled = None
        if self.state is LaneState.OPEN:
            self.state = LaneState.CLOSING
        if self._busy:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(idle)
            cancelled = await wait_shielded(idle)
        self.state = LaneState.CLOSED
        if cancelled is not None:
            raise cancelled

    def current(self) -> tuple[str, float] | None:
        """The running closure's name and its start (`awake.now`); None while idle."""
        return self._current

    def statistics(self) -> dict[str, float]:
        """`submitted` closures so far, `queued` and `running` now."""
        return {
            "submitted": float(self._submitted),
            "queued": float(len(self._queue)),
            "running": float(self._busy),
        }

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        """See `Lane.run`. Raises LifecycleError when the lane is not open."""
        if self.state is not LaneState.OPEN:
            raise LifecycleError(f"lane {self.name!r} is {self.state.value}: it cannot run {name!r}")
        loop = asyncio.get_running_loop()
        self._submitted += 1
        submitted_at = 0.0 if self._recorder is None else self._recorder.clock()
        if self._busy:
            await self._wait_for_lane(loop, priority)
        self._busy = True
        self._current = (name, awake.now())
        cancelled: asyncio.CancelledError | None = None
        try:
            if self._recorder is None:
                result, error = _call(fn)
                cancelled = await self._spend(loop, cost)
            else:
                with self._recorder.lane_busy(self.name, name, submitted=submitted_at):
                    result, error = _call(fn)
                    cancelled = await self._spend(loop, cost)
        finally:
            self._current = None
            self._pass_on()
        if cancelled is not None:
            raise cancelled from error
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result  # type: ignore[no-any-return]  # set by the closure, a T

    async def _wait_for_lane(self, loop: asyncio.AbstractEventLoop, priority: int) -> None:
        granted: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._queue, (-priority, self._submitted, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._queue = [entry for entry in self._queue if entry[2] is not granted]
                heapq.heapify(self._queue)
            else:
                self._pass_on()  # the lane had just been handed to us
            raise

    async def _spend(self, loop: asyncio.AbstractEventLoop, cost: float) -> asyncio.CancelledError | None:
        """Let `cost` seconds of loop time pass, whatever is cancelled meanwhile."""
        end = loop.time() + cost
        over: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_at(end, _resolve, over, True) if cost > 0 else loop.call_soon(_resolve, over, True)
        try:
            await over
        except asyncio.CancelledError as exc:
            if not over.cancelled():
                return exc
            timer.cancel()
            rest: asyncio.Future[bool] = loop.create_future()
            loop.call_at(end, _resolve, rest, True)
            return await wait_shielded(rest) or exc
        return None

    def _pass_on(self) -> None:
        """Hand the lane to the next waiting caller; it stays busy in between, so that nobody slips in."""
        while self._queue:
            granted = heapq.heappop(self._queue)[2]
            if not granted.done():
                granted.set_result(None)
                return
        self._busy = False
        for waiter in self._idle_waiters:
            _resolve(waiter, None)
        self._idle_waiters.clear()


def _call(fn: Callable[[], T]) -> tuple[Any, BaseException | None]:
    try:
        return fn(), None
    except BaseException as exc:  # carried to the caller like on a thread
        return None, exc


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
