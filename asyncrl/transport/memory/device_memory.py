"""Memory of a slab as one process has it mapped: what every kind of it has in common, and shared memory. CUDA's is `slab_cuda`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .segment import Segment

if TYPE_CHECKING:
    import torch

FENCE_BYTES = 64


class DeviceMemory:
    """A piece of memory as this process has it mapped; `let_go` unmaps it when the last who keeps this object is gone.

    Every tensor of it keeps it. Subclasses say how it is made, opened and fenced; a fence is 64 bytes that travel.
    """

    kind = b""

    def __init__(self, size: int, let_go: Callable[[], None]) -> None:
        self.size = size
        self._after: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(self, _let_go, let_go, self._after)
        self._finalizer.atexit = False

    def after(self, call: Callable[[], None]) -> None:
        """Call this, on any thread, when the memory is no longer mapped here."""
        self._after.append(call)

    def tensor(self, offset: int, size: int, keep: object) -> torch.Tensor:
        """`size` bytes as a flat uint8 tensor that keeps the memory, and `keep`."""
        raise NotImplementedError

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


class HostMemory(DeviceMemory):
    """The data of a segment from byte `start` on. x86-64 keeps the order of stores, so its fences are empty (see `words`)."""

    kind = b"cpu"

    def __init__(self, segment: Segment, start: int, size: int) -> None:
        super().__init__(size, _nothing)
        self._data = segment.data[start : start + size]

    def bytes(self, offset: int, size: int, keep: object) -> npt.NDArray[np.uint8]:
        """`size` bytes, writable; the array keeps the mapping, and `keep`."""
        return np.asarray(_ArrayBase(self._data[offset : offset + size], (self, keep)))

    def tensor(self, offset: int, size: int, keep: object) -> torch.Tensor:
        """As `DeviceMemory.tensor`: a view of the mapping."""
        import torch

        return torch.from_numpy(self.bytes(offset, size, keep))


def _nothing() -> None:
    pass


class _ArrayBase:
    """What numpy keeps as the base of an array: with it live the mapping and `keep`, as long as the array or a slice of it does."""

    def __init__(self, data: memoryview, keep: object) -> None:
        # An export: the map cannot be closed under the array.
        self._keep = data, keep
        self.__array_interface__ = np.frombuffer(data, np.uint8).__array_interface__
