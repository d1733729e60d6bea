"""A lane runs closures one at a time. A `ThreadLane` runs all work of a device on one thread, except for broadcasts of weights,
which have a lane of their own. `SimulatedLane` has no thread. It serves tests and `train.kind=dry_run`.

    caller (loop) --run(fn)--> priority queue --> lane thread --call_soon_threadsafe, once--> caller

Guarantees of both lanes
* The waiting closure with the largest `priority` runs first. Closures of equal priority run in the order of submission.
* If a caller is cancelled before its closure starts, the closure never runs.
* If a caller is cancelled later, the cancellation is raised when the closure has ended. So when `run` returns or raises, the lane
  no longer uses the objects of the closure.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import heapq
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import LifecycleError, name_shortage
from . import awake
from .shield import call_soon, wait_shielded

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder

T = TypeVar("T")


class Lane(Protocol):
    """The interface of both lanes, with the guarantees of this module. Exceptions of a closure, BaseException included, are raised
    in its caller. A `ThreadLane` raises OutOfMemory if a device or the system had no memory left.
    """

    name: str

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        """Run `fn` on the lane. `name` labels the span. `cost`: seconds that a simulated lane takes; `ThreadLane` ignores it."""
        ...

    def current(self) -> tuple[str, float] | None:
        """Name of the running closure and its start (`awake.now`), or None. Callable from any thread."""
        ...

    @property
    def thread_id(self) -> int | None:
        """`ident` of the thread that runs the closures; None without a thread. By this id the watchdog finds a closure's frame."""


@dataclass(slots=True, eq=False)
class LaneJob:
    """One closure with its caller's future. The lane's lock guards `started`; only the caller's loop writes `ended`."""

    fn: Callable[[], Any]
    name: str
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    submitted_at: float  # seconds on the recorder's clock
    finished_at: float = 0.0  # on the same clock
    started: bool = False
    ended: bool = False
    result: Any = None
    error: BaseException | None = None

    def notify(self) -> None:
        """Wake the caller after the end of the closure. Call this on the caller's loop."""
        self.ended = True
        _resolve(self.future, None)


class ThreadLane:
    """A lane with a thread. Use it as `async with ThreadLane(...) as lane`. Closing runs the queued closures first.

    on_start: called first on the new thread, for device selection and thread counts. `async with` raises errors of `on_start`.
    in_budget: False leaves the lane out of the metrics `busy/*` and `idle/*`, for the second lane of a device.
    close_timeout_s: seconds that closing waits for queued and running closures. Then closing raises a `LifecycleError` that names
        the running closure. The closure cannot be stopped: its daemon thread continues.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder | None = None,
        on_start: Callable[[], object] | None = None,
        *,
        close_timeout_s: float = 30.0,
        in_budget: bool = True,
    ) -> None:
        self.name = name
        self.open = False
        self._in_budget, self._recorder = in_budget, recorder
        self._on_start = on_start
        self._close_timeout_s = close_timeout_s
        self._wakeup = threading.Condition(threading.Lock())
        self._queue: list[tuple[int, int, LaneJob]] = []  # heap of (-priority, number, job), guarded by _wakeup
        self._submitted = 0
        self._current: tuple[str, float] | None = None
        self._thread: threading.Thread | None = None
        # The lane's thread calls these at its end. Guarded by _wakeup.
        self._end_callbacks: list[Callable[[], None]] = []

    async def __aenter__(self) -> ThreadLane:
        self.open = True
        if self._recorder is not None:
            self._recorder.register_lane(self.name, in_budget=self._in_budget)
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
        """Refuse new closures, run the queued closures, and end the thread. A second call does nothing."""
        with self._wakeup:
            if not self.open:
                return
            self.open = False
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
        atexit.unregister(self._end_with_interpreter)
        if not ended.result():
            name, since = self._current or ("", awake.now())
            work = f"closure {name!r} has been running for {awake.now() - since:.1f} s" if name else "no closure runs"
            raise LifecycleError(
                f"lane {self.name!r} did not close within {self._close_timeout_s:g} s: {work}, {len(self._queue)} more closures "
                "are queued; its thread cannot be stopped"
            )
        # The thread ends soon, because it has already called the end callbacks.
        self._thread.join(timeout=1.0)
        if cancelled is not None:
            raise cancelled

    def _end_with_interpreter(self) -> None:
        """Exit handler for a lane that nobody closed. A thread that returns from C++ after Python's end aborts the process."""
        with self._wakeup:
            self.open = False
            # No event loop runs any more, so no caller waits for these closures.
            self._queue.clear()
            self._wakeup.notify()
        assert self._thread is not None
        self._thread.join(self._close_timeout_s)

    def current(self) -> tuple[str, float] | None:
        return self._current

    @property
    def thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        """See `Lane.run`. Errors: LifecycleError if the lane is not open."""
        job = self._submit(fn, name, priority)
        try:
            await job.future
        except asyncio.CancelledError as exc:
            cancelled = exc
            if not job.ended:
                if self._withdraw(job):
                    raise
                # The cancellation has cancelled `job.future`, and `notify` needs a new future.
                job.future = job.loop.create_future()
                cancelled = await wait_shielded(job.future) or exc
            raise cancelled from job.error
        if self._recorder is not None:
            self._recorder.lane_resumed(self.name, job.finished_at)
        if job.error is not None:
            try:
                raise job.error
            finally:
                # The exception's traceback holds this frame, whose `job` holds the exception: break the cycle.
                del job
        return job.result  # type: ignore[no-any-return]  # the closure's result, a T

    def _submit(self, fn: Callable[[], Any], name: str, priority: int) -> LaneJob:
        loop = asyncio.get_running_loop()
        with self._wakeup:
            if not self.open:
                raise LifecycleError(f"lane {self.name!r} is not open: it cannot run {name!r}")
            if threading.current_thread() is self._thread:
                raise LifecycleError(f"{name!r} was submitted from lane {self.name!r} itself: call it directly")
            submitted_at = 0.0 if self._recorder is None else self._recorder.clock()
            job = LaneJob(fn, name, loop, loop.create_future(), submitted_at)
            self._submitted += 1
            heapq.heappush(self._queue, (-priority, self._submitted, job))
            self._wakeup.notify()
        return job

    def _withdraw(self, job: LaneJob) -> bool:
        """Remove the closure from the queue. False: it has already started."""
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
                # An idle thread must not keep the last closure and its objects alive.
                del job
        finally:
            with self._wakeup:
                callbacks = self._end_callbacks
            for callback in callbacks:
                callback()

    def _next(self) -> LaneJob | None:
        with self._wakeup:
            while not self._queue:
                if not self.open:
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
            # The caller raises the error. An error for lack of memory becomes OutOfMemory. The lane goes on.
            job.error = name_shortage(exc, f"{job.name} on {self.name}")
        self._current = None
        call_soon(job.loop, job.notify)


class SimulatedLane:
    """A lane without a thread. When the lane is free, a closure runs on the loop, and its effects are visible at once. The caller
    gets the result after `cost` seconds of the loop's time. On a loop with a virtual clock the order of events is deterministic.
    """

    # Closures run on the event loop.
    thread_id: int | None = None

    def __init__(self, name: str, recorder: Recorder | None = None) -> None:
        self.name = name
        self.open = False
        self._recorder = recorder
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []  # heap of (-priority, number, future)
        self._submitted = 0
        self._busy = False
        self._current: tuple[str, float] | None = None

    async def __aenter__(self) -> SimulatedLane:
        self.open = True
        if self._recorder is not None:
            self._recorder.register_lane(self.name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.open = False
        if self._busy:
            # With the lowest priority this call waits until all queued closures have run.
            last: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._submitted += 1
            heapq.heappush(self._queue, (sys.maxsize, self._submitted, last))
            cancelled = await wait_shielded(last)
            self._grant_next()
            if cancelled is not None:
                raise cancelled

    def current(self) -> tuple[str, float] | None:
        return self._current

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        if not self.open:
            raise LifecycleError(f"lane {self.name!r} is not open: it cannot run {name!r}")
        loop = asyncio.get_running_loop()
        self._submitted += 1
        submitted_at = 0.0 if self._recorder is None else self._recorder.clock()
        if self._busy:
            await self._wait_for_lane(loop, priority)
        self._busy = True
        self._current = (name, awake.now())
        cancelled: asyncio.CancelledError | None = None
        try:
            span = None if self._recorder is None else self._recorder.lane_busy(self.name, name, submitted=submitted_at)
            with span or contextlib.nullcontext():
                result, error = _call(fn)
                cancelled = await self._spend(loop, cost)
        finally:
            self._current = None
            self._grant_next()
        if cancelled is not None:
            raise cancelled from error
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return result  # type: ignore[no-any-return]  # the closure's result, a T

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
                # The lane was granted to this caller before the cancellation arrived.
                self._grant_next()
            raise

    async def _spend(self, loop: asyncio.AbstractEventLoop, cost: float) -> asyncio.CancelledError | None:
        """Wait `cost` seconds of loop time, also if the caller is cancelled. Returns the last cancellation, or None."""
        end = loop.time() + cost
        elapsed: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_at(end, _resolve, elapsed, True) if cost > 0 else loop.call_soon(_resolve, elapsed, True)
        try:
            await elapsed
        except asyncio.CancelledError as exc:
            if not elapsed.cancelled():
                return exc
            # The cancellation has cancelled the future. Wait for the remaining time on a new future.
            timer.cancel()
            elapsed = loop.create_future()
            loop.call_at(end, _resolve, elapsed, True)
            return await wait_shielded(elapsed) or exc
        return None

    def _grant_next(self) -> None:
        """Give the lane to the next waiting caller, if any. `_busy` then stays true, so that no new caller gets the lane first."""
        while self._queue:
            granted = heapq.heappop(self._queue)[2]
            if not granted.done():
                granted.set_result(None)
                return
        self._busy = False


def _call(fn: Callable[[], T]) -> tuple[Any, BaseException | None]:
    try:
        return fn(), None
    except BaseException as exc:  # the caller raises it
        return None, exc


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
