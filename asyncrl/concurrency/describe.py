"""Describes tasks and waits in words, for error messages and the watchdog's dump."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..telemetry.lag import top_user_frame, user_frame
from ..telemetry.records import Wait

# Parts of a run, as they are named in `Wait.on`. Each may wait for the parts before it in this list. Everything else (an
# environment, one reward worker, a disk) is outside of the run. A wait for something outside explains a standstill best.
_RUN_PARTS = ("lane", "engine", "reward worker with room", "reward workers", "pump", " of queue ", "its callers")


def describe_tasks(tasks: set[asyncio.Task[Any]]) -> list[str]:
    """One line for each unfinished task, sorted by name: name, what it awaits, and its innermost four frames, innermost last."""
    return [_describe_task(task) for task in sorted(tasks, key=lambda task: task.get_name()) if not task.done()]


def _describe_task(task: asyncio.Task[Any]) -> str:
    frames = [_describe_frame(frame) for frame in _suspended_frames(task.get_coro())]
    waiter = getattr(task, "_fut_waiter", None)
    awaits = "is ready to run" if waiter is None else f"awaits {_describe_awaitable(waiter)}"
    return f"task {task.get_name()!r} {awaits} in {' > '.join(frames[-4:]) or '(no Python frame)'}"


def describe_holder(holder: Any) -> str:
    """Name and current frame of a thread, or pid and name of a child process of multiprocessing."""
    if isinstance(holder, threading.Thread):
        return f"thread {holder.name!r} in {top_user_frame(holder.ident or 0)}"
    return f"process {holder.pid} ({holder.name})"


def culprit(waits: Sequence[Wait], now: float, remote_cause: str | None = None) -> str:
    """The wait that best explains a standstill, in words. A wait for something outside of the run comes first, then waits in the
    order of `_RUN_PARTS`. Among equals, waits with a known task come first (the text has the task's frame), then longer waits.
    remote_cause: what this rank needs from another rank; precedes all waits of this rank except those for something outside."""
    if not waits:
        return remote_cause or "nobody has a recorded wait"
    best = min(waits, key=lambda wait: (_order(wait), wait.task is None, wait.since))
    description = describe_wait(best, now)
    return description if remote_cause is None or _order(best) < 0 else f"{remote_cause}; here {description}"


def _order(wait: Wait) -> int:
    # -1: the wait is for something outside of the run.
    return next((index for index, part in enumerate(_RUN_PARTS) if part in wait.on), -1)


def describe_wait(wait: Wait, now: float) -> str:
    """Who waits for what and how long, and the frame of the waiting task if the task is known."""
    frame = None if wait.task is None else user_frame(reversed(_suspended_frames(wait.task.get_coro())))
    return wait.describe(now) + (f" in {frame}" if frame else "")


def _suspended_frames(awaitable: Any) -> list[FrameType]:
    """Frames of a coroutine or generator and of what it awaits, innermost last. The list ends at an `async for`."""
    frames = []
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        frame = frame or getattr(awaitable, "ag_frame", None)
        if frame is not None:
            frames.append(frame)
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return frames


def _describe_frame(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno})"


def _describe_awaitable(waiter: Any) -> str:
    if isinstance(waiter, asyncio.Task):
        return f"task {waiter.get_name()!r}"
    return f"a {type(waiter).__name__.lstrip('_')}"
