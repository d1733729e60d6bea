"""A monotonic clock that leaves out suspensions of this process. Deadlines on the event loop of a run use this clock.

A job can be suspended by Ctrl-Z or by a paused container. The kernel's clocks go on meanwhile, so on waking every deadline would
have passed. If two readings of this clock are more than `GAP_S` apart, the process counts as suspended between the readings. The
length of the suspension is the time between the readings, minus `GAP_S`, minus the processor time that the process used meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

# Seconds. A shorter gap between two readings is no suspension: on a busy machine a thread may wait that long for a processor.
GAP_S = 1.0

_lock = threading.Lock()
_loops: Counter[asyncio.AbstractEventLoop] = Counter()  # open `on_loop` contexts of each loop
_suspended_s, _last_reading = 0.0, 0.0
# (time.monotonic(), time.process_time()), renewed after 0.25 s because process_time is slow to read.
_cpu_reading = (0.0, 0.0)


def suspended_s() -> float:
    """Read the clock. Returns the seconds of all suspensions noticed while an `on_loop` was open. Callable from any thread."""
    global _last_reading, _cpu_reading, _suspended_s
    with _lock:
        previous, _last_reading = _last_reading, time.monotonic()
        if _last_reading - _cpu_reading[0] > 0.25:
            cpu_before, _cpu_reading = _cpu_reading, (_last_reading, time.process_time())
            if _loops and _last_reading - previous > GAP_S:
                _suspended_s += max(0.0, _last_reading - previous - GAP_S - (_cpu_reading[1] - cpu_before[1]))
        return _suspended_s


def now() -> float:
    """`time.monotonic()` minus the seconds of suspension."""
    # `time.monotonic()` is called last. If it were called first, a suspension between the two calls would make `now` go back.
    suspended = suspended_s()
    return time.monotonic() - suspended


@contextlib.contextmanager
def on_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside the context `loop.time` leaves out suspensions. `loop.time` or `suspended_s` must be called several times a second,
    because a long gap between two calls counts as a suspension. Contexts of one loop may be nested. uvloop's timers ignore
    `loop.time`, but anyio reads `loop.time` again when a timer fires, before it cancels anything."""
    suspended_before = suspended_s()
    with _lock:
        _loops[loop] += 1
    if _loops[loop] == 1:
        loop_time = loop.time
        # The instance attribute shadows the method, for this loop only.
        loop.time = lambda: loop_time() - (suspended_s() - suspended_before)  # type: ignore[method-assign]  # see above
    try:
        yield
    finally:
        with _lock:
            _loops[loop] -= 1
            if not _loops[loop]:
                del _loops[loop], loop.time


def call_later(loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> Callable[[], None]:
    """`loop.call_later` with `seconds` of `loop.time`, also on uvloop, whose timers count suspensions. Returns a function that
    cancels the call."""
    end = loop.time() + seconds
    timer: asyncio.TimerHandle

    def fire() -> None:
        nonlocal timer
        remaining_s = end - loop.time()
        if remaining_s > 0.0:
            timer = loop.call_later(remaining_s, fire)
        else:
            callback()

    timer = loop.call_later(seconds, fire)
    return lambda: timer.cancel()
