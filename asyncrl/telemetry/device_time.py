"""When a device computed the closures of a lane. A closure returns when its kernels are launched, not when they have ended.

    lane's thread    begin.record(), closure, end.record()      on the thread's current stream
    later            query(), and if it is True elapsed_time()  at the begin of the next closure and at `Recorder.take_window`

* Only `finish` waits for the end of work. Pairs of events are resolved in the order of their closures. Their events are reused.
  After an error of the device, further closures count with the host's time.
* A closure counts as busy from the end of all earlier work to the end of its last kernel, but never before the host starts it. Gaps
  between its kernels count as busy. Work on a stream that the lane's stream does not wait for is not seen.
* Only the lane's thread records. While a closure runs no other thread queries, because a query may break a capture of a CUDA graph.

The clock. If all pairs are resolved at the begin of a closure, the stream is empty, and the device reaches the closure's first
event at once. This event and the host's time right before its `record` are the reference for the pairs up to the next such
closure. Two inaccuracies remain: an idle device reaches the event some microseconds after `record`, and the two clocks drift apart
after the reference. `lane/device_clock_ms` has the sum of both at each new reference, which ends the drift. No event is placed
before the host's time at the start of its span, or after the query that found the event completed.
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
    """The events of one closure, and the host's times of its start and its end, each before the event's `record`."""

    name: str
    begin: DeviceEvent
    end: DeviceEvent
    started: float
    ended: float


class DeviceTimes:
    """The closures of one lane. `store` gets name, begin and end on the device, and begin and end on the host. `observe` gets how
    far the two clocks drifted apart, in seconds. Both are called with a lock held."""

    def __init__(
        self,
        clock: Callable[[], float],
        new_event: Callable[[], DeviceEvent],
        store: Callable[[str, float, float, float, float], None],
        observe: Callable[[float], None],
    ) -> None:
        self._clock, self._new_event, self._store, self._observe = clock, new_event, store, observe
        # Guards all below. `record` is called without the lock: a full launch queue may block that call.
        self._lock = threading.Lock()
        self._pending: deque[EventPair] = deque()
        self._running: EventPair | None = None
        self._in_closure = False
        self._free: list[DeviceEvent] = []
        self._reference: tuple[DeviceEvent, float] | None = None  # (event, host's time right before it)
        self._former: tuple[DeviceEvent, float] | None = None  # until it is compared with `_reference`
        self._last_end = float("-inf")
        self._failed = False

    def begin(self, name: str, started: float) -> None:
        """On the lane's thread, right before a closure."""
        with self._lock:
            self._resolve()
            self._in_closure = True
            if self._failed:
                return
            is_empty = not self._pending
            begin, end = (self._free.pop() if self._free else self._new_event() for _ in range(2))
        at = self._clock()
        try:
            begin.record()
        except RuntimeError:
            self._fail()
            return
        with self._lock:
            if is_empty:
                self._former, self._reference = self._reference, (begin, at)
            self._running = EventPair(name, begin, end, started, started)
            self._pending.append(self._running)

    def end(self) -> bool:
        """On the lane's thread, right after a closure. False: the caller stores the closure with the host's times."""
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
        """Resolve the pairs that have ended, on any thread. Returns the closure that the device computes now, and since when."""
        with self._lock:
            if not self._in_closure:
                self._resolve()
            return (self._pending[0].name, max(self._pending[0].started, self._last_end)) if self._pending else None

    def finish(self) -> None:
        """Wait for the device, on any thread but the event loop's. A pair that is unresolved after `FINISH_S` gets the host's
        times, as does every later closure."""
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
            # The closure's own call raises the error of the device, too.
            self._give_up()

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
            self._give_up()

    def _give_up(self) -> None:
        """Use the host's times from now on."""
        for pair in self._pending:
            if pair is not self._running:
                self._store(pair.name, pair.started, pair.ended, pair.started, pair.ended)
        self._failed, self._running = True, None
        self._pending.clear()
        self._free.clear()
