"""The watchdog: an OS thread that notices when nothing moves, says who waits for whom, and ends the run.

It speaks when the event loop or a lane is wedged, because it is neither. What it looks for:

  * the loop has not answered a ping for `loop_timeout_s`; the frame that holds it is named
  * one closure has held a lane for `lane_timeout_s`; the closure and its frame are named
  * nothing moved for as long as it may stand still now (`Standing`): the pumps for `stall_timeout_s`, a stage of the start or
    the end for `stage_timeout_s`; who holds the others up is named, the waits are listed
  * an ordered shutdown (`shutdown_deadline`) has not ended within `abort_grace_s`

First it prints a dump to stderr and asks the run to end (`on_stall`, called on the loop). If the process has not ended
in an orderly way within `abort_grace_s`, it ends it hard with exit code 4. With `hard_exit=False` (embedded in somebody
else's process) it never ends the process.

A closure that holds the GIL stops this thread too (a runaway regular expression does). For that case, with `hard_exit`,
there is a process beside this one (`sentry.py`), by whose signal `faulthandler` prints all stacks and the process ends.

All times are those in which this process ran (`awake.py`). No thread is started later than the first: there may be none to be had.
The loop watches the thread in turn, and replaces one that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..config.schema import WatchdogConfig
from ..errors import LifecycleError, StallError
from ..telemetry.lag import top_user_frame
from . import awake, sentry
from .describe import culprit
from .dump import Dump, WatchedLane
from .offload import StandbyThread

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder

_DUMP_LIMIT_S = 2.0
_TICK_S = 0.25  # how often the clock is read


@dataclass(frozen=True, slots=True)
class Standing:
    """What has to move now, and how long it may stand still."""

    counters: tuple[Any, ...]  # some change whenever it moves
    limit_s: float
    # What did not happen if none of them changes: "nothing was generated".
    sentence: str
    # Who holds it up, where that is not one who waits for another.
    where: Callable[[], str | None] | None = None
    elsewhere: Callable[[], str | None] | None = None  # what of another rank it waits for


class WatchdogState(Enum):
    """The life of a watchdog: progress counts while it is watching."""

    NEW = "new"
    WATCHING = "watching"
    # The run was asked to end, or a shutdown was ordered: only the deadline counts.
    ENDING = "ending"
    CLOSED = "closed"


@dataclass(slots=True)
class _Since:
    """How long a value has been the same, on the watchdog's own clock."""

    value: Any = None
    since: float = 0.0

    def seconds(self, value: Any, now: float) -> float:
        if value != self.value:
            self.value, self.since = value, now
        return now - self.since


class Watchdog:
    """`async with Watchdog(...)` on the loop to be watched. Closing ends the watch, also one that counts down.

    Open it first and close it last, around the lanes and the supervisor: it must outlive what it watches, or a wedged
    closure hangs the supervisor's exit unwatched. Lanes may be new when they are passed in.

    config: intervals and timeouts in seconds (section `watchdog` of the configuration).
    standing: what has to move now; None while standing still is right (an idle embedded run). Like `details` it is called on
        the watchdog's thread, so it may only read.
    on_stall: called once, on the loop, with the error that should end the run.
    details: sentences for the dump, such as a ledger's `describe`.
    silent: a few words for each other process that this one waits for and does not hear of; asked with a number of seconds, for
        each that it has not heard of for longer than that, which ends the run as an event loop does that is silent for so long.
    name: of this process, before what it says ("rank 1: ").
    """

    def __init__(
        self,
        config: WatchdogConfig,
        *,
        recorder: Recorder,
        standing: Callable[[], Standing | None],
        on_stall: Callable[[StallError], object],
        lanes: Sequence[WatchedLane] = (),
        details: Sequence[Callable[[], str]] = (),
        silent: Callable[[float | None], list[str]] = lambda longest_s: [],
        hard_exit: bool = True,
        name: str = "",
    ) -> None:
        self.state = WatchdogState.NEW
        self._config = config
        self._recorder = recorder
        self._standing = standing
        self._silent = silent
        self._name = name
        self._on_stall = on_stall
        self._lanes = lanes
        self._details = details
        self._hard_exit = hard_exit
        limits = (config.loop_timeout_s, config.lane_timeout_s, config.stall_timeout_s, config.stage_timeout_s)
        self._period = min(config.interval_s, *(limit / 4 for limit in (*limits, config.abort_grace_s)))
        self._looked = 0.0  # when the thread last did; as all times, on `awake.now`
        self._pinged = 0
        self._answered = 0
        self._ping_sent = 0.0
        self._progress_since = _Since()
        self._lane_since: dict[str, _Since] = {}
        self._deadline: float | None = None
        self._why_ending = ""
        self._lock = threading.Lock()  # guards state, _deadline, _why_ending
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._thread: threading.Thread | None = None
        self._writer: StandbyThread | None = None
        self._sentry: subprocess.Popen[bytes] | None = None
        self._until_closed = contextlib.ExitStack()

    async def __aenter__(self) -> Watchdog:
        if self.state is not WatchdogState.NEW:
            raise LifecycleError(f"the watchdog was opened twice (it is {self.state.value})")
        self.state = WatchdogState.WATCHING
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._until_closed.enter_context(awake.on_loop(self._loop))
            self._writer = StandbyThread("asyncrl-watchdog-dump")
            self._until_closed.callback(self._writer.end, 1.0)  # where it does not hang in a pipe
            if self._hard_exit:
                self._start_sentry()
            self._start_thread()
            stack.pop_all()
        self._look_after_thread()
        return self

    def _start_sentry(self) -> None:
        """Before the thread has looked once: from now on the GIL may be held for ever."""
        longest = max(self._config.loop_timeout_s, self._config.lane_timeout_s) + self._config.abort_grace_s
        command = [sys.executable, "-I", "-S", sentry.__file__, str(longest), self._name]
        out = subprocess.DEVNULL if sys.__stderr__ is None else 2
        self._sentry = subprocess.Popen(command, 0, None, subprocess.PIPE, out, out, start_new_session=True)
        self._until_closed.enter_context(self._sentry)
        self._until_closed.callback(self._sentry.kill)
        if not faulthandler.is_enabled():
            with contextlib.suppress(RuntimeError, ValueError, OSError):  # stderr is no file: no stacks, then
                faulthandler.enable(sys.__stderr__ or 2)
                self._until_closed.callback(faulthandler.disable)

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch. Closing twice is fine."""
        with self._lock:
            self.state = WatchdogState.CLOSED
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_DUMP_LIMIT_S + 1.0)
        self._until_closed.close()

    def shutdown_deadline(self, reason: str) -> None:
        """An ordered shutdown begins now: it has `abort_grace_s` until `close`. The first call counts."""
        with self._lock:
            if self.state is not WatchdogState.WATCHING:
                return
            self.state = WatchdogState.ENDING
            self._why_ending = reason
            self._deadline = awake.now() + self._config.abort_grace_s

    # -- the thread, and the loop that watches it ----------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._looked = awake.now()
        thread = threading.Thread(target=self._main, name="asyncrl-watchdog", daemon=True)
        thread.start()
        self._thread = thread

    def _look_after_thread(self) -> None:
        assert self._loop is not None and self._thread is not None
        if self._stop.is_set():
            return
        if not self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # no thread can be had now: at the next look
                self._start_thread()
        self._loop.call_later(self._period, self._look_after_thread)

    def _main(self) -> None:
        while not self._stop.wait(min(_TICK_S, self._period)):
            if awake.now() - self._looked < self._period:
                continue
            self._looked = awake.now()
            self._beat()
            try:
                trouble = self._look()
            except Exception as exc:
                # A broken counter must end the run by name, not silence the watch.
                trouble = f"the watchdog's own questions failed: {type(exc).__name__}: {exc}"
            if trouble is not None:
                self._raise_alarm(self._name + "; ".join([trouble, *self._silent(None)]))

    def _beat(self) -> None:
        if self._sentry is not None and self._sentry.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it was killed, or is being closed
                if select.select([], [self._sentry.stdin], [], 0)[1]:  # else it is stopped, and the pipe is full
                    self._sentry.stdin.write(b".")

    def _look(self) -> str | None:
        """One sentence about the first thing that is wrong, or None."""
        if self.state is WatchdogState.ENDING:
            if self._deadline is None or awake.now() < self._deadline:
                return None
            return f"shutdown ({self._why_ending}) did not end within {self._config.abort_grace_s:g} s"
        # Other ranks before lanes: a lane that waits in a collective for a rank that stands still is not the cause.
        return (
            self._look_at_loop()
            or next(iter(self._silent(self._config.loop_timeout_s)), None)
            or self._look_at_lanes()
            or self._look_at_progress()
        )

    def _look_at_loop(self) -> str | None:
        assert self._loop is not None
        now = awake.now()
        if self._answered == self._pinged:
            self._pinged += 1
            self._ping_sent = now
            try:
                self._loop.call_soon_threadsafe(self._answer, self._pinged)
            except RuntimeError:
                # The loop is closed: nobody will answer, and closing is up to its owner.
                self._answered = self._pinged
            return None
        silent = now - self._ping_sent
        if silent <= self._config.loop_timeout_s:
            return None
        return f"the event loop has been silent for {silent:.1f} s in {self._frame_of(self._loop_thread)}"

    def _look_at_lanes(self) -> str | None:
        now = awake.now()
        for lane in self._lanes:
            current = lane.current()
            held = self._lane_since.setdefault(lane.name, _Since()).seconds(current, now)
            if current is not None and held > self._config.lane_timeout_s:
                where = self._frame_of(getattr(lane, "thread_id", None))
                return f"lane {lane.name!r} has been held by closure {current[0]!r} for {held:.1f} s in {where}"
        return None

    def _look_at_progress(self) -> str | None:
        standing = self._standing()
        # While standing still is right the time starts anew: an idle stretch is not charged to what comes after it.
        value = object() if standing is None else (standing.sentence, standing.counters)
        still = self._progress_since.seconds(value, awake.now())
        if standing is None or still <= standing.limit_s:
            return None
        held_up = None if standing.where is None else standing.where()
        if held_up is None:
            elsewhere = None if standing.elsewhere is None else standing.elsewhere()
            held_up = culprit(self._recorder.active_waits(), self._recorder.clock(), elsewhere)
        return f"{standing.sentence} for {still:.1f} s: {held_up}"

    def _answer(self, number: int) -> None:
        self._answered = number

    def _frame_of(self, thread_id: int | None) -> str:
        return (None if thread_id is None else top_user_frame(thread_id)) or "no Python code of ours"

    def _raise_alarm(self, trouble: str) -> None:
        last = self.state is WatchdogState.ENDING
        ends = last and self._hard_exit
        headline = trouble + ("; ending the process with exit code 4" if ends else "")
        dump = Dump(headline, self._recorder, self._lanes, self._loop, self._loop_thread, self._details)
        assert self._writer is not None
        dump.emit(self._writer, _DUMP_LIMIT_S)
        if self._stop.is_set():
            return  # the run ended in an orderly way while the dump was written
        if ends:
            # The only place that ends the process without cleaning up, and only here is it right: the run was asked to
            # end and did not, so cleanup code is what hangs. Any exception or sys.exit would wait for the same thing.
            os._exit(StallError.exit_code)
        if last:
            # Embedded: said once, and ending the process is for its owner.
            self._stop.set()
        with self._lock:
            if self.state is WatchdogState.WATCHING:
                self.state = WatchdogState.ENDING
                self._why_ending = trouble
                self._deadline = awake.now() + self._config.abort_grace_s
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._on_stall, StallError(trouble))
        except RuntimeError:
            # The loop is closed: there is nobody to tell, the deadline does the rest.
            return
