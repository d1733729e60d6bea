"""What a Runtime tells: `steps()`, the committed steps one by one until the training ends, and how the run ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import anyio

from asyncrl.types import LedgerStatistics

T = TypeVar("T")

T_in = TypeVar("T_in", contravariant=True)


class State(Enum):
    """Of a Runtime."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Listener(Protocol[T_in]):
    """Hears of every committed step, and of the end of the training, in the step of the loop in which it happens."""

    def push(self, item: T_in) -> None:
        """A step was committed."""
        ...

    def close(self) -> None:
        """The training ended: no more steps."""
        ...


class Listeners(Generic[T]):
    """Everybody who listens to one run, held by weak references."""

    def __init__(self) -> None:
        self._all: WeakSet[Listener[T]] = WeakSet()
        self._over = False

    def add(self, listener: Listener[T]) -> None:
        """It hears of the end at once if that was reached already."""
        self._all.add(listener)
        if self._over:
            listener.close()

    def push(self, item: T) -> None:
        """A step was committed: everybody hears it."""
        for listener in self._all:
            listener.push(item)

    def close(self) -> None:
        """No step will come any more. Each time it is said, everybody hears it."""
        self._over = True
        for listener in self._all:
            listener.close()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    version: int
    books: LedgerStatistics
    reasons: Mapping[str, int]  # why groups were dropped or failed, counted
    seconds: float
    shares: Mapping[str, float]  # busy/* and idle/* of the whole run
    history: Sequence[
        tuple[int, Mapping[str, float]]
    ]  # (version, metrics) of the lines written; of more than 2,000 an even part


class StepStream(Generic[T]):
    """An asynchronous iterator over what is pushed. It hears from its making on, not only from its first `anext`.

    It holds no resource: who leaves the loop early just drops it (the Runtime keeps a weak reference).
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._over = False
        self._changed = anyio.Event()

    def push(self, item: T) -> None:
        """The next item, kept until it is asked for."""
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        """Nothing more will come: what is buffered is still delivered."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def __aiter__(self) -> StepStream[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._over:
                raise StopAsyncIteration
            await self._changed.wait()
        return self._items.popleft()
