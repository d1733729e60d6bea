"""The slab: memory that two processes map, with shared memory in place of a device, and the thin CUDA part's errors."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
from transport_helpers import child, finish, line, names

from asyncrl.errors import LifecycleError, OutOfMemory, PlatformError, TransportError
from asyncrl.transport.inventory import clear
from asyncrl.transport.memory import slab_cuda
from asyncrl.transport.memory.segment import Segment
from asyncrl.transport.memory.slab import Slab

OWNER = """
import sys
from asyncrl.transport.memory.slab import Slab

slab = Slab.create(sys.argv[1], 4096, device="cpu")
slab.tensor().fill_(7)
print("made", flush=True)
sys.stdin.readline()
"""


def test_everybody_has_the_same_memory_and_the_name_of_a_killed_owner_is_cleared(name: str) -> None:
    process = child(OWNER, name)
    assert line(process) == "made"
    with Slab.attach(name) as slab:
        tensor = slab.tensor()
        assert tensor.dtype == torch.uint8 and tensor.shape == (4096,) and tensor.data_ptr() % 64 == 0
        tensor[0] = 1
        with Slab.attach(name) as other:
            assert int(other.tensor().sum()) == 7 * 4095 + 1
        os.kill(process.pid, signal.SIGKILL)
        assert finish(process) == -signal.SIGKILL
        assert int(tensor.sum()) == 7 * 4095 + 1
    assert clear(name) > 0 and names(name) == []


def test_a_tensor_outlives_the_slab_and_a_closed_slab_gives_none(name: str) -> None:
    slab = Slab.create(name, 100, device="cpu")
    part = slab.tensor()[64:].view(torch.int64)
    part[0] = 5
    slab.close()
    slab.close()
    with pytest.raises(LifecycleError, match="is closed"):
        slab.tensor()
    gone = weakref.ref(slab)
    del slab
    gc.collect()
    assert part.tolist()[0] == 5 and part.shape == (8,) and gone() is None and names(name) == []


def test_another_segment_is_no_slab(name: str) -> None:
    for size in (64, 1 << 13):
        other = Segment.create(name, size)
        with pytest.raises(TransportError, match="is no slab"):
            Slab.attach(name)
        other.close(unlink=True)


class Library:
    """libcuda's calls that a slab makes, on a machine without it, by the driver's rules: a call needs a current context, an address
    has to be one of it, and the primary context goes with its last reference, and all addresses with it. `others`: references
    that somebody else holds, as torch does once it has worked on the device."""

    INVALID_VALUE, INVALID_CONTEXT = 1, 201

    def __init__(self, failing: str = "", code: int = 0, others: int = 0) -> None:
        self.calls: list[str] = []
        self.allocated, self.references, self.current = 0, others, 0
        self.addresses: set[int] = set()
        self.failing, self.code = failing, code

    def __getattr__(self, call: str) -> Any:
        def made(*arguments: Any) -> int:
            self.calls.append(call)
            if call == self.failing:
                return self.code
            return int(self._answer(call, arguments) or 0)

        return made

    def _answer(self, call: str, arguments: tuple[Any, ...]) -> int | None:
        if call == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        elif call == "cuDevicePrimaryCtxRetain":
            self.references += 1
        elif call == "cuDevicePrimaryCtxRelease_v2":
            self.references -= 1
            assert self.references >= 0, "released more often than retained"
            if self.references == 0:
                self.addresses.clear()
        elif call.startswith("cuCtxP"):
            self.current += 1 if "Push" in call else -1
        elif call not in ("cuInit", "cuDeviceGet") and self.current != 1:
            return self.INVALID_CONTEXT
        elif call == "cuMemAlloc_v2":
            arguments[0]._obj.value = 0x7000_0000
            self.addresses.add(0x7000_0000)
            self.allocated = arguments[1].value
        elif call == "cuIpcGetMemHandle":
            ctypes.memmove(ctypes.addressof(arguments[0]._obj), bytes(range(64)), 64)
            return 0 if arguments[1].value in self.addresses else self.INVALID_VALUE
        elif call == "cuIpcOpenMemHandle_v2":
            assert ctypes.string_at(ctypes.addressof(arguments[1]), 64) == bytes(range(64))
            arguments[0]._obj.value = 0x7100_0000
            self.addresses.add(0x7100_0000)
        elif call in ("cuMemFree_v2", "cuIpcCloseMemHandle"):
            if arguments[0].value not in self.addresses:
                return self.INVALID_VALUE
            self.addresses.remove(arguments[0].value)
        return 0


@pytest.mark.parametrize("others", [0, 1], ids=["torch has not worked yet", "torch holds a reference"])
def test_memory_stays_until_it_is_given_back_and_the_context_goes_with_it(others: int) -> None:
    library = Library(others=others)
    driver = slab_cuda.Driver(library)
    assert slab_cuda.allocate_exported(driver, 0, 64) == (0x7000_0000, bytes(range(64)))
    assert library.allocated == 1 << 21  # a block of its own: nothing else is shown to the other process
    assert slab_cuda.open_exported(driver, 0, bytes(range(64)), 7) == 0x7100_0000
    assert library.addresses == {0x7000_0000, 0x7100_0000} and library.references == others + 2
    driver.close(0, 0x7100_0000)
    synchronized = library.calls.index("cuCtxSynchronize")
    assert library.calls[synchronized + 1] == "cuIpcCloseMemHandle"
    assert library.addresses == {0x7000_0000} and library.references == others + 1
    driver.free(0, 0x7000_0000)
    assert library.references == others and library.current == 0 and not library.addresses


def test_refusals_of_the_driver_are_explained_and_nothing_is_held() -> None:
    library = Library("cuMemAlloc_v2", 2)
    with pytest.raises(OutOfMemory, match="no piece of 1,024 bytes"):
        slab_cuda.allocate_exported(slab_cuda.Driver(library), 0, 1024)
    assert library.references == library.current == 0
    library = Library("cuIpcGetMemHandle", 801)
    with pytest.raises(PlatformError, match=r"cannot be shared .*CUDA_ERROR_NOT_SUPPORTED \(801\).*no WSL"):
        slab_cuda.allocate_exported(slab_cuda.Driver(library), 0, 1024)
    assert library.references == library.current == 0 and not library.addresses
    with pytest.raises(PlatformError, match="slab of process 7 on cuda:0 cannot be opened here"):
        slab_cuda.open_exported(slab_cuda.Driver(Library("cuIpcOpenMemHandle_v2", 205)), 0, bytes(range(64)), 7)


def test_platforms_without_cuda_ipc_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(PlatformError, match="sees no device with CUDA"):
        slab_cuda.check_cuda()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match='on this machine use device="cpu"'):
        Slab.create(name, 64, device="cuda")
    assert names(name) == []
