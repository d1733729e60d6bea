"""A slab: one long-lived piece of memory of one sender, in which it places what other processes look at. Nothing is copied there.

    with Slab.create("weights", 1 << 30, device="cuda") as slab:      another process, with these bytes:
        handle = slab.handle(slab.allocate(nbytes), dtype, shape)         peer = Slab.attach("weights")
        slab.view(handle).copy_(values)                                   peer.memory.wait(fence, peer.memory.stream())
        fence = slab.memory.record(0, slab.memory.stream())               use(peer.view(Handle.decode(raw)))
        send(handle.encode(), fence)

Why one slab: a CUDA IPC handle names a whole allocation. The handle of a tensor from torch's allocator would show the
process on the other side everything that lies in the same allocator segment, and would be opened anew for each tensor.
Here one allocation is exported once and opened once; a tensor in it is a `Handle` (offset, dtype, shape). What describes it lies in
shared memory, under the slab's name. With `device="cpu"` the slab itself lies there, too.

The sender alone knows which bytes are in use: whoever passes handles on has to see to it that nobody looks at them after `free`
(the queues count credits for that). A handle of another slab, or of an earlier one of this name, is `StaleHandle`.

What device memory cannot do, unlike shared memory:
* It dies with its owner, and nobody may look at it after the owner gave it back. So the owner keeps it until the others let go:
  `device_queue` sees to that; whoever uses a slab by itself must.
* Work on a device is late: whoever reads waits for the writer's fence, and the writer reuses memory behind the reader's.
* A process cannot open its own handle: in the owner's process `attach` finds the memory itself.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import LifecycleError, OutOfMemory, StaleHandle, TransportError
from .device_memory import DeviceMemory, HostMemory
from .handles import BFLOAT16, Handle, dtype_name, numpy_dtype
from .segment import Segment, first_gap

if TYPE_CHECKING:
    import torch

_MAGIC = b"slab2\0\0\0"
# Magic, bytes of the memory, its kind, bytes of its description.
_HEAD = struct.Struct("<8sQ8sI")
# Of head and description. Behind it lies the memory of a slab on the CPU.
_PAGE = 4096

# Memory that this process owns or opened, for those who attach to it here. By process: a forked child inherits the dict.
_memories: weakref.WeakValueDictionary[tuple[int, bytes], DeviceMemory] = weakref.WeakValueDictionary()
_memories_lock = threading.Lock()


class Slab:
    """See the module. Made by `create` (the owner) or `attach`; closed in the process that made it."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size = segment, size
        self._memory: DeviceMemory | None = None
        self._taken: dict[int, int] = {}  # the owner's: bytes, by where they begin

    @classmethod
    def create(cls, name: str, size: int, *, device: str | torch.device = "cuda") -> Slab:
        """A new slab of `size` bytes. Errors: as `Segment.create`; PlatformError where the device has no IPC."""
        if size < 1:
            raise ValueError(f"slab {name!r}: its size must be positive, found {size}")
        size = (size + 63) & -64
        if str(device) == "cpu":
            slab = cls(Segment.create(name, _PAGE + size, prepare=_described(HostMemory.kind, size, b"")), size)
            _ = slab.memory
            return slab
        from .slab_cuda import CudaMemory

        memory = CudaMemory.allocate(device, size)
        slab = cls(Segment.create(name, _PAGE, prepare=_described(memory.kind, size, memory.description)), size)
        with _memories_lock:
            slab._memory = _memories[os.getpid(), slab.segment.run] = memory
        return slab

    @classmethod
    def attach(cls, name: str) -> Slab:
        """The slab of another process, or of this one. Its memory is opened at the first look.

        Errors: FileNotFoundError; TransportError for a segment that is no slab.
        """
        segment = Segment.attach(name)
        magic, size = _HEAD.unpack_from(segment.data)[:2] if len(segment.data) >= _PAGE else (b"", 0)
        if magic != _MAGIC:
            segment.close(unlink=False)
            raise TransportError(f"{segment.path} is no slab: its owner must have made it with `Slab`")
        return cls(segment, size)

    @property
    def memory(self) -> DeviceMemory:
        """Opened at the first use. Errors: PlatformError where it cannot be opened here, LifecycleError."""
        self._check_open()
        if self._memory is None:
            key = os.getpid(), self.segment.run
            with _memories_lock:
                # A process cannot open its own handle, nor the same one twice.
                self._memory = _memories[key] = _memories.get(key) or self._open()
        return self._memory

    @property
    def opened(self) -> bool:
        """Has somebody looked, so that the memory is mapped here?"""
        return self._memory is not None

    def _open(self) -> DeviceMemory:
        _, size, kind, length = _HEAD.unpack_from(self.segment.data)
        kind, description = kind.rstrip(b"\0"), bytes(self.segment.data[_HEAD.size : _HEAD.size + length])
        if kind == HostMemory.kind:
            return HostMemory(self.segment, _PAGE, size)
        from .slab_cuda import CudaMemory

        if kind != CudaMemory.kind:
            raise TransportError(f"{self.segment.path}: memory of kind {kind!r}; use the same asyncrl on both sides")
        return CudaMemory.open(size, description)

    # -- the owner's side

    def allocate(self, size: int) -> int:
        """Where `size` bytes begin that are the caller's until `free`; a multiple of 64. Errors: OutOfMemory with figures."""
        self._check_open()
        if not self.segment.owner:
            raise LifecycleError(
                f"slab {self.segment.name!r}: only its owner allocates and frees; this process attached"
            )
        start = first_gap(self._taken.items(), size, self.size)
        if start is None:
            raise OutOfMemory(
                f"slab {self.segment.name!r}: no {size:,} bytes in one piece; {sum(self._taken.values()):,} of {self.size:,} are "
                f"in use, in {len(self._taken)} pieces"
            )
        self._taken[start] = size
        return start

    def free(self, start: int) -> None:
        """Give back what `allocate` gave."""
        del self._taken[start]

    # -- everybody's side

    def handle(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Handle:
        """What names an array here. Errors: StaleHandle where it does not lie in the slab."""
        return self._checked(Handle(self.segment.run, offset, dtype_name(dtype), tuple(shape)))

    def view(self, handle: Handle, *, keep: object = None) -> torch.Tensor:
        """The tensor that a handle names, writable; `keep` lives as long as it does. Errors: StaleHandle."""
        self._checked(handle)
        dtype, memory = torch_dtype(handle.dtype), self.memory
        return memory.tensor(handle.offset, handle.nbytes, keep).view(dtype).view(handle.shape)

    def array(self, handle: Handle, *, keep: object = None) -> npt.NDArray[Any]:
        """The same as a numpy array, of a slab on the CPU; bfloat16 as its 16 bits."""
        self._checked(handle)
        memory = self.memory
        assert isinstance(memory, HostMemory)
        return memory.bytes(handle.offset, handle.nbytes, keep).view(numpy_dtype(handle.dtype)).reshape(handle.shape)

    def close(self) -> None:
        """Let go; the memory goes when its last tensor in this process does. Twice is fine."""
        self._memory = None
        self.segment.close(unlink=True)

    def __enter__(self) -> Slab:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _checked(self, handle: Handle) -> Handle:
        self._check_open()
        if handle.run != self.segment.run:
            raise StaleHandle(
                f"the handle is of another slab than {self.segment.name!r}, or of an earlier one of this name"
            )
        aligned = handle.offset % numpy_dtype(handle.dtype).itemsize == 0
        if not aligned or not 0 <= handle.offset <= handle.offset + handle.nbytes <= self.size:
            raise StaleHandle(
                f"{handle.dtype} {list(handle.shape)} at {handle.offset} does not lie (aligned) in the {self.size:,} bytes of slab "
                f"{self.segment.name!r}"
            )
        return handle

    def _check_open(self) -> None:
        if self.segment.closed:
            raise LifecycleError(f"slab {self.segment.name!r} is closed")


def _described(kind: bytes, size: int, description: bytes) -> Any:
    head = _HEAD.pack(_MAGIC, size, kind, len(description)) + description

    def prepare(data: memoryview) -> None:
        data[: len(head)] = head

    return prepare


def torch_dtype(name: str) -> torch.dtype:
    """Errors: ValueError for numbers that torch does not have."""
    import torch

    if name == BFLOAT16:
        return torch.bfloat16
    try:
        return torch.from_numpy(np.empty(0, numpy_dtype(name))).dtype
    except (TypeError, ValueError) as error:
        raise ValueError(f"torch has no numbers of the form {name!r}") from error
