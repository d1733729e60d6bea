"""Measures how late the event loop is, and finds the code that blocked the loop.

`monitor` sleeps for `interval` seconds again and again, and measures how late it wakes. `loop/lag_ms_p99` is the 99th
percentile of the lateness in a step (with fewer than 100 samples, the largest sample).

While `monitor` does not wake, a thread samples the stack of the event loop's thread. So a warning can say "event loop blocked
5.01 s in rewards.py:12 my_reward". A blockage is reported only if the blocking code used the processor or slept in a call. If the
loop's thread waited for a processor or for the GIL, nothing is reported: on a busy machine that can happen in any code.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import anyio

from .recorder import Recorder

# A lateness below this is not recorded as idle time, because the timer is not more exact.
_TIMER_RESOLUTION_S = 0.001
_SAMPLE_EVERY_S = 0.05
# A blockage longer than this is reported once while it lasts. It may last forever, if the code waits for work of the loop.
_STILL_BLOCKED_S = 5.0
# A blockage in the same place is reported again only after this time.
_REPORT_AGAIN_S = 60.0

_PACKAGE = f"{Path(__file__).resolve().parent.parent}/"  # the slash excludes a folder asyncrl_tasks
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")})
_LOOP_FILES = (
    "asyncio/base_events.py",
    "asyncio/events.py",
    "asyncio/runners.py",
    "/selectors.py",
    "uvloop/__init__.py",
)


def top_user_frame(thread_id: int) -> str | None:
    """`file.py:line function` of the innermost frame of user code on the stack of a thread.
    If the stack has no user code: the innermost frame of this package, or of a library if the stack has no frame of this package.
    Frames of the event loop and their callers are ignored. None: there is no such thread, or it executes only the event loop.
    """
    return user_frame(_outwards(sys._current_frames().get(thread_id)))


def user_frame(frames: Iterable[FrameType]) -> str | None:
    """`top_user_frame` of the given stack, whose first frame is the innermost."""
    of_package: FrameType | None = None
    library: FrameType | None = None
    for frame in frames:
        path = frame.f_code.co_filename
        if path.endswith(_LOOP_FILES):
            break
        if path.startswith(_PACKAGE):
            of_package = of_package or frame
        elif path.startswith("<frozen") or path.startswith(_LIBRARIES):
            library = library or frame
        else:
            return _describe(frame)
    innermost = of_package or library
    return None if innermost is None else _describe(innermost)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


class BlockSampler:
    """Runs a sampling thread, which watches the thread that constructs this object. While the watched thread has not called `tick`
    for `allowed_s` seconds, the sampling thread samples the stack of the watched thread."""

    def __init__(self, clock: Callable[[], float], allowed_s: float, report: Callable[[str], None]) -> None:
        """`clock`: real time, even if the recorder has a simulated clock. `report` is called on the sampling thread, at most once
        for each blockage of more than `_STILL_BLOCKED_S`."""
        self._clock, self._report = clock, report
        self._allowed_s = allowed_s
        self._watched = threading.get_ident()
        self._lock = threading.Lock()
        self._last_tick = clock()
        self._frames: Counter[str] = Counter()
        # For each sample: its time, and the total time that the watched thread had waited for a processor. In seconds.
        self._delays: list[tuple[float, float]] = []
        self._delay_file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncrl-lag", daemon=True)

    def __enter__(self) -> BlockSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def tick(self) -> tuple[str | None, bool]:
        """Call this whenever the event loop runs. Returns the most frequent frame since the last call (None without a sample), and
        whether the watched thread hardly waited for a processor or for the GIL since then (False also if that is unknown)."""
        with self._lock:
            self._last_tick = self._clock()
            frames, self._frames = self._frames, Counter()
            delays, self._delays = self._delays, []
        return frames.most_common(1)[0][0] if frames else None, _did_not_wait(delays)

    def _processor_wait_s(self) -> float:
        try:
            with open(self._delay_file, encoding="ascii") as file:
                return 1e-9 * float(file.read().split()[1])
        except (OSError, IndexError):  # not Linux: inf - inf is NaN, so `_did_not_wait` is False
            return math.inf

    def _run(self) -> None:
        pause, reported = self._allowed_s, -math.inf
        while not self._stop.wait(pause):
            with self._lock:
                tick = self._last_tick
            remaining_s = tick + self._allowed_s - self._clock()
            if remaining_s > 0:
                pause = remaining_s
                continue
            frame, sample = top_user_frame(self._watched), (self._clock(), self._processor_wait_s())
            with self._lock:
                # If the loop called `tick` after the sample, the frame blocked nothing.
                if frame is not None and self._last_tick == tick:
                    self._frames[frame] += 1
                    self._delays.append(sample)
                place, delays = self._frames.most_common(1), list(self._delays)
            if place and tick != reported and delays[-1][0] - delays[0][0] > _STILL_BLOCKED_S and _did_not_wait(delays):
                reported = tick
                self._report(
                    f"event loop still blocked after {self._clock() - tick:.0f} s in {place[0][0]}, which stops the whole "
                    "run; in a coroutine use an asynchronous client, or `await asyncio.to_thread(...)`"
                )
            pause = _SAMPLE_EVERY_S


def _did_not_wait(delays: list[tuple[float, float]]) -> bool:
    """Whether the watched thread hardly waited for a processor or for the GIL. `delays`: as in `BlockSampler`."""
    sampled_s = delays[-1][0] - delays[0][0] if delays else 0.0
    # The sampling thread needs the GIL, too. If it took more than a quarter of the samples that were due, the GIL was free.
    gil_was_free = len(delays) > sampled_s / _SAMPLE_EVERY_S / 4
    return sampled_s > 0 and gil_was_free and delays[-1][1] - delays[0][1] < sampled_s / 4


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def monitor(
    recorder: Recorder,
    interval: float = 0.02,
    blocked_s: float = 0.1,
    report: Callable[[str], None] = _to_stderr,
) -> None:
    """Measure the lateness of the event loop until cancelled. After a blockage of more than `blocked_s` s, `report` gets a text, at
    most once a minute for each place in the code. `BlockSampler` calls `report`, too: on its own thread, during a long blockage.

    Records `loop/lag_ms_p99`, `loop/blocked`, and late intervals as idle time with the cause `loop`."""
    clock = recorder.clock
    reported: dict[str, float] = {}  # place in the code -> time of the last report
    with BlockSampler(time.perf_counter, interval + blocked_s, report) as sampler:
        while True:
            expected, processor_start = clock() + interval, time.thread_time()
            await anyio.sleep(interval)
            now, processor_s = clock(), time.thread_time() - processor_start
            late = now - expected
            frame, did_not_wait = sampler.tick()
            recorder.observe("loop/lag_ms_p99", 1e3 * max(0.0, late), reduce="p99")
            if late > _TIMER_RESOLUTION_S:
                recorder.idle("loop", expected, now)
            if late > blocked_s:
                recorder.count("loop/blocked")
                if did_not_wait or processor_s > late / 2:
                    place = frame or "native code on the thread of the event loop (no Python frame was seen)"
                    text = f"event loop blocked {late:.2f} s in {place}"
                    recorder.instant(text, track="event loop")
                    reported = {name: at for name, at in reported.items() if now - at < _REPORT_AGAIN_S}
                    if place not in reported:
                        reported[place] = now
                        report(text)
