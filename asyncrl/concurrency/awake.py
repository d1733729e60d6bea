"""Time in which this process ran: what every deadline of a run is measured in.

A whole job may be suspended (Ctrl-Z, a paused container), and no clock of the kernel knows of it: on waking every deadline would
have passed, with the answers unread. A gap between two readings of this clock that is longer than `GAP_S`, and in which this
process used no processor, is time in which nobody ran. The clock leaves it out, and so does the event loop of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

# Of a gap counts: a thread that gets no processor for a moment is no suspension.
GAP_S = 1.0

_lock = threading.Lock()
_loops: Counter[asyncio.AbstractEventLoop] = Counter()  # that are on it, and how often
_lost, _read = 0.0, 0.0  # seconds; the monotonic clock at the last reading
# The same at a reading of the last quarter of a second, and the processor time of the process then, which is slow to read.
_used = (0.0, 0.0)


def lost() -> float:
    """Seconds in which this process did not run, as far as they were noticed. From any thread."""
    global _read, _used, _lost
    with _lock:
        before, _read = _read, time.monotonic()
        if _read - _used[0] > 0.25:
            used, _used = _used, (_read, time.process_time())
            if _loops and _read - before > GAP_S:
                _lost += max(0.0, _read - before - GAP_S - (_used[1] - used[1]))
        return _lost


def now() -> float:
    """As `time.monotonic`, in seconds in which this process ran."""
    away = lost()  # first: it may be the one that notices
    return time.monotonic() - away


@contextlib.contextmanager
def on_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside, `loop.time` is on this clock, which somebody reads several times a second. Twice is as once. uvloop fires its timers
    by a clock of its own, but anyio's deadlines look at the time again before they cancel anything."""
    before = lost()
    with _lock:
        _loops[loop] += 1
    if _loops[loop] == 1:
        time_of = loop.time
        loop.time = lambda: time_of() - (lost() - before)  # type: ignore[method-assign]  # of this loop alone
    try:
        yield
    finally:
        with _lock:
            _loops[loop] -= 1
            if not _loops[loop]:
                del _loops[loop], loop.time


def call_later(loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], object]) -> Callable[[], None]:
    """As `loop.call_later`, in seconds of `loop.time`: uvloop fires its timers by a clock that no suspension stops. Returns what
    cancels it."""
    end = loop.time() + seconds
    timer: asyncio.TimerHandle

    def fire() -> None:
        nonlocal timer
        left = end - loop.time()
        if left > 0.0:
            timer = loop.call_later(left, fire)
        else:
            act()

    timer = loop.call_later(seconds, fire)
    return lambda: timer.cancel()
