"""CUDA memory behind a slab: one cuMemAlloc of its own, its IPC handle, and interprocess events as fences.

The allocation comes from the driver and not from torch's allocator: an IPC handle names a whole allocation, torch's
allocator would put other tensors into it, and with `expandable_segments` its memory has no IPC handle at all. So a slab
works whatever PYTORCH_CUDA_ALLOC_CONF says. `torch.cuda.memory_allocated()` does not count it.

Sources of the rules kept here: the CUDA driver API, "Memory Management" (cuIpcGetMemHandle, cuIpcOpenMemHandle: one
context per handle and device; an exporter that frees while an importer has it open is undefined; cuIpcGetEventHandle: the
event may be recorded and waited for in either process, and has to outlive its last use in both).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...errors import OutOfMemory, PlatformError
from .device_memory import DeviceMemory

# The device's UUID as text, the IPC handle of the allocation, the owner's pid.
_DESCRIPTION = struct.Struct("<64s64sQ")
_OUT_OF_MEMORY = 2
# The driver shares whole blocks of 2 MiB: a smaller allocation would show its neighbours, too.
_GRANULE = 1 << 21
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _Handle(ctypes.Structure):
    """CUipcMemHandle: the driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class DriverError(Exception):
    """A call of the driver that failed: `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Driver:
    """The few calls of libcuda that a slab needs. Each runs in the device's primary context, which torch uses too.

    The driver destroys that context, and all memory in it, with the last reference to it. torch takes one of its own only with
    its first work on the device, so each piece of memory holds one here for as long as it is there.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Driver:
        """Errors: PlatformError where there is no driver of NVIDIA."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise PlatformError(f"CUDA memory is shared through libcuda.so.1 of NVIDIA's driver: {error}") from error

    def allocate(self, ordinal: int, size: int) -> int:
        """The address of new memory. Errors: DriverError."""
        address = ctypes.c_uint64()
        with self._context(ordinal) as keep:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            keep()
        return address.value

    def free(self, ordinal: int, address: int) -> None:
        """Waits for the device's work first (the driver does)."""
        with self._context(ordinal, last=True):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, ordinal: int, address: int) -> bytes:
        """The IPC handle of memory that `allocate` returned: 64 bytes. Errors: DriverError."""
        handle = _Handle()
        with self._context(ordinal):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return ctypes.string_at(ctypes.addressof(handle), ctypes.sizeof(handle))

    def open(self, ordinal: int, exported: bytes) -> int:
        """The address, here, of memory that another process exported. Errors: DriverError."""
        address = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(exported)
        with self._context(ordinal) as keep:
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
            keep()
        return address.value

    def close(self, ordinal: int, address: int) -> None:
        """Waits for the device's work first: a kernel may still read what is unmapped here."""
        with self._context(ordinal, last=True):
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _context(self, ordinal: int, *, last: bool = False) -> Iterator[Callable[[], None]]:
        """What is yielded takes the reference of memory that was made. `last`: give back the one of memory that goes."""
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
            if last:
                self._call("cuDevicePrimaryCtxRelease_v2", device)
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown").decode())


class CudaMemory(DeviceMemory):
    """See the module. Made by `allocate` (the owner) or `open`."""

    kind = b"cuda"

    def __init__(
        self, size: int, device: torch.device, address: int, let_go: Callable[[], None], description: bytes
    ) -> None:
        # In the owner the events live as long as the memory: whoever waits for them in another process has it mapped.
        events: dict[int, Any] = {}
        known: dict[bytes, Any] = {}
        super().__init__(size, partial(_let_go, let_go, events, known))
        self.device, self.address = device, address
        self.description = description
        self._events, self._known = events, known  # ours by slot; everybody's by handle
        self._handles: dict[int, bytes] = {}
        self._copies: torch.cuda.Stream | None = None

    @classmethod
    def allocate(cls, device: str | torch.device, size: int, driver: Driver | None = None) -> CudaMemory:
        """New memory, exported. Errors: PlatformError without CUDA or without IPC, OutOfMemory."""
        device = torch.device(device)
        check_cuda(device)
        driver = driver or Driver.load()
        index = torch.cuda.current_device() if device.index is None else device.index
        uuid = _uuid(index)
        address, handle = allocate_exported(driver, index, size)
        description = _DESCRIPTION.pack(uuid.encode(), handle, os.getpid())
        return cls(size, torch.device("cuda", index), address, partial(driver.free, index, address), description)

    @classmethod
    def open(cls, size: int, description: bytes, driver: Driver | None = None) -> CudaMemory:
        """The memory of another process. Errors: PlatformError where this one cannot see the device, or not open it."""
        raw, handle, pid = _DESCRIPTION.unpack(description)
        uuid = raw.rstrip(b"\0").decode()
        check_cuda(torch.device("cuda"))
        here = [_uuid(index) for index in range(torch.cuda.device_count())]
        if uuid not in here:
            raise PlatformError(
                f"the slab of process {pid} lies on GPU {uuid}; this process sees {', '.join(here) or 'none'}: "
                "give both the same devices (CUDA_VISIBLE_DEVICES), or move the data by torch.distributed"
            )
        index = here.index(uuid)
        driver = driver or Driver.load()
        address = open_exported(driver, index, handle, pid)
        return cls(size, torch.device("cuda", index), address, partial(driver.close, index, address), description)

    def tensor(self, offset: int, size: int, keep: object) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_CudaArrayBase(self.address + offset, size, (self, keep)), device=self.device)

    def stream(self) -> torch.cuda.Stream:
        """torch's current stream on the memory's device."""
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def writing(self) -> Iterator[torch.cuda.Stream]:
        """As `DeviceMemory.writing`: one stream of its own for all writes."""
        # All writes go through one stream, so that memory which is used again needs its reader's fence on one stream
        # only. The current stream waits for it and it for the current one, as if the copies were launched there.
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)
        copies, current = self._copies, self.stream()
        copies.wait_stream(current)
        try:
            with torch.cuda.stream(copies):
                yield copies
        finally:
            current.wait_stream(copies)

    def record(self, slot: int, stream: torch.cuda.Stream) -> bytes:
        """As `DeviceMemory.record`: the handle of an interprocess event, one event a slot."""
        event = self._events.get(slot)
        if event is None:
            with torch.cuda.device(self.device):
                event = torch.cuda.Event(interprocess=True)
                handle = event.ipc_handle()  # creates it, on the current device
            self._events[slot], self._handles[slot], self._known[handle] = event, handle, event
        event.record(stream)
        return self._handles[slot]

    def wait(self, fence: bytes, stream: torch.cuda.Stream) -> None:
        """As `DeviceMemory.wait`; an event is opened at its first use."""
        event = self._known.get(fence)
        # Once for each slot of the other side. In one process the handle is known already.
        if event is None:
            event = self._known[fence] = torch.cuda.Event.from_ipc_handle(self.device, fence)
        stream.wait_event(event)


class _CudaArrayBase:
    """Device memory for `torch.as_tensor`: the tensor keeps this object as long as its storage lives."""

    def __init__(self, address: int, size: int, keep: object) -> None:
        self._keep = keep
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "strides": None,
            "data": (address, False),
        }


def _let_go(let_go: Callable[[], None], events: dict[int, Any], known: dict[bytes, Any]) -> None:
    try:
        # Waits for the device, so no event is pending any more.
        let_go()
    finally:
        events.clear()
        known.clear()


def check_cuda(device: torch.device) -> None:
    """Errors: PlatformError where a slab on this device cannot be."""
    if device.type != "cuda":
        raise PlatformError(f"a slab lies on a CUDA device or on the CPU, not on {device}")
    if torch.version.hip is not None:
        raise PlatformError(
            f"a slab on a GPU needs NVIDIA's CUDA IPC; this torch {torch.__version__} is built for ROCm"
        )
    if not torch.cuda.is_available():
        raise PlatformError(
            f"a slab on {device} needs a CUDA device; torch {torch.__version__} sees none. On this machine use "
            'device="cpu", or a queue through shared memory'
        )


def allocate_exported(driver: Driver, ordinal: int, size: int) -> tuple[int, bytes]:
    """(address, IPC handle) of new memory. Errors: OutOfMemory, PlatformError where the platform has no CUDA IPC."""
    try:
        address = driver.allocate(ordinal, -(-size // _GRANULE) * _GRANULE)
    except DriverError as error:
        if error.code != _OUT_OF_MEMORY:
            raise PlatformError(f"no memory for a slab on cuda:{ordinal}: {error}") from error
        raise OutOfMemory(
            f"cuda:{ordinal} has no piece of {size:,} bytes for a slab ({error}); make it smaller, or free what torch "
            "keeps in its cache with torch.cuda.empty_cache()"
        ) from error
    try:
        return address, driver.export(ordinal, address)
    except DriverError as error:
        driver.free(ordinal, address)
        raise PlatformError(
            f"memory of cuda:{ordinal} cannot be shared with other processes here ({error}): CUDA IPC needs Linux on a "
            "machine of its own (not WSL, not every integrated or virtual GPU). Use a queue through shared memory, and for weights "
            "generation.placement=shared"
        ) from error


def open_exported(driver: Driver, ordinal: int, handle: bytes, pid: int) -> int:
    """Errors: PlatformError with what the driver says."""
    try:
        return driver.open(ordinal, handle)
    except DriverError as error:
        raise PlatformError(
            f"the slab of process {pid} on cuda:{ordinal} cannot be opened here ({error}): it must live, and containers "
            "must share the host's IPC and PID namespaces (docker --ipc=host --pid=host)"
        ) from error


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
