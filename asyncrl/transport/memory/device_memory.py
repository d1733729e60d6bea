"""The memory of a slab, mapped into one process: the base class, and shared host memory. `slab_cuda` has CUDA memory."""

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
    """A mapping of memory in this process. `unmap` is called when nothing refers to this object any more.

    Every tensor of the memory refers to this object. Subclasses create and open the memory, and make fences. A fence is 64 bytes,
    which one process sends to another: work after `wait` runs when the work before `record` is done.
    """

    kind = b""

    def __init__(self, size: int, unmap: Callable[[], None]) -> None:
        self.size = size
        self._callbacks: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(self, _unmap_and_notify, unmap, self._callbacks)
        self._finalizer.atexit = False

    def on_unmapped(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on any thread, when the memory is no longer mapped in this process."""
        self._callbacks.append(callback)

    def tensor(self, offset: int, size: int, keep_alive: object) -> torch.Tensor:
        """`size` bytes as a flat uint8 tensor that keeps the memory and `keep_alive` alive."""
        raise NotImplementedError

    def stream(self) -> Any:
        """The stream that is current on this thread."""
        return None

    def writing(self) -> AbstractContextManager[Any]:
        """The stream for the owner's writes, which run after earlier and before later work of the current stream."""
        return nullcontext()

    def record(self, slot: int, stream: Any) -> bytes:
        """A fence behind everything that was launched on the stream. Use a slot (a number) again only after every receiver of
        the slot's last fence has called `wait`."""
        return bytes(FENCE_BYTES)

    def wait(self, fence: bytes, stream: Any) -> None:
        """Work that is launched on the stream from now on runs after the fence. Does not block the thread."""


def _unmap_and_notify(unmap: Callable[[], None], callbacks: list[Callable[[], None]]) -> None:
    try:
        unmap()
    finally:
        for callback in callbacks:
            callback()


class HostMemory(DeviceMemory):
    """The data of a segment from byte `start` on. Fences are zeros and need no wait: x86-64 keeps the order of stores."""

    kind = b"cpu"

    def __init__(self, segment: Segment, start: int, size: int) -> None:
        super().__init__(size, _nothing)
        self._data = segment.data[start : start + size]

    def bytes(self, offset: int, size: int, keep_alive: object) -> npt.NDArray[np.uint8]:
        """`size` writable bytes; the array keeps the mapping and `keep_alive` alive."""
        return np.asarray(_ArrayBase(self._data[offset : offset + size], (self, keep_alive)))

    def tensor(self, offset: int, size: int, keep_alive: object) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.bytes(offset, size, keep_alive))


def _nothing() -> None:
    pass


class _ArrayBase:
    """The `base` of an array: keeps the mapping and `keep_alive` alive as long as the array or a slice of the array."""

    def __init__(self, data: memoryview, keep_alive: object) -> None:
        # The memoryview is an export of the map: closing the map under the array fails.
        self._keep_alive = data, keep_alive
        self.__array_interface__ = np.frombuffer(data, np.uint8).__array_interface__
