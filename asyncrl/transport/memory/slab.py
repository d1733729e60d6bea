"""A slab: one long-lived piece of device memory of one producer, leased in blocks, that other processes look at.

    with Slab.create("weights", 1 << 30, device="cuda") as slab:      another process, with these bytes:
        lease = slab.lease(nbytes)                                        peer = Slab.attach("weights")
        lease.tensor(torch.bfloat16, shape).copy_(values)                 peer.wait(fence)
        fence = slab.record(0)                                            with peer.open(Handle.decode(raw)) as tensor:
        send(lease.handle(torch.bfloat16, shape).encode(), fence)             use(tensor)

Why one slab: a CUDA IPC handle names a whole allocation. The handle of a tensor from torch's allocator would show the
process on the other side everything that lies in the same allocator segment, and would be opened anew for each tensor.
Here one allocation is exported once and opened once; a tensor in it is a `Handle` (block, generation, offset, dtype,
shape), as in an arena. The table of blocks lies in shared memory, under the slab's name, so a stale handle is
`StaleHandle` on either side, without a word to the owner.

What device memory cannot do, unlike shared memory:
* It dies with its owner. Nobody adopts it, and nobody may look at it after the owner gave it back. So the owner keeps it
  until the others let go: `device_queue` sees to that; whoever uses a slab by itself must.
* Work on a device is late: whoever reads waits for the writer's fence, and the writer reuses memory behind the reader's.
* A process cannot open its own handle: in the owner's process `attach` finds the memory itself.
`device="cpu"` is the same thing with shared memory behind it, for machines without a GPU.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ...errors import StaleHandle, TransportError
from .arena import ArrayBase
from .blocks import SLAB, ArenaStatistics, Block, BlockLease, BlockTable
from .device_memory import DeviceMemory
from .handles import BFLOAT16, Handle, dtype_name, numpy_dtype
from .segment import Segment

_HEAD = struct.Struct("<8sQI")  # magic, bytes of the memory, bytes of its description
_DESCRIPTION_BYTES = (
    4096  # the first page of the segment's data; what lies behind it is the memory of a slab on the CPU
)
_READY = 0  # word of the segment's board: 1 when the description is whole

# Memory that this process owns or opened, for those who attach to it here. By process: a forked child inherits the dict.
_memories: weakref.WeakValueDictionary[tuple[int, bytes], DeviceMemory] = weakref.WeakValueDictionary()
_memories_lock = threading.Lock()


class HostMemory(DeviceMemory):
    """Shared memory behind a slab. x86-64 keeps the order of stores, so its fences are empty (see `words`)."""

    kind = b"cpu"

    def __init__(self, segment: Segment, size: int) -> None:
        super().__init__(size, torch.device("cpu"), _nothing)
        self._segment = segment
        self._start = segment.geometry.data + _DESCRIPTION_BYTES

    def describe(self) -> bytes:
        """Nothing: who maps the segment has the memory."""
        return b""

    def tensor(self, offset: int, size: int, keep: object) -> torch.Tensor:
        """As `DeviceMemory.tensor`: a view of the mapping."""
        start = self._start + offset
        base = ArrayBase(self._segment, start, np.dtype(np.uint8), (size,), True, (self, keep))
        return torch.from_numpy(np.asarray(base))

    def address_of(self, tensor: torch.Tensor) -> int:
        """As `DeviceMemory.address_of`."""
        return int(tensor.data_ptr()) - self._segment.address - self._start


def _nothing() -> None:
    pass


class SlabLease(BlockLease):
    """The right to write a block until `release`, the end of the `with`, or `detach`."""

    def __init__(self, slab: Slab, block: Block) -> None:
        super().__init__(slab.table, block)
        self._slab = slab

    def tensor(self, dtype: Any, shape: tuple[int, ...], *, offset: int = 0) -> torch.Tensor:
        """A tensor on the slab's device; it keeps the lease. Errors: ValueError where it does not fit."""
        handle = self.handle(dtype, shape, offset=offset)
        return self._slab._tensor(self.block, handle, self)


class Slab:
    """See the module. Made by `create` (the owner) or `attach`; closed in the process that made it."""

    def __init__(self, segment: Segment, size: int, memory: DeviceMemory | None) -> None:
        self.segment = segment
        self.table = BlockTable(segment, 0, size, "slab")
        self._memory = memory

    @classmethod
    def create(cls, name: str, size: int, *, device: str | torch.device = "cuda", blocks: int = 1024) -> Slab:
        """A new slab of `size` bytes. Errors: as `Segment.create`; PlatformError where the device has no IPC."""
        if size < 1 or blocks < 1:
            raise ValueError(f"slab {name!r}: size and blocks must be positive, found {size} and {blocks}")
        where = torch.device(device)
        size = (size + 63) & -64
        if where.type == "cpu":
            segment = Segment.create(name, _DESCRIPTION_BYTES + size, blocks)
            return cls._publish(segment, HostMemory(segment, size))
        from .slab_cuda import CudaMemory

        memory = CudaMemory.allocate(where, size)
        return cls._publish(Segment.create(name, _DESCRIPTION_BYTES, blocks), memory)

    @classmethod
    def _publish(cls, segment: Segment, memory: DeviceMemory) -> Slab:
        try:
            description = memory.kind.ljust(8, b"\0") + memory.describe()
            start = segment.geometry.data
            head = _HEAD.pack(SLAB, memory.size, len(description)) + description
            segment.buffer[start : start + len(head)] = head
            segment.board.store(_READY, 1)
            with _memories_lock:
                _memories[os.getpid(), segment.geometry.run] = memory
            return cls(segment, memory.size, memory)
        except BaseException:
            segment.close(unlink=True)
            raise

    @classmethod
    def attach(cls, name: str) -> Slab:
        """The slab of another process, or of this one. Its memory is opened at the first look.

        Errors: FileNotFoundError; TransportError for a segment that is no slab.
        """
        segment = Segment.attach(name)
        try:
            magic, size, _ = _HEAD.unpack_from(segment.buffer, segment.geometry.data)
            if not segment.board[_READY] or magic != SLAB:
                raise TransportError(f"{segment.path} is no slab, or none yet: its owner must have made it with `Slab`")
            return cls(segment, size, None)
        except BaseException:
            segment.close(unlink=False)
            raise

    @property
    def memory(self) -> DeviceMemory:
        """Opened at the first use. Errors: PlatformError where it cannot be opened here, LifecycleError."""
        self.table.check_open()
        if self._memory is None:
            key = os.getpid(), self.segment.geometry.run
            with _memories_lock:
                self._memory = _memories.get(key) or self._open()
                _memories[key] = self._memory  # a process cannot open its own handle, nor the same one twice
        return self._memory

    @property
    def opened(self) -> bool:
        """Has somebody looked, so that the memory is mapped here?"""
        return self._memory is not None

    def _open(self) -> DeviceMemory:
        start = self.segment.geometry.data
        _, size, length = _HEAD.unpack_from(self.segment.buffer, start)
        description = bytes(self.segment.buffer[start + _HEAD.size : start + _HEAD.size + length])
        kind, details = description[:8].rstrip(b"\0"), description[8:]
        if kind == HostMemory.kind:
            return HostMemory(self.segment, size)
        from .slab_cuda import CudaMemory

        if kind != CudaMemory.kind:
            raise TransportError(f"{self.segment.path}: memory of kind {kind!r}; use the same asyncrl on both sides")
        return CudaMemory.open(size, details)

    # -- the owner's side

    def lease(self, size: int) -> SlabLease:
        """A block that is given back at the end of its `with`, or when it is forgotten. Errors: OutOfMemory."""
        return SlabLease(self, self.table.allocate(size))

    def free(self, block: Block) -> None:
        """Give a block back. Errors: StaleHandle where that was done already."""
        self.table.free(block)

    # -- everybody's side

    def view(self, handle: Handle, *, keep: object = None) -> torch.Tensor:
        """The tensor a handle names, without copying. The caller knows that the block stays. Errors: StaleHandle."""
        self.table.check_open()
        return self._tensor(self.table.checked(handle), handle, keep)

    @contextmanager
    def open(self, handle: Handle) -> Iterator[torch.Tensor]:
        """A look at a block that others own. Errors: StaleHandle, at the beginning or the end.

        The end is the end on this thread: for work that is still under way on the device the block has to stay, too.
        """
        yield self.view(handle)
        self.table.checked(handle)

    def handle_of(self, tensor: torch.Tensor) -> Handle:
        """The handle of a tensor that lies in a block of this slab. Errors: ValueError for any other."""
        memory = self.memory
        what = (
            f"{self.table.what}: a {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        )
        if not tensor.is_contiguous():
            raise ValueError(f"{what} is not contiguous; a handle names one piece of memory")
        start = memory.address_of(tensor) if tensor.device == memory.device else -1
        for block in self.table.existing():
            offset = start - block.offset
            if offset >= 0 and offset + tensor.nbytes <= block.size:
                shape = tuple(tensor.shape)
                run = self.segment.geometry.run
                return Handle(run, block.index, block.generation, offset, dtype_name(tensor.dtype), shape)
        raise ValueError(
            f"{what} does not lie in the slab: make it with `slab.lease(...).tensor(...)`, or copy it there"
            + memory.why_not(tensor)
        )

    def record(self, slot: int) -> bytes:
        """A fence behind what this thread has launched on its current stream; see `DeviceMemory.record`."""
        return self.memory.record(slot, self.memory.stream())

    def wait(self, fence: bytes) -> None:
        """What this thread launches on its current stream from now on runs after the fence."""
        self.memory.wait(fence, self.memory.stream())

    def statistics(self) -> ArenaStatistics:
        """As `Arena.statistics`."""
        return self.table.statistics()

    def close(self) -> None:
        """Let go; the memory goes when its last tensor in this process does. Twice is fine."""
        if not self.segment.closed:
            self._memory = None
            self.table.close()
            self.segment.close(unlink=True)

    def __enter__(self) -> Slab:
        self.table.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tensor(self, block: Block, handle: Handle, keep: object) -> torch.Tensor:
        dtype = torch_dtype(handle.dtype)
        memory = self.memory
        if handle.nbytes == 0:
            return torch.empty(handle.shape, dtype=dtype, device=memory.device)
        if handle.offset % dtype.itemsize:
            raise StaleHandle(f"{self.table.what}: offset {handle.offset} is not aligned for {handle.dtype}")
        flat = memory.tensor(block.offset + handle.offset, handle.nbytes, keep)
        return flat.view(dtype).view(handle.shape)


def torch_dtype(name: str) -> torch.dtype:
    """Errors: ValueError for numbers that torch does not have."""
    if name == BFLOAT16:
        return torch.bfloat16
    try:
        return torch.from_numpy(np.empty(0, numpy_dtype(name))).dtype
    except (TypeError, ValueError) as error:
        raise ValueError(f"torch has no numbers of the form {name!r}") from error
