"""The watchdog is an OS thread that ends a run without progress, and names the task or closure that blocks the run.

A blocked event loop or lane (the thread that owns a device) does not block the watchdog, which raises an alarm when

  * the loop has not answered a ping for `loop_timeout_s`; the alarm names the frame that blocks the loop
  * one closure has run on a lane for `lane_timeout_s`; the alarm names the closure and its frame
  * no counter of the current `ProgressLimit` has changed for `limit_s`; the alarm names the cause
  * a requested shutdown (`shutdown_deadline`) has not ended within `abort_grace_s`

At an alarm the watchdog prints a dump to stderr and asks the run to end (`on_stall`, called on the loop). If the run does not close
the watchdog within `abort_grace_s`, the watchdog ends the process, with exit code 4, or 12 if a rank was lost. With
`hard_exit=False`, for a process that embeds the run, the watchdog never ends the process.

A closure that holds the GIL, such as a runaway regular expression, stops the watchdog's thread too. With `hard_exit` a second
process handles that case (`sentry.py`): it sends SIGABRT, and `faulthandler` prints all stacks.

Suspended time does not count (`awake.py`). All threads start when the watchdog opens: the system may refuse threads later.
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.schema import WatchdogConfig
from ..errors import RankLost, StallError
from ..telemetry.lag import top_user_frame
from . import awake, sentry
from .describe import culprit, describe_tasks, describe_wait
from .lane import Lane
from .offload import StandbyThread

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder

_DUMP_LIMIT_S = 2.0
# Seconds between two readings of the clock, so that `awake.py` notices suspensions.
_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class ProgressLimit:
    """The time that the run may currently spend without progress. Progress means that any of `counters` changes.

    sentence: the alarm's first words, such as "nothing was generated". cause: returns what blocks the run; None: the alarm
    names a recorded wait. remote_cause: returns what this rank needs from another rank, or None.
    """

    counters: tuple[Any, ...]
    limit_s: float
    sentence: str
    cause: Callable[[], str | None] | None = None
    remote_cause: Callable[[], str | None] | None = None


class Watchdog:
    """Use `async with Watchdog(...)` on the loop to be watched. Closing stops the watchdog, even in a countdown of `abort_grace_s`.

    Open the watchdog before the lanes and the supervisor, and close it after them. In another order nothing ends a supervisor whose
    exit waits for a blocked closure. Lanes need not be open yet when they are passed in.

    config: intervals and timeouts in seconds (section `watchdog` of the configuration).
    progress_limit: returns the limit that holds now, or None while no progress is expected (an idle embedded run). Runs on the
        watchdog's thread, like `silent_ranks`. `details` run on the thread that prints the dump. All three may only read.
    on_stall: called on the loop with the error that should end the run, and again if an embedded run does not end in time.
    details: functions that return sentences for the dump, such as a ledger's `describe`.
    silent_ranks: called with True, returns sentences that say why the run cannot go on without a lost rank; the first becomes the
        alarm, a RankLost. Called with False, returns a sentence for each disconnected rank; every alarm ends with these sentences.
    name: a prefix for all output, such as "rank 1: ".
    """

    def __init__(
        self,
        config: WatchdogConfig,
        *,
        recorder: Recorder,
        progress_limit: Callable[[], ProgressLimit | None],
        on_stall: Callable[[StallError | RankLost], object],
        lanes: Sequence[Lane] = (),
        details: Sequence[Callable[[], str]] = (),
        silent_ranks: Callable[[bool], list[str]] = lambda fatal: [],
        hard_exit: bool = True,
        name: str = "",
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._progress_limit = progress_limit
        self._silent_ranks = silent_ranks
        self._name = name
        self._on_stall = on_stall
        self._lanes = lanes
        self._details = details
        self._hard_exit = hard_exit
        limits = (config.loop_timeout_s, config.lane_timeout_s, config.stall_timeout_s, config.stage_timeout_s)
        self._period = min(config.interval_s, *(limit / 4 for limit in (*limits, config.abort_grace_s)))
        # All times are `awake.now()`.
        self._last_check = 0.0
        self._last_ping, self._last_answer, self._ping_sent = 0, 0, 0.0
        self._progress: Any = None  # sentence and counters of the limit
        self._progress_since = 0.0  # when `_progress` last changed
        # Set when the run is asked to end. From then on the watchdog checks only this deadline.
        self._deadline: float | None = None
        self._ending_reason = ""
        self._exit_code = StallError.exit_code
        self._lock = threading.Lock()  # guards the start of the countdown
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._thread: threading.Thread | None = None
        self._writer: StandbyThread | None = None
        self._sentry: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()

    async def __aenter__(self) -> Watchdog:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._resources.enter_context(awake.on_loop(self._loop))
            self._writer = StandbyThread("asyncrl-watchdog-dump")
            # At most a second: the writer may be blocked by a full pipe.
            self._resources.callback(self._writer.end, 1.0)
            if self._hard_exit:
                self._start_sentry()
            self._last_check = awake.now()
            self._thread = threading.Thread(target=self._main, name="asyncrl-watchdog", daemon=True)
            self._thread.start()
            stack.pop_all()
        return self

    def _start_sentry(self) -> None:
        limit_s = max(self._config.loop_timeout_s, self._config.lane_timeout_s) + self._config.abort_grace_s
        command = [sys.executable, "-I", "-S", sentry.__file__, str(limit_s), self._name]
        out = subprocess.DEVNULL if sys.__stderr__ is None else 2
        self._sentry = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
        )
        self._resources.enter_context(self._sentry)
        self._resources.callback(self._sentry.kill)
        if not faulthandler.is_enabled():
            # `enable` fails if stderr is no file. Then the sentry ends the process without printing stacks.
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                faulthandler.enable(sys.__stderr__ or 2)
                self._resources.callback(faulthandler.disable)

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the watchdog. A second call does nothing."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_DUMP_LIMIT_S + 1.0)
        self._resources.close()

    def shutdown_deadline(self, reason: str) -> None:
        """Start the countdown of a requested shutdown: `close` must follow within `abort_grace_s`. Later calls do nothing."""
        self._start_countdown(reason, StallError.exit_code)

    def _start_countdown(self, reason: str, exit_code: int) -> None:
        with self._lock:
            if self._deadline is None and not self._stop.is_set():
                self._ending_reason, self._exit_code = reason, exit_code
                self._deadline = awake.now() + self._config.abort_grace_s

    def _main(self) -> None:
        while not self._stop.wait(min(_TICK_S, self._period)):
            if awake.now() - self._last_check < self._period:
                continue
            self._last_check = awake.now()
            self._feed_sentry()
            try:
                problem = self._find_problem()
                silent = self._silent_ranks(False) if problem is not None else []
            except BaseException as exc:
                # Without this handler a counter that raises would end the thread, and nothing would watch the run.
                problem, silent = StallError(f"the watchdog's check failed: {type(exc).__name__}: {exc}"), []
            if problem is not None:
                self._raise_alarm(type(problem)(self._name + "; ".join([str(problem), *silent])))

    def _feed_sentry(self) -> None:
        if self._sentry is not None and self._sentry.stdin is not None:
            # The write fails if the sentry was killed. It would block if the sentry is suspended and the pipe is full.
            with contextlib.suppress(OSError, ValueError):
                if select.select([], [self._sentry.stdin], [], 0)[1]:
                    self._sentry.stdin.write(b".")

    def _find_problem(self) -> StallError | RankLost | None:
        if self._deadline is not None:
            if awake.now() < self._deadline:
                return None
            return StallError(f"shutdown ({self._ending_reason}) did not end within {self._config.abort_grace_s:g} s")
        stall = self._check_loop()
        # Ranks are checked before lanes: a lane may be blocked just because it waits, in a collective, for a silent rank.
        if stall is None and (silent := self._silent_ranks(True)):
            return RankLost(silent[0])
        stall = stall or self._check_lanes() or self._check_progress()
        return None if stall is None else StallError(stall)

    def _check_loop(self) -> str | None:
        assert self._loop is not None
        now = awake.now()
        if self._last_answer == self._last_ping:
            self._last_ping += 1
            self._ping_sent = now
            try:
                self._loop.call_soon_threadsafe(setattr, self, "_last_answer", self._last_ping)
            except RuntimeError:
                # The loop is closed, so it never answers. This is no reason for an alarm.
                self._last_answer = self._last_ping
            return None
        silent_s = now - self._ping_sent
        if silent_s <= self._config.loop_timeout_s:
            return None
        return f"the event loop has been silent for {silent_s:.1f} s in {self._frame_of(self._loop_thread)}"

    def _check_lanes(self) -> str | None:
        for lane in self._lanes:
            if (current := lane.current()) is None:
                continue
            held_s = awake.now() - current[1]
            if held_s > self._config.lane_timeout_s:
                frame = self._frame_of(lane.thread_id)
                return f"lane {lane.name!r} has been held by closure {current[0]!r} for {held_s:.1f} s in {frame}"
        return None

    def _check_progress(self) -> str | None:
        limit = self._progress_limit()
        # A new object differs from every other value, so time without a limit does not count as time without progress.
        value = object() if limit is None else (limit.sentence, limit.counters)
        if value != self._progress:
            self._progress, self._progress_since = value, awake.now()
        without_progress_s = awake.now() - self._progress_since
        if limit is None or without_progress_s <= limit.limit_s:
            return None
        cause = None if limit.cause is None else limit.cause()
        if cause is None:
            remote_cause = None if limit.remote_cause is None else limit.remote_cause()
            cause = culprit(self._recorder.active_waits(), self._recorder.clock(), remote_cause)
        return f"{limit.sentence} for {without_progress_s:.1f} s: {cause}"

    def _frame_of(self, thread_id: int | None) -> str:
        return (None if thread_id is None else top_user_frame(thread_id)) or "no Python code but the event loop's"

    def _raise_alarm(self, problem: StallError | RankLost) -> None:
        deadline_passed = self._deadline is not None and awake.now() >= self._deadline
        must_exit = deadline_passed and self._hard_exit
        headline = str(problem) + (f"; ending the process with exit code {self._exit_code}" if must_exit else "")
        printed = threading.Event()
        assert self._writer is not None
        # Printed by another thread, because a full pipe must not block the watchdog.
        self._writer.work.put(lambda: self._print_dump(headline))
        self._writer.work.put(printed.set)
        printed.wait(_DUMP_LIMIT_S)
        if self._stop.is_set():
            return  # meanwhile the run has closed the watchdog
        if must_exit:
            # The run did not end when asked, so its cleanup code hangs. An exception or sys.exit would wait for that code.
            os._exit(self._exit_code)
        if deadline_passed:
            # The program that embeds the run decides about its own process. The watchdog stops after this alarm.
            self._stop.set()
        self._start_countdown(str(problem), problem.exit_code)
        assert self._loop is not None
        # Fails if the loop is closed. With `hard_exit` the deadline then ends the process.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_stall, problem)

    def _print_dump(self, headline: str) -> None:
        """Print all recorded waits, lanes, tasks, and the stacks of all threads to stderr."""

        def waits() -> Iterator[str]:
            now = self._recorder.clock()
            yield from (describe_wait(wait, now) for wait in self._recorder.active_waits())

        def lanes() -> Iterator[str]:
            for lane in self._lanes:
                current = lane.current()
                state = "is idle" if current is None else f"has run {current[0]!r} for {awake.now() - current[1]:.1f} s"
                yield f"lane {lane.name!r} {state}"

        def threads() -> Iterator[str]:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                role = " (event loop)" if ident == self._loop_thread else ""
                yield f"thread {names.get(ident, '?')!r}{role}:\n{''.join(traceback.format_stack(frame)).rstrip()}"

        # Each part is printed by itself, so that a part that fails does not hide the parts before it.
        print(f"\n=== asyncrl watchdog: {headline} ===", file=sys.stderr, flush=True)
        sections: dict[str, Callable[[], Iterator[str]]] = {
            "waits": waits,
            "lanes": lanes,
            "state": lambda: (detail() for detail in self._details),
            "tasks": lambda: iter(describe_tasks(asyncio.all_tasks(self._loop))),
            "threads": threads,
        }
        for title, lines in sections.items():
            try:
                text = "\n".join([f"{title}:", *(f"  {line}" for line in [*lines()] or ["(none)"])])
            except Exception as exc:  # print the other sections all the same
                text = f"({title} could not be read: {type(exc).__name__}: {exc})"
            print(text, file=sys.stderr, flush=True)
        print("=== end of the watchdog's dump ===", file=sys.stderr, flush=True)
