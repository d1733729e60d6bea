"""The progress of a run: stages of start and end (for watchdog and live view), and committed steps (for listeners). Also makes
garbage collections rare during a run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakSet

from asyncrl.concurrency.offload import offloaded_work
from asyncrl.concurrency.watchdog import ProgressLimit
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import RankLost
from asyncrl.pumps.pipeline import StepReport


class Stages:
    """The current stage of a run's start or end. The watchdog names the stage if the run hangs in it.
    The event loop's thread, and threads that load parts, set the stage. The watchdog's thread reads the stage, lanes and line."""

    def __init__(self) -> None:
        self._stage = ""  # empty while the pumps run
        # Number of calls of `begin`: the watchdog compares this number to see progress.
        self._moves = 0
        self.display: Callable[[str], None] = lambda text: None  # the live view, once it is open
        self.lanes: list[Any] = []
        self.line: LineServer | LineClient | None = None  # to the other ranks; None if there can be no others
        self.lost: str | None = None  # why the run cannot go on without a lost rank
        # Ends the opening of the run with an error. Returns False, and does nothing, if the run is already open or is closing.
        self.end_opening: Callable[[RankLost], bool] = lambda lost: False

    def show(self, text: str) -> None:
        """Begin a stage, or report progress of the current stage, and show the text: a stage, a colon and counts.
        While the pumps run (a worker is started again, for example), the text is only shown, because nobody would end the stage."""
        if self._stage:
            self.begin(text)
        self.display(text)

    def begin(self, text: str) -> None:
        """Begin a stage, or report progress of the current stage, to the watchdog only."""
        self._stage = text
        self._moves += 1

    def end(self) -> None:
        """End the current stage. From now on the pumps have to make progress."""
        self._stage = ""

    def silent_ranks(self, fatal: bool) -> list[str]:
        """A sentence for each rank that is disconnected now. `fatal=True`: only the reason (`lost`) why the run cannot go on."""
        if fatal:
            return [] if self.lost is None else [self.lost]
        return [] if self.line is None else self.line.silent()

    def progress_limit(self, limit_s: float) -> ProgressLimit | None:
        """The watchdog's limit for the current stage. None while the pumps run."""
        stage = self._stage
        if not stage:
            return None
        return ProgressLimit((self._moves,), limit_s, f"the run stands still at {stage!r}", offloaded_work)


class Listener(Protocol):
    """`push` is called right after each commit of a step, before any `await`. `close` is called once or twice at the end."""

    def push(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


class Listeners:
    """The listeners of a run, held by weak references."""

    def __init__(self) -> None:
        self._all: WeakSet[Listener] = WeakSet()
        self._closed = False

    def add(self, listener: Listener) -> None:
        """Add a listener. If the training has ended, `listener` is closed at once."""
        self._all.add(listener)
        if self._closed:
            listener.close()

    def push(self, report: StepReport) -> None:
        for listener in self._all:
            listener.push(report)

    def close(self) -> None:
        """Close all listeners. A listener that is added later is closed at once."""
        self._closed = True
        for listener in self._all:
            listener.close()


class StepStream:
    """An asynchronous iterator over all steps that are committed after the call of `Runtime.steps`, also before the first `anext`.
    The stream holds no resource, and the Runtime has a weak reference to it: a `break` out of `async for` needs no cleanup."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[StepReport | None] = asyncio.Queue()  # None ends the stream

    def push(self, report: StepReport) -> None:
        """Append a report. The queue has no limit."""
        self._reports.put_nowait(report)

    def close(self) -> None:
        """End the stream after the reports that are in the queue."""
        self._reports.put_nowait(None)

    def __aiter__(self) -> StepStream:
        return self

    async def __anext__(self) -> StepReport:
        report = await self._reports.get()
        if report is None:
            self.close()  # ends a further `anext`, too
            raise StopAsyncIteration
        return report


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Inside the block, garbage collections skip the objects that existed before the block, whose full collection would hold the
    GIL for 0.2 s. Full collections of later objects take up to 20 ms each, and are a hundred times rarer. If the program has
    disabled the collector or frozen objects, nothing is changed."""
    thresholds = gc.get_threshold()
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    # Garbage that is frozen would stay in memory until `unfreeze`.
    gc.collect()
    gc.freeze()
    gc.set_threshold(thresholds[0], thresholds[1], 100 * thresholds[2])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
