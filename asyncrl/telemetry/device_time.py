"""Measures when a device computed the closures of a lane, with a pair of CUDA events for each closure. A lane is the thread that
owns a device; a closure returns when its kernels are launched, not when the device has executed them.

    lane's thread    begin.record(), closure, end.record()      on the thread's current stream
    later            query(), and if it is True elapsed_time()  at the begin of the next closure and at `Recorder.take_window`

* Only `finish` waits for the device. A pair is resolved when `elapsed_time` has given its times. Pairs are resolved in the order of
  their closures, and their events are reused. After an error of the device, unresolved and later closures get the host's times.
* A closure counts as busy from the later of two times, its start on the host and the end of the stream's earlier work, to the end
  of its last kernel. Gaps between kernels count as busy. Work on another stream counts if the lane's stream waits for it.
* Only the lane's thread calls `record`. While a closure runs, no other thread calls `query`, which can break a CUDA graph capture.

A reference relates the device's clock to the host's clock: an event, and the host's time right before the event's `record`. If all
pairs are resolved at the begin of a closure, the stream is empty, and the device reaches the closure's first event at once. So
this event is the reference for all pairs up to the next such closure. Two inaccuracies remain: the device reaches the event some
microseconds after `record`, and the clocks drift apart until the next reference. At each new reference, `lane/device_clock_ms` gets
the sum of the two. An event's time is clamped to the span from the host's time in its `EventPair` to the query that resolved it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# Seconds that `finish` waits for a device, which may hang.
FINISH_S = 5.0


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event(enable_timing=True)` that is used. Errors of the device are RuntimeErrors."""

    def record(self) -> object:
        """Record on the current stream of the calling thread."""

    def query(self) -> bool:
        """Whether the device has reached the event."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds on the device from this event to `end`. Both must be completed."""


@dataclass(slots=True)
class EventPair:
    """The events of one closure, and the host's times of its start and its end. Each time is taken before its event's `record`."""

    name: str
    begin: DeviceEvent
    end: DeviceEvent
    started: float
    ended: float


class DeviceTimes:
    """Measures the closures of one lane. All times are seconds on `clock`. `store` gets a closure's name, its begin and end on the
    device, and its begin and end on the host. `observe` gets the clocks' difference. Both functions are called with a lock held."""

    def __init__(
        self,
        clock: Callable[[], float],
        new_event: Callable[[], DeviceEvent],
        store: Callable[[str, float, float, float, float], None],
        observe: Callable[[float], None],
    ) -> None:
        self._clock, self._new_event, self._store, self._observe = clock, new_event, store, observe
        # Guards the fields below. `record` is called without the lock: a full launch queue may block that call.
        self._lock = threading.Lock()
        self._pending: deque[EventPair] = deque()
        self._running: EventPair | None = None
        self._in_closure = False
        self._free: list[DeviceEvent] = []  # resolved events, for reuse
        self._reference: tuple[DeviceEvent, float] | None = None  # (event, host's time right before it)
        self._former: tuple[DeviceEvent, float] | None = None  # former reference, until compared with `_reference`
        self._last_end = float("-inf")
        self._failed = False

    def begin(self, name: str, started: float) -> None:
        """Call this on the lane's thread, right before a closure. `started`: the host's time."""
        with self._lock:
            self._resolve()
            self._in_closure = True
            if self._failed:
                return
            stream_is_empty = not self._pending
            begin, end = (self._free.pop() if self._free else self._new_event() for _ in range(2))
        at = self._clock()
        try:
            begin.record()
        except RuntimeError:
            self._fail()
            return
        with self._lock:
            if stream_is_empty:
                self._former, self._reference = self._reference, (begin, at)
            self._running = EventPair(name, begin, end, started, started)
            self._pending.append(self._running)

    def end(self) -> bool:
        """Call this on the lane's thread, right after a closure. False: the caller must store the closure with the host's times."""
        pair = self._running
        if pair is not None:
            pair.ended = self._clock()
            try:
                pair.end.record()
            except RuntimeError:
                self._fail()
        with self._lock:
            is_timed, self._running, self._in_closure = self._running is not None, None, False
        return is_timed

    def poll(self) -> tuple[str, float] | None:
        """If no closure runs on the host, resolve the pairs that have ended. Returns the name of the closure that the device
        computes now, and the time of its begin; None: the device is idle or had an error. Any thread may call this."""
        with self._lock:
            if not self._in_closure:
                self._resolve()
            return (self._pending[0].name, max(self._pending[0].started, self._last_end)) if self._pending else None

    def finish(self) -> None:
        """Block until the device is idle, at most `FINISH_S`. After this time unresolved and later closures get the host's times.
        Do not call this on the event loop."""
        for _ in range(round(FINISH_S / 1e-3)):
            if self.poll() is None:
                return
            time.sleep(1e-3)
        self._fail()

    def _resolve(self) -> None:
        try:
            while self._pending and self._pending[0].end.query():
                self._place(self._pending[0], self._clock())
                self._pending.popleft()
        except RuntimeError:
            # The error is not lost: the closure's calls of the device raise it, too.
            self._use_host_times()

    def _place(self, pair: EventPair, now: float) -> None:
        assert self._reference is not None
        reference, at = self._reference
        if self._former is not None:
            former, since = self._former
            self._observe(abs(since + 1e-3 * former.elapsed_time(reference) - at))
            self._free.append(former)
            self._former = None
        begin = pair.started if pair.begin is reference else at + 1e-3 * reference.elapsed_time(pair.begin)
        begin = min(max(begin, pair.started, self._last_end), now)
        end = min(max(at + 1e-3 * reference.elapsed_time(pair.end), pair.ended, begin), now)
        self._last_end = end
        self._free.append(pair.end)
        if pair.begin is not reference:
            self._free.append(pair.begin)
        self._store(pair.name, begin, end, pair.started, pair.ended)

    def _fail(self) -> None:
        with self._lock:
            self._use_host_times()

    def _use_host_times(self) -> None:
        """Use the host's times from now on."""
        for pair in self._pending:
            if pair is not self._running:
                self._store(pair.name, pair.started, pair.ended, pair.started, pair.ended)
        self._failed, self._running = True, None
        self._pending.clear()
        self._free.clear()
