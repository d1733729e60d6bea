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
    """A mapping of memory in this process. `let_go` unmaps the memory when nothing refers to this object any more.

    Every tensor of the memory refers to this object. Subclasses create, open and fence the memory. A fence is 64 bytes, which one
    process sends to another.
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

    def tensor(self, offset: int, size: int, keep_alive: object) -> torch.Tensor:
        """`size` bytes as a flat uint8 tensor that keeps the memory and `keep_alive` alive."""
        raise NotImplementedError

    def stream(self) -> Any:
        """The stream that is current on this thread."""
        return None

    def writing(self) -> AbstractContextManager[Any]:
        """The stream on which the owner writes. It runs after earlier work of the current stream and before later work."""
        return nullcontext()

    def record(self, slot: int, stream: Any) -> bytes:
        """A fence behind everything that was launched on the stream. Use a slot again only after every receiver of its last
        fence has called `wait`."""
        return bytes(FENCE_BYTES)

    def wait(self, fence: bytes, stream: Any) -> None:
        """Work that is launched on the stream from now on runs after the fence. Does not block the thread."""


def _let_go(let_go: Callable[[], None], after: list[Callable[[], None]]) -> None:
    try:
        let_go()
    finally:
        for call in after:
            call()


class HostMemory(DeviceMemory):
    """The data of a segment from byte `start` on. Fences are empty, because x86-64 keeps the order of stores."""

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
