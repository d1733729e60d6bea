"""Sentences about tasks: who they are and what they await. For error messages and the watchdog's dump."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..telemetry.lag import top_user_frame, user_frame
from ..telemetry.records import Wait

# Parts of a run that others wait for, and that wait for others in turn, the deepest first. Whatever else is waited for (an
# environment, one reward worker, a disk) is outside, and deeper than all of them.
_WITHIN = ("lane", "engine", "idle reward worker", "reward workers", "pump", " of queue ", "its callers")


def describe_tasks(tasks: set[asyncio.Task[Any]]) -> list[str]:
    """One line per task that has not ended, by name: its name and the frames it is suspended in, innermost last."""
    return [_describe(task) for task in sorted(tasks, key=lambda task: task.get_name()) if not task.done()]


def _describe(task: asyncio.Task[Any]) -> str:
    places = [_place(frame) for frame in _suspended_frames(task.get_coro())]
    waiter = getattr(task, "_fut_waiter", None)
    awaits = "is ready to run" if waiter is None else f"awaits {_name_of(waiter)}"
    return f"task {task.get_name()!r} {awaits} in {' > '.join(places[-4:]) or '(not started)'}"


def place_of(holder: Any) -> str:
    """A thread and where it is, or a child of multiprocessing."""
    if isinstance(holder, threading.Thread):
        return f"thread {holder.name!r} in {top_user_frame(holder.ident or 0)}"
    return f"process {holder.pid} ({holder.name})"


def culprit(waits: Sequence[Wait], now: float, elsewhere: str | None = None) -> str:
    """Where a standstill comes from: the deepest wait, and of equally deep ones the longest, those of tasks (whose frame is known)
    first. `elsewhere`: what another rank is waited for, which is the reason where nothing here waits for what is outside."""
    if not waits:
        return elsewhere or "nobody has a recorded wait"
    deepest = min(waits, key=lambda wait: (_depth(wait), wait.task is None, wait.since))
    said = describe_wait(deepest, now)
    return said if elsewhere is None or _depth(deepest) < 0 else f"{elsewhere}; here {said}"


def _depth(wait: Wait) -> int:
    return next((depth for depth, part in enumerate(_WITHIN) if part in wait.on), -1)


def describe_wait(wait: Wait, now: float) -> str:
    """Who waits for what since when, and where its task is, if that is known."""
    place = None if wait.task is None else user_frame(reversed(_suspended_frames(wait.task.get_coro())))
    return wait.describe(now) + (f" in {place}" if place else "")


def _suspended_frames(awaitable: Any) -> list[FrameType]:
    """Follow the chain of awaits of a coroutine or generator down to the innermost Python frame."""
    frames = []
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        frame = frame or getattr(awaitable, "ag_frame", None)
        if frame is not None:
            frames.append(frame)
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return frames


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno})"


def _name_of(waiter: Any) -> str:
    if isinstance(waiter, asyncio.Task):
        return f"task {waiter.get_name()!r}"
    return f"a {type(waiter).__name__.lstrip('_')}"
