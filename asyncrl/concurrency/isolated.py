"""Runs a user's code in a separate task, so that the code's CancelledError, SystemExit or slow cleanup does not break the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .shield import wait_shielded

T = TypeVar("T")

# Seconds after the first cancellation of a task until it is cancelled again, and until the caller no longer waits for it.
CLEANUP_S, ABANDON_S = 8.0, 10.0
logger = logging.getLogger("asyncrl.concurrency")


class CancelledItself(Exception):
    """The work raised a CancelledError, although nobody had cancelled the caller."""


async def run_isolated(work: Callable[[], Awaitable[T]], name: str) -> T:
    """Run `work` in a separate task and return its result. Errors: `CancelledItself`; those of `work`. A SystemExit of `work` is
    raised here and not in the task, where it would end the event loop.

    If the caller is cancelled, the task is cancelled once. So `async with` and `finally` of the work can await their cleanup; an
    anyio scope would cancel the cleanup at every `await`. After `CLEANUP_S` the cleanup is cancelled, too. If the task ignores both
    cancellations, the caller goes on after `ABANDON_S`, with a warning.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    async def run_work() -> None:
        try:
            results.append(await work())
        except BaseException as error:
            errors.append(error)

    task = asyncio.create_task(run_work(), name=name)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _cancel(task, name)
        raise
    if not errors and not results:
        # The task was cancelled before its first step.
        errors.append(asyncio.CancelledError())
    if errors:
        error = errors.pop()
        if isinstance(error, asyncio.CancelledError):
            raise CancelledItself(*error.args) from error
        try:
            raise error
        finally:
            # Avoid a reference cycle: the exception's traceback holds this frame.
            del error
    return results[0]


async def _cancel(task: asyncio.Task[None], name: str) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    task.cancel()
    timers = loop.call_later(CLEANUP_S, task.cancel), loop.call_later(ABANDON_S, end)
    await wait_shielded(ended)
    for timer in timers:
        timer.cancel()
    if not task.done():
        logger.warning("%s ignores its cancellation; the run no longer waits for its cleanup", name)
