"""The watchdog's dump: all recorded waits, lanes, tasks, and the stacks of all threads."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from . import awake
from .describe import describe_tasks, describe_wait
from .offload import StandbyThread

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder


class WatchedLane(Protocol):
    """The part of a lane that the watchdog reads, from its own thread."""

    name: str

    def current(self) -> tuple[str, float] | None:
        """Name of the running closure and its start (`awake.now`), or None."""
        ...

    @property
    def thread_id(self) -> int | None:
        """`ident` of the thread that runs the closures; None without one."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Prints the state of the process, from any thread. loop_thread: `threading.get_ident()` of the loop's thread."""

    headline: str
    recorder: Recorder
    lanes: Sequence[WatchedLane]
    loop: asyncio.AbstractEventLoop | None
    loop_thread: int
    details: Sequence[Callable[[], str]] = ()

    def emit(self, writer: StandbyThread, limit_s: float) -> None:
        """Print to stderr on thread `writer`. Returns after at most `limit_s` seconds: a full pipe must not block the caller."""
        printed = threading.Event()
        writer.work.put(self._print)
        writer.work.put(printed.set)
        printed.wait(limit_s)

    def _print(self) -> None:
        # The headline is printed by itself, so that it is out even if a section below fails.
        print(f"\n=== asyncrl watchdog: {self.headline} ===", file=sys.stderr, flush=True)
        for section in (self._waits, self._lanes, self._details, self._tasks, self._threads):
            try:
                text = section()
            except Exception as exc:  # print the other sections all the same
                text = f"({section.__name__.strip('_')} could not be read: {type(exc).__name__}: {exc})"
            print(text, file=sys.stderr, flush=True)
        print("=== end of the watchdog's dump ===", file=sys.stderr, flush=True)

    def _waits(self) -> str:
        now = self.recorder.clock()
        return _section("waits", [describe_wait(wait, now) for wait in self.recorder.active_waits()])

    def _lanes(self) -> str:
        lines = []
        for lane in self.lanes:
            current = lane.current()
            runs = "is idle" if current is None else f"runs {current[0]!r} for {awake.now() - current[1]:.1f} s"
            lines.append(f"lane {lane.name!r} {runs}")
        return _section("lanes", lines)

    def _details(self) -> str:
        return _section("state", [detail() for detail in self.details])

    def _tasks(self) -> str:
        return _section("tasks", describe_tasks(asyncio.all_tasks(self.loop)) if self.loop is not None else [])

    def _threads(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        blocks = []
        for ident, frame in sys._current_frames().items():
            role = " (event loop)" if ident == self.loop_thread else ""
            stack = "".join(traceback.format_stack(frame)).rstrip()
            blocks.append(f"thread {names.get(ident, '?')!r}{role}:\n{stack}")
        return _section("threads", blocks)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines or ["(none)"])])
