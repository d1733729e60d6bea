"""What `Runtime.steps()` gives: the committed steps, one by one, until the training ends."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class StepStream(Generic[T]):
    """An asynchronous iterator over what is pushed. It hears from its making on, not only from its first `anext`.

    It holds no resource: who leaves the loop early just drops it (the Runtime keeps a weak reference).
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._over = False
        self._changed = anyio.Event()

    def push(self, item: T) -> None:
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
