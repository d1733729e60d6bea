"""The recorder: what happened, who waited for whom, and the metrics of a step. One instance a run.

Guarantees
* Every method may be called from any thread and from any task; nothing here awaits or blocks.
* An event costs one or two microseconds: it is on the path of every decode step.
* Memory is bounded: after `max_events` trace events, later ones are counted (`dropped_events`), not stored; the
  intervals of a step are kept apart, so that the idle account stays right after the trace is full.

Three stores, three readers: trace events (`trace.write_trace`), the intervals of the step (`take_window`, read by
`budget`), and the metrics of the step (`drain`). Active waits can be read at any moment by the watchdog's thread.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .ranges import Ranges
from .records import CAUSES, Cause, Interval, TraceEvent, Wait, Window
from .samples import Reduce, Samples

LANE_PREFIX = "lane:"
# More than it takes until another process has said what it did.
LATE_S = 0.25
_USERS = ("the environment", "the program", "hook ")  # who waits for them waits for code of the user's
# Who waits may be one group of thousands: they share a track.
_ONE_OF = re.compile(r"\bgroup -?\d+$")


class Span:
    """Context manager of `Recorder.span`, `lane_busy` and `work`. Enter and leave it once."""

    __slots__ = ("_args", "_cause", "_lane", "_name", "_range", "_recorder", "_track", "ended", "started")

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        track: str,
        args: dict[str, Any] | None,
        lane: str | None,
        cause: str | None,
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._track = track
        self._args = args
        self._lane = lane
        self._cause = cause
        self._range: Any = None
        self.started = 0.0
        self.ended = 0.0

    def __enter__(self) -> Span:
        recorder = self._recorder
        self._range = recorder._ranges.open(self._name)
        self.started = recorder.clock()
        if self._lane is not None or self._cause is not None:
            recorder._open_interval(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        self.ended = recorder.clock()
        recorder._ranges.close(self._range)
        recorder._close_span(self)


class WaitSpan:
    """Context manager of `Recorder.wait`."""

    __slots__ = ("_recorder", "cause", "on", "since", "what", "who")

    def __init__(self, recorder: Recorder, who: str, what: str, on: str, cause: str) -> None:
        self._recorder = recorder
        self.who = who
        self.what = what
        self.on = on
        self.cause = cause
        self.since = 0.0

    def __enter__(self) -> Self:
        self.since = self._recorder.clock()
        self._recorder._open_wait(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder._close_wait(self)


class Watched(WaitSpan):
    """Context manager of `Recorder.watch`. It takes no part in the trace."""

    __slots__ = ("task",)

    def __init__(self, recorder: Recorder, who: str, what: str, on: str) -> None:
        super().__init__(recorder, who, what, on, "")
        self.task = asyncio.current_task()

    def __enter__(self) -> Self:
        self._recorder.pass_on("", self.on)
        return super().__enter__()

    def passes_to(self, on: str) -> None:
        """From now on it is with `on`."""
        self._recorder.pass_on(self.on, on)
        self.on, self.since = on, self._recorder.clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.pass_on(self.on, "")
        self._recorder._forget_wait(self)


class Timer:
    """Context manager of `Recorder.timed`."""

    __slots__ = ("_metric", "_recorder", "_started")

    def __init__(self, recorder: Recorder, metric: str) -> None:
        self._recorder = recorder
        self._metric = metric
        self._started = 0.0

    def __enter__(self) -> Timer:
        self._started = self._recorder.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.count(self._metric, self._recorder.clock() - self._started)


class Recorder:
    """See the module docstring. `clock` gives seconds; all times in and out are on it. `max_events = 0`: no trace."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, max_events: int = 500_000, nvtx: bool = True
    ) -> None:
        self.clock = clock
        self.started = clock()
        self.started_unix = time.time()
        self.max_events = max_events
        self.dropped_events = 0
        # Reentrant: a destructor that counts something may run while this thread is inside one of the methods below.
        self._lock = threading.RLock()
        # `TraceEvent`s as tuples of atoms, args included, which Python's garbage collector stops looking at: it would else take
        # longer with every step.
        self._events: list[tuple[Any, ...]] = []
        self._busy: list[Interval] = []
        self._idle: list[Interval] = []
        self._open_spans: dict[int, Span] = {}
        self._waits: dict[int, WaitSpan] = {}
        self._with_users = self._with_engine = 0  # see `pass_on`
        self._away: WaitSpan | None = None
        self._lane_end: dict[str, float] = {}
        self._window_start = self.started
        self._reset_metrics()
        self._ranges = Ranges(nvtx)

    # ---- spans and waits

    def span(self, name: str, *, track: str, **args: Any) -> Span:
        """A stage: an NVTX range and a trace event. A track `lane:<name>` makes it busy time of that lane."""
        lane = track[len(LANE_PREFIX) :] if track.startswith(LANE_PREFIX) else None
        return Span(self, name, track, args or None, lane, None)

    def lane_busy(self, lane: str, name: str, *, submitted: float | None = None) -> Span:
        """The lane's thread runs closure `name`. `submitted` is when it was handed in (on this clock).

        The part of submission to start in which the lane was idle is recorded as cause `handoff`.
        """
        if submitted is not None:
            now = self.clock()
            idle_since = max(submitted, self._lane_end.get(lane, submitted))
            self._add_idle("handoff", lane, idle_since, now)
            self.observe("lane/handoff_ms", 1e3 * max(0.0, now - idle_since))
        return Span(self, name, LANE_PREFIX + lane, None, lane, None)

    def lane_resumed(self, lane: str, ended: float) -> None:
        """The caller of a closure that ended at `ended` runs again: the time between is recorded as cause `loop`."""
        now = self.clock()
        self._add_idle("loop", lane, ended, now)
        self.observe("lane/resume_ms", 1e3 * max(0.0, now - ended))

    def work(self, who: str, what: str, **args: Any) -> Span:
        """Python work on the loop's thread between two closures: a span on track `who`, cause `loop` for idle lanes.

        No await inside, or the time of others is booked as this one's.
        """
        return Span(self, what, who, args or None, None, "loop")

    def wait(self, who: str, what: str, *, on: str, cause: Cause) -> WaitSpan:
        """`who` ("train pump") waits for `what` ("a whole group") from `on` ("score pump").

        ValueError: the cause is not one of `Cause`.
        """
        if cause not in CAUSES:
            raise ValueError(f"wait of {who!r} has cause {cause!r}; expected one of {', '.join(sorted(CAUSES))}")
        return WaitSpan(self, who, what, on, cause)

    def watch(self, who: str, what: str, *, on: str) -> Watched:
        """For work of users that may stand still, of the calling task: among `active_waits`. What is `on` counts: see `pass_on`."""
        return Watched(self, who, what, on)

    def pass_on(self, before: str, now: str) -> None:
        """The next move of an episode, a hook or a program is no longer with `before` but with `now` ("": with nobody).

        While one is with code of the user's, and none with the engine, idle time has the cause `environment`.
        """
        with self._lock:
            for on, by in ((before, -1), (now, 1)):
                self._with_engine += by * (on == "the engine")
                self._with_users += by * on.startswith(_USERS)
            if self._with_users and not self._with_engine:
                if self._away is None:
                    self._away = WaitSpan(self, "environment", "the next move", "your code", "environment")
                    self._away.since = self.clock()
            elif self._away is not None:
                self._close_wait(self._away)
                self._away = None

    def idle(self, cause: Cause, start: float, end: float) -> None:
        """A stretch of everybody's waiting that is known only afterwards."""
        if cause not in CAUSES:
            raise ValueError(f"idle stretch has cause {cause!r}; expected one of {', '.join(sorted(CAUSES))}")
        self._add_idle(cause, None, start, end)

    def active_waits(self) -> list[Wait]:
        """Who waits for whom now, longest first."""
        with self._lock:
            waits = list(self._waits.values())
        found = (Wait(w.who, w.what, w.on, w.cause, w.since, getattr(w, "task", None)) for w in waits)
        return sorted(found, key=lambda wait: wait.since)

    # ---- trace only

    def instant(self, name: str, *, track: str, **args: Any) -> None:
        """A moment without length in the trace, with arguments of plain values."""
        self._add_event("i", name, track, self.clock(), 0.0, _atoms(args))

    def events(self) -> list[TraceEvent]:
        """The trace so far, in order of ending."""
        with self._lock:
            events = list(self._events)
        return [TraceEvent._make((*event[:5], dict(event[5]) if event[5] else None)) for event in events]

    # ---- metrics of the step

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter, which `drain` reads and sets to 0."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + by

    def gauge(self, name: str, value: float) -> None:
        """The last one until `drain` counts."""
        with self._lock:
            self._gauges[name] = float(value)

    def observe(self, name: str, value: float, *, reduce: Reduce = "mean") -> None:
        """One sample; `drain` gives their mean, or what `reduce` says. A name keeps its first `reduce`."""
        with self._lock:
            entry = self._samples.get(name)
            if entry is None:
                entry = self._samples[name] = Samples(reduce)
            entry.add(float(value))

    def log(self, name: str, value: float) -> None:
        """A number of the user's own: summed, and counted as `name#`, until `take_counts`."""
        with self._lock:
            self.count(name, value)
            self.count(f"{name}#")

    def timed(self, metric: str) -> Timer:
        """Adds the seconds spent inside to the count `metric` (names `time/...`)."""
        return Timer(self, metric)

    def drain(self) -> dict[str, float]:
        """The metrics since the last drain, by name: observations reduced, counts summed, gauges as last set."""
        counts, gauges, samples = self.take_metrics()
        return {**{name: entry.value() for name, entry in samples.items()}, **counts, **gauges}

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float], dict[str, Samples]]:
        """As `drain`, not reduced: counts, gauges, samples."""
        with self._lock:
            taken = self._counts, self._gauges, self._samples
            self._reset_metrics()
        return taken

    def merge(self, name: str, samples: Samples) -> None:
        """Samples of one name that were taken elsewhere."""
        with self._lock:
            if name in self._samples:
                self._samples[name].merge(samples)
            else:
                self._samples[name] = samples

    def take_counts(self, prefixes: tuple[str, ...]) -> dict[str, float]:
        """The counts since the last drain whose names begin so; `drain` will not give them again."""
        with self._lock:
            taken = {name: value for name, value in self._counts.items() if name.startswith(prefixes)}
            for name in taken:
                del self._counts[name]
        return taken

    # ---- intervals of the step

    def register_lane(self, lane: str) -> None:
        """Account for this lane from now on, before its first closure too."""
        with self._lock:
            self._lane_end.setdefault(lane, self.clock())

    def take_window(self) -> Window:
        """The intervals since the last call. What is still open ends with the window, and goes on in the next."""
        with self._lock:
            start, end = self._window_start, self.clock()
            busy, idle = self._busy, self._idle
            # What other processes did is booked `LATE_S` later than it was: some of it ends in the next window.
            self._busy, self._idle = ([each for each in kind if each.end > end] for kind in (busy, idle))
            self._window_start = end
            lanes = tuple(self._lane_end)
            open_spans = list(self._open_spans.values())
            waits = [wait for wait in (*self._waits.values(), self._away) if wait and wait.cause]
        for span in open_spans:
            if span._lane is not None:
                busy.append(Interval(span._name, span._lane, span.started, end))
            elif span._cause is not None:
                idle.append(Interval(span._cause, None, span.started, end))
        idle.extend(Interval(wait.cause, None, wait.since, end) for wait in waits)
        return Window(start, end, lanes, busy, idle)

    def book_busy(self, lane: str, name: str, start: float, end: float) -> None:
        """A closure that ran on a lane of another process, by this clock. It is heard of late, so the account of that lane is
        `LATE_S` behind; the trace is not."""
        with self._lock:
            self._lane_end[lane] = end
            self._store(self._busy, Interval(name, lane, start + LATE_S, end + LATE_S))
        self._add_event("X", name, LANE_PREFIX + lane, start, end - start, None)

    def book_idle(self, lane: str, cause: str, start: float, end: float) -> None:
        """What such a lane waited for."""
        self._add_idle(cause, lane, start + LATE_S, end + LATE_S)

    # ---- inside

    def _reset_metrics(self) -> None:
        self._counts: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._samples: dict[str, Samples] = {}

    def _add_event(self, *event: Any) -> None:
        with self._lock:
            if len(self._events) < self.max_events:
                self._events.append(event)
            else:
                self.dropped_events += 1

    def _add_idle(self, cause: str, lane: str | None, start: float, end: float) -> None:
        if end <= start:
            return
        with self._lock:
            self._store(self._idle, Interval(cause, lane, start, end))

    def _store(self, intervals: list[Interval], interval: Interval) -> None:
        # A run that never takes its windows would else keep the intervals of all its steps.
        if len(intervals) < max(self.max_events, 100_000):
            intervals.append(interval)

    def _open_interval(self, span: Span) -> None:
        with self._lock:
            self._open_spans[id(span)] = span
            if span._lane is not None:
                self._lane_end.setdefault(span._lane, span.started)

    def _close_span(self, span: Span) -> None:
        with self._lock:
            if span._lane is not None:
                self._open_spans.pop(id(span), None)
                self._lane_end[span._lane] = span.ended
                self._store(self._busy, Interval(span._name, span._lane, span.started, span.ended))
            elif span._cause is not None:
                self._open_spans.pop(id(span), None)
                self._store(self._idle, Interval(span._cause, None, span.started, span.ended))
            if len(self._events) < self.max_events:
                duration = span.ended - span.started
                self._events.append(("X", span._name, span._track, span.started, duration, _atoms(span._args)))
            else:
                self.dropped_events += 1

    def _open_wait(self, wait: WaitSpan) -> None:
        with self._lock:
            self._waits[id(wait)] = wait

    def _forget_wait(self, wait: WaitSpan) -> None:
        with self._lock:
            self._waits.pop(id(wait), None)

    def _close_wait(self, wait: WaitSpan) -> None:
        with self._lock:
            end = self.clock()
            self._waits.pop(id(wait), None)
            self._store(self._idle, Interval(wait.cause, None, wait.since, end))
            if len(self._events) < self.max_events:
                args = {"what": wait.what, "on": wait.on, "cause": wait.cause}
                name, track = f"wait: {wait.what}", _ONE_OF.sub("groups", wait.who)
                if track != wait.who:
                    args["who"] = wait.who
                self._events.append(("X", name, track, wait.since, end - wait.since, _atoms(args)))
            else:
                self.dropped_events += 1


def _atoms(args: dict[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    return tuple(args.items()) if args else None
