"""A slab: one long-lived block of memory of a sending process. Other processes read arrays there without a copy.

    with Slab.create("weights", 1 << 30, device="cuda") as slab:      another process, which got raw and fence:
        handle = slab.handle(slab.allocate(nbytes), dtype, shape)         peer = Slab.attach("weights")
        slab.view(handle).copy_(values)                                   peer.memory.wait(fence, peer.memory.stream())
        fence = slab.memory.record(0, slab.memory.stream())               use(peer.view(Handle.decode(raw)))
        send(raw=handle.encode(), fence=fence)

A CUDA IPC handle names a whole allocation. For a tensor of torch's allocator, the receiver would also see all other
tensors of the same allocator segment, and would open each tensor separately. A slab is one allocation, which is
exported once and opened once. A `Handle` (offset, dtype, shape) names a tensor in the slab. The description of the slab
is in shared memory under the slab's name. With `device="cpu"` the memory of the slab is in shared memory too.

The sender alone knows which bytes are in use. A caller that sends handles must make sure that no receiver reads them
after `free` (the queues count credits for that). A handle of another or an earlier slab raises `StaleHandle`.

Dangers of device memory, compared with shared memory:
* The memory ends with its owner, and no process may read freed memory. So the owner must keep the memory until all
  receivers have closed their mappings. `device_queue` does so; other users of a slab must do so too.
* A device runs work later. A receiver waits for the writer's fence (an event after the writes) before a read. The
  writer waits for the receiver's fence before it reuses memory.
* A process cannot open its own IPC handle. In the owner's process `attach` finds the memory in a table.
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
_HEAD = struct.Struct("<8sQ8sI")  # magic, bytes of memory, kind, bytes of description
# Bytes for head and description. In a slab on the CPU, the memory of the slab follows.
_HEAD_BYTES = 4096

# All memory that this process owns or has opened, for `attach`. The key has the pid, because a fork copies the dict.
_memories: weakref.WeakValueDictionary[tuple[int, bytes], DeviceMemory] = weakref.WeakValueDictionary()
_memories_lock = threading.Lock()


class Slab:
    """See the module. Made by `create` (the owner) or `attach`. Close it in the process that made it."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size = segment, size
        self._memory: DeviceMemory | None = None
        self._allocated: dict[int, int] = {}  # in the owner: start -> bytes

    @classmethod
    def create(cls, name: str, size: int, *, device: str | torch.device = "cuda") -> Slab:
        """A new slab of `size` bytes. Errors: as `Segment.create`; PlatformError for a device without IPC."""
        if size < 1:
            raise ValueError(f"slab {name!r}: its size in bytes must be positive, found {size}")
        size = (size + 63) & -64
        if str(device) == "cpu":
            slab = cls(Segment.create(name, _HEAD_BYTES + size, prepare=_head_writer(HostMemory.kind, size, b"")), size)
            _ = slab.memory  # registers the memory for `attach`
            return slab
        from .slab_cuda import CudaMemory

        memory = CudaMemory.allocate(device, size)
        slab = cls(Segment.create(name, _HEAD_BYTES, prepare=_head_writer(memory.kind, size, memory.description)), size)
        with _memories_lock:
            slab._memory = _memories[os.getpid(), slab.segment.run] = memory
        return slab

    @classmethod
    def attach(cls, name: str) -> Slab:
        """The slab of another process or of this one. Errors: FileNotFoundError; TransportError for another segment."""
        segment = Segment.attach(name)
        magic, size = _HEAD.unpack_from(segment.data)[:2] if len(segment.data) >= _HEAD_BYTES else (b"", 0)
        if magic != _MAGIC:
            segment.close(unlink=False)
            raise TransportError(f"{segment.path} is no slab; its owner must make it with `Slab.create`")
        return cls(segment, size)

    @property
    def memory(self) -> DeviceMemory:
        """The memory, opened at the first access. Errors: PlatformError if opening fails; LifecycleError."""
        self._check_open()
        if self._memory is None:
            key = os.getpid(), self.segment.run
            with _memories_lock:
                # A process can open neither its own IPC handle nor the same handle twice.
                self._memory = _memories[key] = _memories.get(key) or self._open()
        return self._memory

    @property
    def opened(self) -> bool:
        """Whether the memory is mapped in this process."""
        return self._memory is not None

    def _open(self) -> DeviceMemory:
        _, size, kind, length = _HEAD.unpack_from(self.segment.data)
        kind, description = kind.rstrip(b"\0"), bytes(self.segment.data[_HEAD.size : _HEAD.size + length])
        if kind == HostMemory.kind:
            return HostMemory(self.segment, _HEAD_BYTES, size)
        from .slab_cuda import CudaMemory

        if kind != CudaMemory.kind:
            raise TransportError(
                f"{self.segment.path}: memory of kind {kind!r}; use the same asyncrl in both processes"
            )
        return CudaMemory.open(size, description)

    # -- for the owner

    def allocate(self, size: int) -> int:
        """Reserve `size` bytes until `free`; returns their start, a multiple of 64. Errors: OutOfMemory."""
        self._check_owner()
        start = first_gap(self._allocated.items(), size, self.size)
        if start is None:
            raise OutOfMemory(
                f"slab {self.segment.name!r}: no {size:,} bytes in one piece; {sum(self._allocated.values()):,} of "
                f"{self.size:,} are in use, in {len(self._allocated)} pieces; free some, or make the slab larger"
            )
        self._allocated[start] = size
        return start

    def free(self, start: int) -> None:
        """Free the bytes that `allocate` reserved at `start`. Errors: LifecycleError."""
        self._check_owner()
        if self._allocated.pop(start, None) is None:
            raise LifecycleError(f"slab {self.segment.name!r}: nothing is allocated at byte {start}; free a block once")

    def _check_owner(self) -> None:
        self._check_open()
        if not self.segment.owner:
            raise LifecycleError(
                f"slab {self.segment.name!r}: only its owner allocates and frees; this process attached"
            )

    # -- for owner and receivers

    def handle(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Handle:
        """A handle for an array at `offset` bytes. Errors: StaleHandle if the array is not inside the slab."""
        return self._check_handle(Handle(self.segment.run, offset, dtype_name(dtype), tuple(shape)))

    def view(self, handle: Handle, *, keep_alive: object = None) -> torch.Tensor:
        """The writable tensor of a handle. The tensor keeps `keep_alive` alive. Errors: StaleHandle."""
        self._check_handle(handle)
        dtype, memory = torch_dtype(handle.dtype), self.memory
        return memory.tensor(handle.offset, handle.nbytes, keep_alive).view(dtype).view(handle.shape)

    def array(self, handle: Handle, *, keep_alive: object = None) -> npt.NDArray[Any]:
        """The array of a handle in a slab on the CPU, as `view`; bfloat16 appears as uint16."""
        self._check_handle(handle)
        memory = self.memory
        assert isinstance(memory, HostMemory)
        raw = memory.bytes(handle.offset, handle.nbytes, keep_alive)
        return raw.view(numpy_dtype(handle.dtype)).reshape(handle.shape)

    def close(self) -> None:
        """Close the slab. Its memory is unmapped with its last tensor in this process. Closing twice is fine."""
        self._memory = None
        self.segment.close(unlink=True)

    def __enter__(self) -> Slab:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_handle(self, handle: Handle) -> Handle:
        self._check_open()
        if handle.run != self.segment.run:
            raise StaleHandle(
                f"the handle belongs to another slab than {self.segment.name!r}, or to an earlier slab of this name; attach to "
                "the slab of the sender"
            )
        aligned = handle.offset % numpy_dtype(handle.dtype).itemsize == 0
        if not aligned or not 0 <= handle.offset <= handle.offset + handle.nbytes <= self.size:
            raise StaleHandle(
                f"{handle.dtype} {list(handle.shape)} at byte {handle.offset} is not aligned to its items, or does not lie in the "
                f"{self.size:,} bytes of slab {self.segment.name!r}; use handles of `Slab.handle`"
            )
        return handle

    def _check_open(self) -> None:
        if self.segment.closed:
            raise LifecycleError(f"slab {self.segment.name!r} is closed")


def _head_writer(kind: bytes, size: int, description: bytes) -> Any:
    head = _HEAD.pack(_MAGIC, size, kind, len(description)) + description

    def prepare(data: memoryview) -> None:
        data[: len(head)] = head

    return prepare


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short dtype name. Errors: ValueError if torch lacks the dtype."""
    import torch

    if name == BFLOAT16:
        return torch.bfloat16
    try:
        return torch.from_numpy(np.empty(0, numpy_dtype(name))).dtype
    except (TypeError, ValueError) as error:
        raise ValueError(f"torch has no numbers of the form {name!r}; use another dtype") from error
