"""A slab: one long-lived block of host or device memory. One process owns the block, and other processes map it without a copy.

    with Slab.create("weights", 1 << 30, device="cuda") as slab:      another process: with Slab.attach("weights") as peer:
        slab.tensor()[:8].fill_(1)                                                         peer.tensor()[:8].sum()

A slab is one allocation, which is exported once and opened once: a CUDA IPC handle names a whole allocation. With a handle for
a tensor of torch's allocator, the other process would see all tensors of the same allocation, and would open each tensor
separately. A shared-memory segment with the slab's name describes the slab. With `device="cpu"` the segment also holds the memory.

The end of the owner's process frees device memory, and no process may read freed memory. So the owner must live and keep the memory
until all other processes have unmapped it. A kernel launch returns before the kernel ends, so the owner must wait for its writes
(for example by `torch.cuda.synchronize`) before other processes read.
"""

from __future__ import annotations

import struct
from typing import Self

import numpy as np
import torch

from ...errors import LifecycleError, TransportError
from .segment import Segment
from .slab_cuda import CudaMemory

_MAGIC = b"slab2\0\0\0"
_HEAD = struct.Struct("<8sQ8sI")  # magic, bytes of memory, kind, bytes of description
# Bytes for head and description. The memory of a CPU slab follows.
_HEAD_BYTES = 4096
_HOST, _CUDA = b"cpu", b"cuda"


class Slab:
    """See the module. The owner calls `create`, other processes call `attach`. Each process closes the `Slab` that it made."""

    def __init__(self, segment: Segment, size: int, memory: CudaMemory | None) -> None:
        """`memory`: the device memory; None: the slab's memory is in the segment, after the first `_HEAD_BYTES`."""
        self.segment, self.size = segment, size
        self._memory = memory

    @classmethod
    def create(cls, name: str, size: int, *, device: str | torch.device = "cuda") -> Self:
        """`size`: bytes, rounded up to a multiple of 64. Errors: as `Segment.create`; PlatformError for a device without IPC."""
        size = (size + 63) & -64
        memory = None if str(device) == "cpu" else CudaMemory.allocate(device, size)
        kind, description = (_HOST, b"") if memory is None else (_CUDA, memory.description)
        head = _HEAD.pack(_MAGIC, size, kind, len(description)) + description

        def write_head(data: memoryview) -> None:
            data[: len(head)] = head

        segment = Segment.create(name, _HEAD_BYTES + (size if memory is None else 0), prepare=write_head)
        return cls(segment, size, memory)

    @classmethod
    def attach(cls, name: str) -> Self:
        """The slab of another process or of this one. Errors: FileNotFoundError; TransportError for a segment that is no slab;
        PlatformError for memory that cannot be opened."""
        segment = Segment.attach(name)
        try:
            if len(segment.data) < _HEAD_BYTES or segment.data[: len(_MAGIC)] != _MAGIC:
                raise TransportError(f"{segment.path} is no slab; its owner must make it with `Slab.create`")
            _, size, kind, length = _HEAD.unpack_from(segment.data)
            memory: CudaMemory | None = None
            if kind.rstrip(b"\0") != _HOST:
                memory = CudaMemory.open(size, bytes(segment.data[_HEAD.size : _HEAD.size + length]))
            return cls(segment, size, memory)
        except BaseException:
            segment.close(unlink=False)
            raise

    def tensor(self) -> torch.Tensor:
        """The whole slab as flat writable bytes. Its memory stays mapped as long as the tensor lives. Errors: LifecycleError."""
        if self.segment.closed:
            raise LifecycleError(f"slab {self.segment.name!r} is closed")
        if self._memory is not None:
            return self._memory.tensor()
        return bytes_tensor(self.segment.data[_HEAD_BYTES : _HEAD_BYTES + self.size])

    def close(self) -> None:
        """Close the slab. The owner also removes the slab's name. The memory stays mapped while this process has a tensor of it."""
        self._memory = None
        self.segment.close(unlink=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def bytes_tensor(data: memoryview) -> torch.Tensor:
    """Mapped memory as a flat uint8 tensor, which keeps the mapping alive. A write into read-only memory is a SIGSEGV."""
    return torch.from_numpy(np.asarray(_ArrayBase(data)))


class _ArrayBase:
    """The `base` of a numpy array; it keeps the memory mapped. The array claims to be writable even if the memory is read-only,
    because torch has no read-only tensors and warns about read-only arrays."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        interface = np.frombuffer(data, np.uint8).__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
