"""How far a run is: the stages of its start and its end, for the watchdog and the live view, and its committed steps, for whoever
listens; and the collection of garbage between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from asyncrl.concurrency.offload import where
from asyncrl.concurrency.watchdog import ProgressLimit
from asyncrl.distributed.heartbeat import Heartbeat
from asyncrl.telemetry.recorder import Recorder

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Stages:
    """One stage after another, so that one that never ends has a name; with the lanes and the other ranks, which the watchdog looks
    at, too. Written by the loop's thread and by threads that load; read by the watchdog's."""

    def __init__(self) -> None:
        # Empty: nothing is starting or ending, the pumps run.
        self._now = ""
        # How often a stage has begun or moved.
        self._moves = 0
        self._show: Callable[[str], None] | None = None
        self.lanes: list[Any] = []
        # Where there are several ranks, once they have met.
        self.heartbeat: Heartbeat | None = None

    def show_on(self, show: Callable[[str], None]) -> None:
        """`say` is for people, too, from now on."""
        self._show = show

    def say(self, text: str) -> None:
        """A stage begins, or one that goes on has moved: a stage, a colon and counts. While the pumps run it is shown and no stage
        begins, as of a worker that is started again: nobody would end it."""
        if self._now:
            self.begin(text)
        if self._show is not None:
            self._show(text)

    def begin(self, text: str) -> None:
        """As `say`, for the watchdog alone."""
        self._now = text
        self._moves += 1

    def end(self) -> None:
        """From now on it is for the pumps to move."""
        self._now = ""

    def silent_ranks(self, longest_s: float | None) -> list[str]:
        """A few words for each; `longest_s`: only for those that were silent for longer than that."""
        return [] if self.heartbeat is None else self.heartbeat.silent(longest_s)

    def standing(self, limit_s: float) -> ProgressLimit | None:
        """None while the pumps run."""
        stage = self._now
        if not stage:
            return None
        return ProgressLimit((self._moves,), limit_s, f"the run stands still at {stage!r}", where)


class Listener(Protocol[T_in]):
    """`push` is called in the step of the loop in which a step is committed, `close` when the training has ended, maybe twice."""

    def push(self, item: T_in) -> None: ...

    def close(self) -> None: ...


class Listeners(Generic[T]):
    """Everybody who listens to one run, held by weak references."""

    def __init__(self) -> None:
        self._all: WeakSet[Listener[T]] = WeakSet()
        self._over = False

    def add(self, listener: Listener[T]) -> None:
        """From now on. It is closed at once where the training has ended."""
        self._all.add(listener)
        if self._over:
            listener.close()

    def push(self, item: T) -> None:
        """To all of them."""
        for listener in self._all:
            listener.push(item)

    def close(self) -> None:
        """All of them, and those that are added later."""
        self._over = True
        for listener in self._all:
            listener.close()


class StepStream(Generic[T]):
    """An asynchronous iterator over what is pushed from its making on, not only from its first `anext`.

    It holds no resource: who leaves the loop early just drops it (the Runtime keeps a weak reference).
    """

    def __init__(self) -> None:
        # None: nothing more comes.
        self._items: asyncio.Queue[T | None] = asyncio.Queue()

    def push(self, item: T) -> None:
        """The next item, kept until it is asked for."""
        self._items.put_nowait(item)

    def close(self) -> None:
        """Nothing more will come: what is buffered is still delivered."""
        self._items.put_nowait(None)

    def __aiter__(self) -> StepStream[T]:
        return self

    async def __anext__(self) -> T:
        item = await self._items.get()
        if item is None:
            self.close()  # for the next who asks
            raise StopAsyncIteration
        return item


@contextlib.contextmanager
def collections_between_steps(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Freeze what start-up made, and yield a function that makes a full collection where one is due: call it between two steps.

    A full collection holds the GIL, once transformers is loaded for 0.2 to 0.4 s, and Python makes one wherever an allocation
    happens to make it due. It takes at most a hundredth of the time here. A program that disabled the collector, or froze its own
    objects, keeps that; nothing is changed then.
    """
    found, due = gc.get_threshold(), 0.0
    if not gc.isenabled() or gc.get_freeze_count():
        yield lambda: None
        return

    def collect() -> None:
        nonlocal due
        began = time.perf_counter()
        if gc.isenabled() and gc.get_count()[2] > found[2] and began > due:
            with recorder.work("event loop", "collect garbage"):
                gc.collect()
            due = time.perf_counter() + 100 * (time.perf_counter() - began)

    # Else garbage would be frozen, too, and the memory that it holds.
    gc.collect()
    gc.freeze()
    # Without steps, as in a program that only generates, Python collects by itself, later.
    gc.set_threshold(found[0], found[1], 100 * found[2])
    try:
        yield collect
    finally:
        gc.set_threshold(*found)
        gc.unfreeze()
