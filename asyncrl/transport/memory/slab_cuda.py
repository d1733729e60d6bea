"""CUDA memory of a slab: one allocation of cuMemAlloc, and its IPC handle.

The allocation comes from the driver and not from torch's allocator, for two reasons. An IPC handle names a whole
allocation, and torch's allocator would put other tensors into the allocation. With `expandable_segments` torch's memory
has no IPC handle at all. torch's memory statistics omit slabs.

Rules of the CUDA driver API ("Memory Management", cuIpcGetMemHandle and cuIpcOpenMemHandle): a process may open a handle in
only one context per device. If the exporter frees memory that an importer has open, the result is undefined.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...errors import OutOfMemory, PlatformError

_DESCRIPTION = struct.Struct("<64s64sQ")  # UUID of the device as text, IPC handle, pid of the owner
_OUT_OF_MEMORY = 2
# The driver exports whole blocks of 2 MiB: the export of a smaller allocation would also export its neighbours.
_SHARED_BLOCK = 1 << 21
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
# All slab memory of this process, by (pid, description): a process cannot open its own IPC handle, and maps each handle only once.
# The pid keeps a forked child, which inherits this dictionary, from using the parent's mappings.
_memories: weakref.WeakValueDictionary[tuple[int, bytes], CudaMemory] = weakref.WeakValueDictionary()


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class DriverError(Exception):
    """A driver call failed. `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Driver:
    """The calls of libcuda that a slab needs. Each call runs in the device's primary context, which torch uses too.

    When the last reference to the context is dropped, the driver destroys the context and its memory. torch takes a reference
    only with its first work on the device. So each allocation and each mapping of a slab holds a reference, too.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Driver:
        """Load libcuda.so.1. Errors: PlatformError without NVIDIA's driver."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise PlatformError(
                f"a slab on a GPU needs libcuda.so.1 of NVIDIA's driver: {error}; install the driver, or use the CPU"
            ) from error

    def allocate(self, ordinal: int, size: int) -> int:
        """The address of new memory of `size` bytes. Errors: DriverError."""
        address = ctypes.c_uint64()
        with self._context(ordinal) as retain:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            retain()
        return address.value

    def free(self, ordinal: int, address: int) -> None:
        """Free memory that `allocate` returned. The driver first waits for the work of the device."""
        with self._context(ordinal, ends_memory=True):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, ordinal: int, address: int) -> bytes:
        """The IPC handle (64 bytes) of memory that `allocate` returned. Errors: DriverError."""
        handle = _Handle()
        with self._context(ordinal):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return ctypes.string_at(ctypes.addressof(handle), ctypes.sizeof(handle))

    def open(self, ordinal: int, exported: bytes) -> int:
        """The address in this process of memory that another process exported. Errors: DriverError."""
        address = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(exported)
        with self._context(ordinal) as retain:
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
            retain()
        return address.value

    def close(self, ordinal: int, address: int) -> None:
        """Unmap memory that `open` mapped. First waits for the device, because a kernel may still read the memory."""
        with self._context(ordinal, ends_memory=True):
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _context(self, ordinal: int, *, ends_memory: bool = False) -> Iterator[Callable[[], None]]:
        """Make the primary context current. The body calls the yielded function to take a reference for new memory. `ends_memory`:
        the body frees or unmaps memory, so drop the reference of that memory afterwards."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))

        def retain() -> None:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)

        retain()
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield retain
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
            if ends_memory:
                self._call("cuDevicePrimaryCtxRelease_v2", device)
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown").decode())


class CudaMemory:
    """The owner calls `allocate`, others call `open`. When no tensor or slab uses the memory any more, it is freed or unmapped."""

    def __init__(
        self, size: int, device: torch.device, address: int, unmap: Callable[[], None], description: bytes
    ) -> None:
        self.size, self.device, self.address, self.description = size, device, address, description
        weakref.finalize(self, unmap).atexit = False
        _memories[os.getpid(), description] = self

    @classmethod
    def allocate(cls, device: str | torch.device, size: int) -> CudaMemory:
        """New memory with an IPC handle. Errors: PlatformError without CUDA or IPC, OutOfMemory."""
        device = torch.device(device)
        check_cuda()
        driver = Driver.load()
        index = torch.cuda.current_device() if device.index is None else device.index
        uuid = _uuid(index)
        address, handle = allocate_exported(driver, index, size)
        description = _DESCRIPTION.pack(uuid.encode(), handle, os.getpid())
        return cls(size, torch.device("cuda", index), address, partial(driver.free, index, address), description)

    @classmethod
    def open(cls, size: int, description: bytes) -> CudaMemory:
        """The memory of the owner's `description`. Errors: PlatformError if its device is invisible here, or the driver refuses."""
        existing = _memories.get((os.getpid(), description))
        if existing is not None:
            return existing
        raw, handle, pid = _DESCRIPTION.unpack(description)
        uuid = raw.rstrip(b"\0").decode()
        check_cuda()
        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        if uuid not in visible:
            raise PlatformError(
                f"the slab of process {pid} is on GPU {uuid}; this process sees {', '.join(visible) or 'none'}: "
                "give both processes the same devices (CUDA_VISIBLE_DEVICES), or move the data by torch.distributed"
            )
        index = visible.index(uuid)
        driver = Driver.load()
        address = open_exported(driver, index, handle, pid)
        return cls(size, torch.device("cuda", index), address, partial(driver.close, index, address), description)

    def tensor(self) -> torch.Tensor:
        """All bytes as a flat uint8 tensor, which keeps the memory mapped."""
        return torch.as_tensor(_CudaArrayBase(self), device=self.device)


class _CudaArrayBase:
    """Device memory for `torch.as_tensor`. The storage of the tensor keeps this object, and so the memory, alive."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        shape, data = (memory.size,), (memory.address, False)
        self.__cuda_array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "strides": None, "data": data}


def check_cuda() -> None:
    """Errors: PlatformError if this process cannot have a slab on a GPU."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        raise PlatformError(
            f"a slab on a GPU needs NVIDIA's CUDA IPC, and torch {torch.__version__} sees no device with CUDA; on this machine use "
            'device="cpu"'
        )


def allocate_exported(driver: Driver, ordinal: int, size: int) -> tuple[int, bytes]:
    """(address, IPC handle) of new memory. Errors: OutOfMemory, PlatformError on a platform without CUDA IPC."""
    try:
        address = driver.allocate(ordinal, -(-size // _SHARED_BLOCK) * _SHARED_BLOCK)
    except DriverError as error:
        if error.code != _OUT_OF_MEMORY:
            raise PlatformError(
                f"a slab on cuda:{ordinal} got no memory from the driver: {error}; try another device"
            ) from error
        raise OutOfMemory(
            f"cuda:{ordinal} has no piece of {size:,} bytes for a slab ({error}); make the slab smaller, or free the cache of "
            "torch with torch.cuda.empty_cache()"
        ) from error
    try:
        return address, driver.export(ordinal, address)
    except DriverError as error:
        driver.free(ordinal, address)
        raise PlatformError(
            f"memory of cuda:{ordinal} cannot be shared with other processes here ({error}): CUDA IPC needs native "
            "Linux (no WSL), and some integrated and virtual GPUs lack it. Use generation.placement=shared"
        ) from error


def open_exported(driver: Driver, ordinal: int, handle: bytes, pid: int) -> int:
    """The address of exported memory in this process. Errors: PlatformError with the driver's message."""
    try:
        return driver.open(ordinal, handle)
    except DriverError as error:
        raise PlatformError(
            f"the slab of process {pid} on cuda:{ordinal} cannot be opened here ({error}): that process must live, and "
            "containers must share the host's IPC and PID namespaces (docker --ipc=host --pid=host)"
        ) from error


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
