"""The event loop's lateness, and the name of the callback that blocked it.

`monitor` asks to be woken every `interval` seconds and measures how late it is: `loop/lag_ms_p99` of a step, which for steps
below two seconds is its largest, and `loop/lag_ms_p99_run` of all looks since the run began. While it does not come back,
an OS thread samples the stack of the loop's thread, so that the report can say
"event loop blocked 5.01 s in rewards.py:12 my_reward". It is said of code that used the processor, or slept in a call; not where
the thread waited for a processor or for the GIL, as a busy machine lets it do anywhere. `top_user_frame` serves the watchdog, too.
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

# A late wake-up shorter than this is the timer's own grain, not work of somebody else on the loop.
_GRAIN_S = 0.001
_SAMPLE_EVERY_S = 0.05
_AGAIN_S = 60.0
_FINEST_MS, _BIN = 0.1, 1.05  # `Lateness`: bins of 5 %, the last from 80 s on
_BINS = 275

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LOOP_FILES = (
    "asyncio/base_events.py",
    "asyncio/events.py",
    "asyncio/runners.py",
    "/selectors.py",
    "uvloop/__init__.py",
)


def top_user_frame(thread_id: int) -> str | None:
    """`file.py:line function` of what a thread executes now: the innermost frame of user code.

    Where there is none, the innermost frame of this package, else of any library. The frames that run the event loop
    and those outside of it (the user's own `asyncio.run(...)`) do not count. None: no such thread, or only the loop.
    """
    return user_frame(_outwards(sys._current_frames().get(thread_id)))


def user_frame(frames: Iterable[FrameType]) -> str | None:
    """As `top_user_frame`, of frames from the innermost one outwards."""
    own: FrameType | None = None
    library: FrameType | None = None
    for frame in frames:
        path = frame.f_code.co_filename
        if path.endswith(_LOOP_FILES):
            break
        if path.startswith(_PACKAGE):
            own = own or frame
        elif path.startswith("<frozen") or path.startswith(_LIBRARIES):
            library = library or frame
        else:
            return _describe(frame)
    found = own or library
    return None if found is None else _describe(found)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


class BlockSampler:
    """An OS thread that samples the stack of the thread which made it, once that has not called `tick` for too long.

    Real time on purpose, whatever clock the recorder has: it watches a real thread.
    """

    def __init__(self, clock: Callable[[], float], allowed_s: float) -> None:
        self._clock = clock
        self._allowed_s = allowed_s
        self._watched = threading.get_ident()
        self._lock = threading.Lock()
        self._last_tick = clock()
        self._seen: Counter[str] = Counter()
        self._delays: list[
            tuple[float, float]
            # With each sample: when, and how long it had waited for a processor by then.
        ] = []
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
        """The loop is alive. The frame seen most often since it was last known to be, if it was sampled at all, and whether the
        thread slept: it waited for no processor, nor for the GIL, as the sampler had that for a quarter of its samples."""
        with self._lock:
            self._last_tick = self._clock()
            seen, self._seen = self._seen, Counter()
            delays, self._delays = self._delays, []
        spent = delays[-1][0] - delays[0][0] if delays else 0.0
        asleep = spent > 0 and len(delays) > spent / _SAMPLE_EVERY_S / 4 and delays[-1][1] - delays[0][1] < spent / 4
        return seen.most_common(1)[0][0] if seen else None, asleep

    def _delay(self) -> float:
        try:
            with open(self._delay_file, encoding="ascii") as file:
                return 1e-9 * float(file.read().split()[1])
        except (OSError, IndexError):  # no Linux: then nobody is said to sleep
            return math.inf

    def _run(self) -> None:
        pause = self._allowed_s
        while not self._stop.wait(pause):
            with self._lock:
                tick = self._last_tick
            due = tick + self._allowed_s - self._clock()
            if due > 0:
                pause = due
                continue
            frame, delay = top_user_frame(self._watched), (self._clock(), self._delay())
            with self._lock:
                # Not if the loop ticked meanwhile: the frame would be blamed for somebody else's block.
                if frame is not None and self._last_tick == tick:
                    self._seen[frame] += 1
                    self._delays.append(delay)
            pause = _SAMPLE_EVERY_S


class Lateness:
    """The p99 of very many looks in constant memory, at most 5 % too large."""

    def __init__(self) -> None:
        self._looks = 0
        self._bins = [0] * _BINS

    def add(self, late_ms: float) -> None:
        """One look; below 0.1 ms (the timer's grain may make it negative) counts as 0.1."""
        place = math.ceil(math.log(max(late_ms, _FINEST_MS) / _FINEST_MS, _BIN))
        self._looks += 1
        self._bins[min(place, _BINS - 1)] += 1

    @property
    def p99(self) -> float:
        """Milliseconds that at most one look in a hundred is above; 0.0 before the first look."""
        above = 0
        for place in range(_BINS - 1, -1, -1):
            above += self._bins[place]
            if 100 * above > self._looks:
                return _FINEST_MS * _BIN**place
        return 0.0


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def monitor(
    recorder: Recorder,
    interval: float = 0.02,
    blocked_s: float = 0.1,
    report: Callable[[str], None] = _to_stderr,
) -> None:
    """Measure the loop's lateness until cancelled. A block of more than `blocked_s` seconds is named, and reported at most once a
    minute for each place.

    Writes `loop/lag_ms_p99` and `loop/lag_ms_p99_run`, counts `loop/blocked`, and records the late stretches as cause `loop`, so
    that a lane that starves behind a busy loop is accounted for.
    """
    clock, lateness = recorder.clock, Lateness()
    reported: dict[str, float] = {}  # place -> when, in the last minute
    with BlockSampler(time.perf_counter, interval + blocked_s) as sampler:
        while True:
            expected, used = clock() + interval, time.thread_time()
            await anyio.sleep(interval)
            now, used = clock(), time.thread_time() - used
            late = now - expected
            frame, asleep = sampler.tick()
            recorder.observe("loop/lag_ms_p99", 1e3 * max(0.0, late), reduce="p99")
            lateness.add(1e3 * late)
            recorder.gauge("loop/lag_ms_p99_run", lateness.p99)
            if late > _GRAIN_S:
                recorder.idle("loop", expected, now)
            if late > blocked_s:
                recorder.count("loop/blocked")
                if asleep or used > late / 2:
                    place = frame or "code that held the GIL or has no Python frame"
                    text = f"event loop blocked {late:.2f} s in {place}"
                    recorder.instant(text, track="event loop")
                    reported = {each: when for each, when in reported.items() if now - when < _AGAIN_S}
                    if place not in reported:
                        reported[place] = now
                        report(text)
