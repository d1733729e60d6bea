"""Sentences about tasks: who they are and what they await. For error messages and the watchdog's dump."""

from __future__ import annotations

import asyncio
from types import FrameType
from typing import Any


def describe_tasks(tasks: set[asyncio.Task[Any]]) -> list[str]:
    """One line per task that has not ended, by name: its name and the frames it is suspended in, innermost last."""
    return [describe_task(task) for task in sorted(tasks, key=lambda task: task.get_name()) if not task.done()]


def describe_task(task: asyncio.Task[Any]) -> str:
    places = [_place(frame) for frame in _suspended_frames(task.get_coro())]
    waiter = getattr(task, "_fut_waiter", None)
    awaits = "is ready to run" if waiter is None else f"awaits {_name_of(waiter)}"
    return f"task {task.get_name()!r} {awaits} in {' > '.join(places[-4:]) or '(not started)'}"


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
