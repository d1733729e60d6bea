"""Sentences about tasks: who they are and what they await. For error messages and the watchdog's dump."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..telemetry.lag import user_frame
from ..telemetry.records import Wait

_BETWEEN = ("its callers", " of queue ")  # edges: whoever is at the other end waits, too


def describe_tasks(tasks: set[asyncio.Task[Any]]) -> list[str]:
    """One line per task that has not ended, by name: its name and the frames it is suspended in, innermost last."""
    return [_describe(task) for task in sorted(tasks, key=lambda task: task.get_name()) if not task.done()]


def _describe(task: asyncio.Task[Any]) -> str:
    places = [_place(frame) for frame in _suspended_frames(task.get_coro())]
    waiter = getattr(task, "_fut_waiter", None)
    awaits = "is ready to run" if waiter is None else f"awaits {_name_of(waiter)}"
    return f"task {task.get_name()!r} {awaits} in {' > '.join(places[-4:]) or '(not started)'}"


def culprit(waits: Sequence[Wait], now: float) -> str:
    """Where a standstill comes from: of those that wait (longest first), the one that waits longest for somebody who does not
    wait in turn. Pumps that wait for each other are named only where there is nobody else."""
    if not waits:
        return "nobody has a recorded wait"
    waiting = {wait.who for wait in waits} | set(_BETWEEN)
    ends = [wait for wait in waits if not any(who in wait.on for who in waiting)]
    return describe_wait((ends or waits)[0], now)


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
