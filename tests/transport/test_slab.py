"""The slab: blocks of device memory with shared memory in its place, what is refused, and the thin CUDA part's errors."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import uvloop
from transport_helpers import both_loops, child, finish, line, names, say

from asyncrl.errors import LifecycleError, OutOfMemory, PlatformError, RingDetached, StaleHandle, TransportError
from asyncrl.transport.inventory import clear
from asyncrl.transport.memory import slab_cuda
from asyncrl.transport.memory.device_memory import HostMemory
from asyncrl.transport.memory.handles import Handle
from asyncrl.transport.memory.segment import Segment
from asyncrl.transport.memory.slab import Slab, torch_dtype
from asyncrl.transport.queues import device_queue
from asyncrl.transport.queues.device_queue import attach_device_queue, share_device_queue
from asyncrl.transport.queues.tensor_queue import attach_queue, share_queue

QUEUE = """
import asyncio, gc, sys
import anyio
import torch
from asyncrl.transport.queues.device_queue import attach_device_queue, share_device_queue

async def stdin():
    return await anyio.to_thread.run_sync(sys.stdin.readline)

async def receive():
    receiver = await attach_device_queue(sys.argv[1], timeout_s=300)
    print("attached", flush=True)
    held = (await receiver.get())["x"]
    print(int(held.sum()), flush=True)
    receiver.close()
    print("closed", flush=True)
    await stdin()
    print(held.tolist(), flush=True)
    held = None
    gc.collect()
    print("let go", flush=True)
    await stdin()

async def send():
    async with share_device_queue(sys.argv[1], 8, 1 << 20, device="cpu") as sender:
        for i in range(3):
            await sender.put({"x": torch.full((1000,), i)})
        print("put", flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(receive() if sys.argv[2] == "receive" else send())
"""


def one_loop(test: Callable[[str], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """For tests whose other process takes seconds to import torch."""

    @functools.wraps(test)
    def under(name: str) -> None:
        uvloop.run(test(name))

    return under


def test_a_tensor_is_the_same_memory_for_everybody_and_strange_handles_are_refused(name: str) -> None:
    """In one process, attaching finds the memory itself; in another, the queues do it (below)."""
    with Slab.create(name, 1 << 12, device="cpu") as slab:
        one, two = slab.allocate(100), slab.allocate(3900)
        assert (one, two) == (0, 128)
        with pytest.raises(OutOfMemory, match="no 65 bytes in one piece; 4,000 of 4,096 are in use, in 2 pieces"):
            slab.allocate(65)
        slab.free(one)
        assert slab.allocate(60) == 0 and slab.allocate(60) == 64
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8, torch.complex64):
            assert slab.view(slab.handle(one, dtype, (2, 3))).dtype == dtype
        assert slab.view(slab.handle(one, torch.float32, (0, 4))).shape == (0, 4)
        handle = slab.handle(two, torch.bfloat16, (2, 3))
        raw = handle.encode()
        assert len(raw) <= 97 and Handle.decode(raw) == handle and handle.nbytes == 12
        peer = Slab.attach(name)
        assert not peer.opened
        seen = peer.view(Handle.decode(raw))
        assert (
            peer.memory is slab.memory and seen.data_ptr() == slab.view(handle).data_ptr() and seen.data_ptr() % 64 == 0
        )
        seen.fill_(1.5)
        assert slab.array(handle).tolist() == [[0x3FC0] * 3] * 2
        for refused in (lambda: peer.allocate(1), lambda: peer.free(one)):
            with pytest.raises(LifecycleError, match="only its owner allocates and frees"):
                refused()
        slab.free(two)
        with pytest.raises(LifecycleError, match="nothing is allocated at byte 128"):
            slab.free(two)
    with pytest.raises(LifecycleError, match="is closed"):
        slab.free(one)
        peer.close()
        peer.close()
        for bad in (Handle(b"x" * 16, 0, "<f4", (1,)), Handle(slab.segment.run, 0, "<f4", (32, 33))):
            with pytest.raises(StaleHandle, match=r"belongs to another slab than|does not lie"):
                slab.view(bad)
        with pytest.raises(StaleHandle, match="aligned"):
            slab.handle(2, torch.float32, (1,))
        with pytest.raises(ValueError, match="torch has no numbers"):
            torch_dtype(">i4")
    with pytest.raises(LifecycleError, match="is closed"):
        slab.view(handle)
    with pytest.raises(ValueError, match="must be positive"):
        Slab.create(name, 0, device="cpu")
    for garbage in (b"", raw[:-1], raw + b"x", b"\xff" * len(raw)):
        with pytest.raises(StaleHandle, match="no handle"):
            Handle.decode(garbage)


def test_arrays_outlive_the_slab(name: str) -> None:
    slab = Slab.create(name, 1 << 12, device="cpu")
    array = slab.array(slab.handle(slab.allocate(8), np.int64, (1,)))[:]
    array[0] = 5
    slab.close()
    gone = weakref.ref(slab)
    del slab
    gc.collect()
    assert array[0] == 5 and gone() is None


def test_a_ring_is_no_slab_and_a_dead_slab_is_cleared(name: str) -> None:
    other = Segment.create(name, 64)
    with pytest.raises(TransportError, match="is no slab"):
        Slab.attach(name)
    other.close(unlink=True)
    process = child(QUEUE, name, "send")
    assert line(process) == "put"
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL
    assert clear(name) > 0 and names(name) == []


@both_loops
async def test_items_are_tensors_that_keep_their_memory(name: str) -> None:
    async with share_device_queue(name, 1, 1 << 17, device="cpu") as sender:
        receiver = await attach_device_queue(name)
        weights = torch.arange(6, dtype=torch.bfloat16, requires_grad=True)
        frozen = np.arange(4)[::-1]
        frozen.flags.writeable = False
        await sender.put({"w": weights, "t": torch.arange(6).reshape(2, 3).T, "n": frozen, "s": np.float32([1.5])})
        item = await receiver.get()
        assert torch.equal(item["w"], weights.detach()) and item["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert item["n"].tolist() == [3, 2, 1, 0] and item["s"].dtype == torch.float32
        part = item["n"][1:3]
        del item
        gc.collect()
        with anyio.move_on_after(0.02) as scope:
            await sender.put({"w": weights})
        assert scope.cancelled_caught and part.tolist() == [2, 1]
        del part
        gc.collect()
        with anyio.fail_after(120):
            await sender.put({})
        (await receiver.get()).release()
        for bad, error, words in [
            ({"x": [1]}, TypeError, "'x' is a list"),
            ({"x": torch.zeros(1, device="meta")}, TypeError, "lies on meta"),
            ({"x": torch.eye(2).to_sparse()}, TypeError, "sparse"),
            ({"x": np.array(["text"])}, ValueError, "no place"),
            ({f"{i}": np.zeros(1, np.uint8) for i in range(1600)}, ValueError, "bytes of handles"),
            ({"x": np.zeros(1 << 18, np.uint8)}, OutOfMemory, "bytes in one piece"),
        ]:
            with pytest.raises(error, match=words):
                await sender.put(bad)
        assert sender.depth == 0
        receiver.close()


@both_loops
async def test_the_wrong_queue_is_named(name: str) -> None:
    async with share_device_queue(name, 1, 1 << 12, device="cpu"):
        with pytest.raises(TransportError, match="lie on a device; receive them with `attach_device_queue`"):
            await attach_queue(name, timeout_s=0)
    async with share_queue(name, 1, 1 << 12):
        with pytest.raises(TransportError, match="lie in shared memory; receive them with `attach_queue`"):
            await attach_device_queue(name, timeout_s=0)
    with pytest.raises(RingDetached, match="nobody shares it"):
        await attach_device_queue(name, timeout_s=0)


@both_loops
async def test_fences_order_writes_behind_reads_and_reads_behind_writes(name: str) -> None:
    """What a device would be told, in order: the memory of an item is written again only behind the fence of its release."""
    told: list[tuple[str, Any]] = []

    def record(self: HostMemory, slot: int, stream: Any) -> bytes:
        told.append(("record", slot))
        return slot.to_bytes(64, "little")

    def wait(self: HostMemory, fence: bytes, stream: Any) -> None:
        told.append(("wait", int.from_bytes(fence, "little")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "record", record)
        patch.setattr(HostMemory, "wait", wait)
        async with share_device_queue(name, 2, 1 << 12, device="cpu") as sender:
            receiver = await attach_device_queue(name)
            await sender.put({"x": torch.zeros(1)})
            await sender.put({"x": torch.zeros(1)})
            first, second = await receiver.get(), await receiver.get()
            second.release()
            first.release()
            sender.put_nowait({"x": torch.zeros(1)})
            (await receiver.get()).release()
            receiver.close()
    writes = [("record", 0), ("record", 2)]
    reads = [("wait", 0), ("wait", 2), ("record", 3), ("record", 1)]
    again, slot = told[6:9], told[8][1]
    assert told[:2] == writes and told[2:6] == reads
    assert sorted(again[:2]) == [("wait", 1), ("wait", 3)] and again[2] == ("record", slot) and slot in (0, 2)
    assert told[9:] == [("wait", slot), ("record", slot + 1)]


@both_loops
async def test_a_fence_that_died_with_its_process_breaks_the_put_and_the_get(name: str) -> None:
    async with share_device_queue(name, 1, 1 << 12, device="cpu") as sender:
        receiver = await attach_device_queue(name)
        await sender.put({"x": torch.zeros(1)})
        (await receiver.get()).release()

        def wait(self: HostMemory, fence: bytes, stream: Any) -> None:
            raise RuntimeError("invalid resource handle")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(anyio.BrokenResourceError):
            patch.setattr(HostMemory, "wait", wait)
            await sender.put({"x": torch.zeros(1)})
        receiver.close()
    async with share_device_queue(name, 1, 1 << 12, device="cpu") as sender:
        receiver = await attach_device_queue(name)
        await sender.put({"x": torch.zeros(1)})
        with pytest.MonkeyPatch.context() as patch, pytest.raises(anyio.BrokenResourceError):
            patch.setattr(HostMemory, "wait", wait)
            await receiver.get()
        receiver.close()


@one_loop
async def test_a_sender_waits_until_the_last_tensor_over_there_is_gone(name: str) -> None:
    process = child(QUEUE, name, "receive")
    refused, ended = anyio.Event(), anyio.Event()

    async def send() -> None:
        async with share_device_queue(name, 2, 1 << 16, device="cpu", linger_s=300) as sender:
            await sender.put({"x": torch.full((3,), 7)})
            assert [await anyio.to_thread.run_sync(line, process) for _ in range(3)] == ["attached", "21", "closed"]
            with pytest.raises(anyio.BrokenResourceError):  # nobody would take it
                while True:
                    await sender.put({"x": torch.zeros(1)})
            refused.set()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await refused.wait()
        with anyio.move_on_after(0.2) as scope:
            await ended.wait()
        assert scope.cancelled_caught  # the receiver closed, but holds a tensor
        say(process)
        assert await anyio.to_thread.run_sync(line, process) == "[7, 7, 7]"
        assert await anyio.to_thread.run_sync(line, process) == "let go"
        with anyio.fail_after(300):
            await ended.wait()  # before that process ends
        say(process)
    assert finish(process) == 0 and names(name) == []


@one_loop
async def test_a_sender_that_cannot_wait_keeps_the_memory(name: str) -> None:
    process = child(QUEUE, name, "receive")
    with pytest.raises(TransportError, match="the receiver did not release all"):
        async with share_device_queue(name, 2, 1 << 16, device="cpu", linger_s=0.01) as sender:
            await sender.put({"x": torch.full((3,), 7)})
            assert [await anyio.to_thread.run_sync(line, process) for _ in range(3)] == ["attached", "21", "closed"]
    assert len(device_queue._mapped_slabs) == 1
    say(process)
    assert await anyio.to_thread.run_sync(line, process) == "[7, 7, 7]"
    assert await anyio.to_thread.run_sync(line, process) == "let go"
    device_queue._free_unmapped_slabs()
    assert device_queue._mapped_slabs == []
    say(process)
    assert finish(process) == 0 and names(name) == []


@one_loop
async def test_a_sender_that_is_killed_takes_its_items_with_it(name: str) -> None:
    process = child(QUEUE, name, "send")
    receiver = await attach_device_queue(name, timeout_s=300)
    assert await anyio.to_thread.run_sync(line, process) == "put"
    with await receiver.get() as item:
        assert int(item["x"].sum()) == 0
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    with pytest.raises(anyio.BrokenResourceError):
        await receiver.get()  # two more were put: their memory is gone
    receiver.close()
    async with share_device_queue(name, 2, 1 << 12, device="cpu") as sender:  # the next one takes the name over
        assert sender.depth == 0
    assert names(name) == []


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
    with pytest.raises(PlatformError, match="on a CUDA device or on the CPU, not on mps"):
        slab_cuda.check_cuda(torch.device("mps"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(PlatformError, match="built for ROCm"):
        slab_cuda.check_cuda(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match='On this machine use device="cpu"'):
        Slab.create(name, 64, device="cuda")
    assert names(name) == []
