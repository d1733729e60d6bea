"""Memory of a slab as one process has it mapped: what every kind of it has in common. See `slab`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

FENCE_BYTES = 64


class DeviceMemory:
    """A piece of memory as this process has it mapped; `let_go` unmaps it when the last who keeps this object is gone.

    Every tensor of it keeps it. Subclasses say how it is made, opened and fenced; a fence is 64 bytes that travel.
    """

    kind = b""

    def __init__(self, size: int, device: torch.device, let_go: Callable[[], None]) -> None:
        self.size, self.device = size, device
        self._after: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(self, _let_go, let_go, self._after)
        self._finalizer.atexit = False

    def after(self, call: Callable[[], None]) -> None:
        """Call this, on any thread, when the memory is no longer mapped here."""
        self._after.append(call)

    def describe(self) -> bytes:
        """What another process opens it with."""
        raise NotImplementedError

    def tensor(self, offset: int, size: int, keep: object) -> torch.Tensor:
        """`size` >= 1 bytes as a flat uint8 tensor that keeps the memory, and `keep`."""
        raise NotImplementedError

    def address_of(self, tensor: torch.Tensor) -> int:
        """Where a tensor begins, in bytes from the beginning of this memory; negative or too large for another's."""
        raise NotImplementedError

    def why_not(self, tensor: torch.Tensor) -> str:
        """More about a tensor that lies elsewhere and has no handle here."""
        return ""

    def stream(self) -> Any:
        """The stream that is current on this thread."""
        return None

    def writing(self) -> AbstractContextManager[Any]:
        """The stream on which the owner writes, between what is launched before and after on the current one."""
        return nullcontext()

    def record(self, slot: int, stream: Any) -> bytes:
        """A fence behind everything that was launched on the stream. The same slot is used again only after everybody
        who was told of its last fence has called `wait`."""
        return bytes(FENCE_BYTES)

    def wait(self, fence: bytes, stream: Any) -> None:
        """What is launched on the stream from now on runs after the fence. Does not block the thread."""


def _let_go(let_go: Callable[[], None], after: list[Callable[[], None]]) -> None:
    try:
        let_go()
    finally:
        for call in after:
            call()
