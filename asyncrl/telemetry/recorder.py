"""The recorder of a run: trace events, waits, and the metrics of a step.

Guarantees
* Any thread may call any method, except `register_device` and `watch`. No method is a coroutine, and only `finish_devices` blocks.
* An event costs one or two microseconds. Every decode step records events.
* Memory is bounded: after `max_events` trace events, further events are only counted (`dropped_events`). The intervals of a step
  are stored separately, so the idle shares stay correct when the trace is full.

The recorder stores trace events (read by `trace.write_trace`), the intervals of a step (`take_window`, for `budget.py`), and the
metrics of a step (`drain`). The watchdog's thread can read `active_waits` at any time.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import nvtx

from .device_time import DeviceEvent, DeviceTimes
from .records import Cause, Interval, TraceEvent, Wait, Window
from .samples import Reduce, Samples

LANE_PREFIX = "lane:"
# The intervals of other processes count as if they had happened this much later: by then their records usually have arrived.
REMOTE_DELAY_S = 0.25
# An actor (`Recorder.change_actor`) runs the user's code if its name begins with one of these. A hook is named "hook NAME".
_USER_CODE = ("the environment", "the program", "hook ")
# Thousands of groups may wait. All their waits share one track of the trace.
_GROUP_NAME = re.compile(r"\bgroup -?\d+$")


class NvtxRanges:
    """NVTX ranges, which the profiler `nsys` shows in the domain `asyncrl`. Any thread may open and close them. Does nothing if
    `on` is False or the user set `NVTX_DISABLE`. Without a profiler a range costs one comparison."""

    def __init__(self, on: bool) -> None:
        self._domain: Any = nvtx.get_domain("asyncrl") if on and nvtx.enabled() else None
        self._attributes: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """Begin a range. Pass the result to `close`."""
        domain = self._domain
        if domain is None:
            return None
        attributes = self._attributes.get(name) or domain.get_event_attributes(message=name)
        # None: no profiler is attached, and none can attach to this process later.
        if attributes is None:
            self._domain = None
            return None
        self._attributes[name] = attributes
        return domain.start_range(attributes)

    def close(self, opened: Any) -> None:
        """End the range that `open` began."""
        if opened is not None and self._domain is not None:
            self._domain.end_range(opened)


@dataclass(slots=True, eq=False)
class Span:
    """Context manager of `Recorder.span`, `lane_busy` and `work`. Enter and leave it once."""

    _recorder: Recorder
    _name: str
    _track: str
    _args: dict[str, Any] | None
    _lane: str | None
    _cause: str | None
    _range: Any = None
    started: float = 0.0
    ended: float = 0.0

    def __enter__(self) -> Span:
        recorder = self._recorder
        self._range = recorder._ranges.open(self._name)
        self.started = recorder.clock()
        if self._lane is not None or self._cause is not None:
            recorder._open_interval(self)
        return self

    def __exit__(self, *exc: object) -> None:
        recorder = self._recorder
        self.ended = recorder.clock()
        recorder._ranges.close(self._range)
        recorder._close_span(self)


class DeviceSpan(Span):
    """The span of a closure on a lane with a registered device. `DeviceTimes` stores its interval later, with the device's time."""

    __slots__ = ("_device",)

    def __init__(self, recorder: Recorder, name: str, lane: str, device: DeviceTimes) -> None:
        super().__init__(recorder, name, LANE_PREFIX + lane, None, lane, None)
        self._device = device

    def __enter__(self) -> Span:
        super().__enter__()
        self._device.begin(self._name, self.started)
        return self

    def __exit__(self, *exc: object) -> None:
        recorder = self._recorder
        is_timed = self._device.end()
        self.ended = recorder.clock()
        recorder._ranges.close(self._range)
        recorder._close_span(self, store=not is_timed)


@dataclass(slots=True, eq=False)
class WaitSpan:
    """Context manager of `Recorder.wait`."""

    _recorder: Recorder
    who: str
    what: str
    on: str
    cause: str
    since: float = 0.0

    def __enter__(self) -> Self:
        self.since = self._recorder.clock()
        with self._recorder._lock:
            self._recorder._waits[id(self)] = self
        return self

    def __exit__(self, *exc: object) -> None:
        self._recorder._close_wait(self)


class WatchSpan(WaitSpan):
    """Context manager of `Recorder.watch`. A `WatchSpan` is not in the trace and is not idle time, unlike a `WaitSpan`."""

    __slots__ = ("task",)

    def __init__(self, recorder: Recorder, who: str, what: str, on: str) -> None:
        super().__init__(recorder, who, what, on, "")
        self.task = asyncio.current_task()

    def __enter__(self) -> Self:
        self._recorder.change_actor("", self.on)
        return super().__enter__()

    def change_actor(self, on: str) -> None:
        """From now on, the block waits for the actor `on`."""
        self._recorder.change_actor(self.on, on)
        self.on, self.since = on, self._recorder.clock()

    def __exit__(self, *exc: object) -> None:
        self._recorder.change_actor(self.on, "")
        with self._recorder._lock:
            self._recorder._waits.pop(id(self), None)


class Recorder:
    """Records one run. `clock` returns seconds, and all times are on this clock. `max_events=0`: no trace."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, max_events: int = 500_000, nvtx: bool = True
    ) -> None:
        self.clock = clock
        self.started = clock()
        self.started_unix = time.time()
        self.max_events = max_events
        self.dropped_events = 0
        # Reentrant, because a destructor may call `count` while this thread holds the lock.
        self._lock = threading.RLock()
        # `TraceEvent`s as tuples of str, float and None. The garbage collector untracks such tuples, so a collection does
        # not visit all recorded events.
        self._events: list[tuple[Any, ...]] = []
        self._busy: list[Interval] = []
        self._idle: list[Interval] = []
        self._open_spans: dict[int, Span] = {}
        self._waits: dict[int, WaitSpan] = {}
        # How many activities wait for user code, how many for the engine, and the open wait with the cause `environment`, if any.
        self._waits_for_user = self._waits_for_engine = 0
        self._user_wait: WaitSpan | None = None
        # Lane -> the host's time at the end of its last closure. Before the first end: at its registration or first start.
        self._lane_end: dict[str, float] = {}
        self._outside_budget: set[str] = set()  # lanes
        self._devices: dict[str, DeviceTimes] = {}
        self._window_start = self.started
        self._reset_metrics()
        self._ranges = NvtxRanges(nvtx)

    # ---- spans and waits

    def span(self, name: str, *, track: str, **args: Any) -> Span:
        """An activity, recorded as an NVTX range and a trace event. With the track `lane:<name>` also as busy time of that lane."""
        lane = track[len(LANE_PREFIX) :] if track.startswith(LANE_PREFIX) else None
        return Span(self, name, track, args or None, lane, None)

    def lane_busy(self, lane: str, name: str, *, submitted: float | None = None) -> Span:
        """The block in which the lane's thread runs the closure `name`. `submitted`: the time of its submission, on `self.clock`.

        Idle time of the lane between submission and start is recorded with the cause `handoff`.
        """
        if submitted is not None:
            now = self.clock()
            idle_since = max(submitted, self._lane_end.get(lane, submitted))
            self.idle("handoff", idle_since, now, lane)
            self.observe("lane/handoff_ms", 1e3 * max(0.0, now - idle_since))
        if (device := self._devices.get(lane)) is not None:
            return DeviceSpan(self, name, lane, device)
        return Span(self, name, LANE_PREFIX + lane, None, lane, None)

    def lane_resumed(self, lane: str, ended: float) -> None:
        """Call this when a closure's caller resumes. The time since the closure `ended` is idle time with the cause `loop`."""
        now = self.clock()
        self.idle("loop", ended, now, lane)
        self.observe("lane/resume_ms", 1e3 * max(0.0, now - ended))

    def work(self, who: str, what: str, **args: Any) -> Span:
        """Python work on the event loop between two closures: a span on track `who`, and idle time with the cause `loop`.

        Do not await inside: the time of other tasks would count as time of this work.
        """
        return Span(self, what, who, args or None, None, "loop")

    def wait(self, who: str, what: str, *, on: str, cause: Cause | None) -> WaitSpan:
        """In the block, `who` ("train pump") waits for `what` ("a group") from `on` ("score pump"). `cause` None: not idle time."""
        return WaitSpan(self, who, what, on, cause or "")

    def watch(self, who: str, what: str, *, on: str) -> WatchSpan:
        """In the block, the calling task waits for work of `on` that may hang, such as user code. For the watchdog, `active_waits`
        lists this wait. Begin and end of the block call `change_actor`."""
        return WatchSpan(self, who, what, on)

    def change_actor(self, old: str, new: str) -> None:
        """An activity (an episode, a call of a hook, the run) waited for the actor `old` and now waits for `new`. "": for nobody.

        While at least one activity waits for user code and none waits for the engine, there is a wait with the cause `environment`.
        """
        with self._lock:
            for actor, change in ((old, -1), (new, 1)):
                self._waits_for_engine += change * (actor == "the engine")
                self._waits_for_user += change * actor.startswith(_USER_CODE)
            if self._waits_for_user and not self._waits_for_engine:
                if self._user_wait is None:
                    self._user_wait = WaitSpan(self, "environment", "the next move", "your code", "environment")
                    self._user_wait.since = self.clock()
            elif self._user_wait is not None:
                self._close_wait(self._user_wait)
                self._user_wait = None

    def idle(self, cause: str, start: float, end: float, lane: str | None = None) -> None:
        """Record an interval of idle time that has ended. `lane` None: of all lanes."""
        if end > start:
            with self._lock:
                self._store(self._idle, Interval(cause, lane, start, end))

    def active_waits(self) -> list[Wait]:
        """The open waits of `wait` and `watch`, the longest first."""
        with self._lock:
            spans = list(self._waits.values())
        waits = (Wait(w.who, w.what, w.on, w.cause, w.since, getattr(w, "task", None)) for w in spans)
        return sorted(waits, key=lambda wait: wait.since)

    # ---- trace only

    def instant(self, name: str, *, track: str, **args: Any) -> None:
        """Add a trace event without duration. `args`: plain values."""
        self._add_event("i", name, track, self.clock(), 0.0, _items(args))

    def events(self) -> list[TraceEvent]:
        """The trace events, in the order of recording. An event of a device or a worker is recorded later than its end."""
        with self._lock:
            events = list(self._events)
        return [TraceEvent._make((*event[:5], dict(event[5]) if event[5] else None)) for event in events]

    # ---- metrics of the step

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter, which `drain` reads and sets to 0."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + by

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge. `drain` returns the last value."""
        with self._lock:
            self._gauges[name] = float(value)

    def observe(self, name: str, value: float, *, reduce: Reduce = "mean") -> None:
        """Add a sample. `drain` reduces all samples of a name to one number, as the `reduce` of the name's first sample says."""
        with self._lock:
            entry = self._samples.get(name)
            if entry is None:
                entry = self._samples[name] = Samples(reduce)
            entry.add(float(value))

    def log(self, name: str, value: float) -> None:
        """Add a value of the user's own metric. The counter `name` gets the sum of the values, the counter `name#` their number."""
        with self._lock:
            self.count(name, value)
            self.count(f"{name}#")

    @contextmanager
    def timed(self, metric: str) -> Iterator[None]:
        """A context manager that adds the seconds of its block to the counter `metric`, whose name begins with `time/`."""
        started = self.clock()
        try:
            yield
        finally:
            self.count(metric, self.clock() - started)

    def drain(self, kept: tuple[str, ...] = ()) -> dict[str, float]:
        """Take the metrics since the last drain, by name: reduced samples, counts, and gauges. Counts whose names begin with one of
        `kept` stay for a later drain."""
        with self._lock:
            stay = self.take_counts(kept)
            counts, gauges, samples = self.take_metrics()
            self._counts.update(stay)
        return {**{name: entry.value() for name, entry in samples.items()}, **counts, **gauges}

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float], dict[str, Samples]]:
        """Like `drain`, but does not reduce the samples. Returns (counts, gauges, samples)."""
        with self._lock:
            metrics = self._counts, self._gauges, self._samples
            self._reset_metrics()
        return metrics

    def merge(self, name: str, samples: Samples) -> None:
        """Add the samples of another recorder for the metric `name`."""
        with self._lock:
            if name in self._samples:
                self._samples[name].merge(samples)
            else:
                self._samples[name] = samples

    def take_counts(self, prefixes: tuple[str, ...]) -> dict[str, float]:
        """Take the counts since the last drain whose names begin with one of `prefixes`. `drain` will not return them."""
        with self._lock:
            counts = {name: value for name, value in self._counts.items() if name.startswith(prefixes)}
            for name in counts:
                del self._counts[name]
        return counts

    # ---- intervals of the step

    def register_lane(self, lane: str, *, in_budget: bool = True) -> None:
        """Count the idle time of this lane from now on, although it has not run a closure yet. `in_budget`: False leaves the lane
        out of every window."""
        with self._lock:
            self._lane_end.setdefault(lane, self.clock())
            if not in_budget:
                self._outside_budget.add(lane)

    def register_device(self, lane: str, new_event: Callable[[], DeviceEvent]) -> None:
        """From now on measure the closures of this lane with the device's time (`device_time.py`). Call this on the lane's thread,
        after the thread has chosen its device."""

        def store(name: str, start: float, end: float, host_start: float, host_end: float) -> None:
            with self._lock:
                self._store(self._busy, Interval(name, lane, start, end))
            host_ms = round(1e3 * (host_end - host_start), 3)
            self._add_event("X", name, LANE_PREFIX + lane, start, end - start, (("host_ms", host_ms),))

        def observe(seconds: float) -> None:
            self.observe("lane/device_clock_ms", 1e3 * seconds, reduce="max")

        self._devices[lane] = DeviceTimes(self.clock, new_event, store, observe)

    def finish_devices(self) -> None:
        """Wait until the devices have ended all closures, for the trace. Call it outside the event loop."""
        for device in self._devices.values():
            device.finish()

    def take_window(self) -> Window:
        """Take the intervals since the last call. An activity that has not ended is in this window up to `end`,
        and in the next window again from its start."""
        computing = {lane: found for lane, device in self._devices.items() if (found := device.poll())}
        with self._lock:
            start, end = self._window_start, self.clock()
            busy, idle = self._busy, self._idle
            # Intervals of other processes are shifted by `REMOTE_DELAY_S`, so some of them end in the next window.
            self._busy = [interval for interval in busy if interval.end > end]
            self._idle = [interval for interval in idle if interval.end > end]
            self._window_start = end
            lanes = tuple(lane for lane in self._lane_end if lane not in self._outside_budget)
            open_spans = list(self._open_spans.values())
            waits = [wait for wait in (*self._waits.values(), self._user_wait) if wait and wait.cause]
        for span in open_spans:
            if span._lane in computing:
                continue  # added below, with the device's time
            if span._lane is not None:
                busy.append(Interval(span._name, span._lane, span.started, end))
            elif span._cause is not None:
                idle.append(Interval(span._cause, None, span.started, end))
        busy.extend(Interval(name, lane, since, end) for lane, (name, since) in computing.items())
        idle.extend(Interval(wait.cause, None, wait.since, end) for wait in waits)
        return Window(start, end, lanes, busy, idle)

    # ---- records of other processes

    def take_parcel(self) -> dict[str, Any]:
        """In a worker process, take the records since the last call, as JSON values. The run's recorder adds them (`add_parcel`).
        The worker's recorder must have one lane and no trace. Both recorders use the monotonic clock of the machine.

        Spans and waits that are still open are in a later parcel. Gauges are left out, because the values of several workers would
        overwrite each other.
        """
        window = self.take_window()
        counts, _, samples = self.take_metrics()
        # Intervals that end with the window are still open.
        return {
            "busy": [[name, start, end] for name, _, start, end in window.busy if end < window.end],
            "idle": [[cause, start, end] for cause, _, start, end in window.idle if end < window.end],
            "counts": counts,
            "samples": {name: entry.to_json() for name, entry in samples.items()},
        }

    def add_parcel(self, parcel: Mapping[str, Any], lane: str) -> None:
        """Add a worker's records, as busy and idle time of `lane`. The intervals are shifted by `REMOTE_DELAY_S`, because they come
        late. Trace events are not shifted."""
        for name, start, end in parcel["busy"]:
            with self._lock:
                self._lane_end[lane] = end
                self._store(self._busy, Interval(name, lane, start + REMOTE_DELAY_S, end + REMOTE_DELAY_S))
            self._add_event("X", name, LANE_PREFIX + lane, start, end - start, None)
        for cause, start, end in parcel["idle"]:
            self.idle(cause, start + REMOTE_DELAY_S, end + REMOTE_DELAY_S, lane)
        for name, value in parcel["counts"].items():
            self.count(name, value)
        for name, state in parcel["samples"].items():
            self.merge(name, Samples.from_json(state))

    # ---- private

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

    def _store(self, intervals: list[Interval], interval: Interval) -> None:
        # Bounds the memory of a run that never takes its windows.
        if len(intervals) < max(self.max_events, 100_000):
            intervals.append(interval)

    def _open_interval(self, span: Span) -> None:
        with self._lock:
            self._open_spans[id(span)] = span
            if span._lane is not None:
                self._lane_end.setdefault(span._lane, span.started)

    def _close_span(self, span: Span, store: bool = True) -> None:
        """`store`: False if `DeviceTimes` will store the interval of this span."""
        with self._lock:
            self._open_spans.pop(id(span), None)
            if span._lane is not None:
                self._lane_end[span._lane] = span.ended
                if not store:
                    return
                self._store(self._busy, Interval(span._name, span._lane, span.started, span.ended))
            elif span._cause is not None:
                self._store(self._idle, Interval(span._cause, None, span.started, span.ended))
            duration = span.ended - span.started
            self._add_event("X", span._name, span._track, span.started, duration, _items(span._args))

    def _close_wait(self, wait: WaitSpan) -> None:
        with self._lock:
            end = self.clock()
            self._waits.pop(id(wait), None)
            if wait.cause:
                self._store(self._idle, Interval(wait.cause, None, wait.since, end))
            args = {"what": wait.what, "on": wait.on, "cause": wait.cause}
            track = _GROUP_NAME.sub("groups", wait.who)
            if track != wait.who:
                args["who"] = wait.who
            self._add_event("X", f"wait: {wait.what}", track, wait.since, end - wait.since, _items(args))


def _items(args: dict[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    return tuple(args.items()) if args else None
