"""The watchdog's dump: all recorded waits, lanes, tasks, and the stacks of all threads."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from . import awake
from .describe import describe_tasks, describe_wait
from .lane import Lane

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder


def print_dump(
    headline: str,
    recorder: Recorder,
    lanes: Sequence[Lane],
    loop: asyncio.AbstractEventLoop | None,
    loop_thread: int,
    details: Sequence[Callable[[], str]] = (),
) -> None:
    """Print the state of the process to stderr, from any thread. loop_thread: `threading.get_ident()` of the loop's thread."""

    def waits() -> Iterator[str]:
        now = recorder.clock()
        yield from (describe_wait(wait, now) for wait in recorder.active_waits())

    def lane_states() -> Iterator[str]:
        for lane in lanes:
            current = lane.current()
            state = "is idle" if current is None else f"has run {current[0]!r} for {awake.now() - current[1]:.1f} s"
            yield f"lane {lane.name!r} {state}"

    def threads() -> Iterator[str]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            role = " (event loop)" if ident == loop_thread else ""
            yield f"thread {names.get(ident, '?')!r}{role}:\n{''.join(traceback.format_stack(frame)).rstrip()}"

    # Each part is printed by itself, so that it is out even if a later part fails.
    print(f"\n=== asyncrl watchdog: {headline} ===", file=sys.stderr, flush=True)
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "waits": waits,
        "lanes": lane_states,
        "state": lambda: (detail() for detail in details),
        "tasks": lambda: iter(describe_tasks(asyncio.all_tasks(loop)) if loop is not None else []),
        "threads": threads,
    }
    for title, lines in sections.items():
        try:
            text = "\n".join([f"{title}:", *(f"  {line}" for line in [*lines()] or ["(none)"])])
        except Exception as exc:  # print the other sections all the same
            text = f"({title} could not be read: {type(exc).__name__}: {exc})"
        print(text, file=sys.stderr, flush=True)
    print("=== end of the watchdog's dump ===", file=sys.stderr, flush=True)
