"""The slab on a card: two processes, one device. Skipped without CUDA; run with `pytest -m gpu`."""

from __future__ import annotations

import gc
import signal

import anyio
import pytest
import torch
from transport_helpers import line, living, own_name, say

from asyncrl.errors import OutOfMemory, PlatformError
from asyncrl.transport.memory.slab import Slab
from asyncrl.transport.memory.slab_cuda import CudaMemory
from asyncrl.transport.queues.device_queue import attach_device_queue, share_device_queue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LATE = 400_000_000  # cycles: some 0.2 s on the device, in which nobody who waits rightly may have gone on

LOOK = """
import sys
import torch
from asyncrl.transport.memory.handles import Handle
from asyncrl.transport.memory.slab import Slab

with Slab.attach(sys.argv[1]) as slab:
    handle, fence = (bytes.fromhex(sys.stdin.readline()) for _ in range(2))
    slab.memory.wait(fence, slab.memory.stream())
    tensor = slab.view(Handle.decode(handle))
    total = int(tensor.sum())
    tensor += 1
    print(total, flush=True)
    print(slab.memory.record(1, slab.memory.stream()).hex(), flush=True)
    sys.stdin.readline()
    del tensor
print("end", flush=True)
"""

QUEUE = """
import asyncio, sys
import torch
from asyncrl.transport.queues.device_queue import attach_device_queue, share_device_queue

async def receive():
    async with await attach_device_queue(sys.argv[1], timeout_s=120) as receiver:
        print("attached", flush=True)
        sums = []
        async for item in receiver:
            with item:
                torch.cuda._sleep(20_000_000)  # the release comes long before the reading
                sums.append(item["x"].sum())
            del item
            if sys.argv[3:] == ["hang"]:
                print(int(sums[0]), flush=True)
                await asyncio.get_running_loop().create_future()
        print([int(total) for total in sums], flush=True)

async def send():
    async with share_device_queue(sys.argv[1], 4, 1 << 24) as sender:
        for i in range(2):
            await sender.put({"x": torch.full((1000,), i, device="cuda")})
        print("put", flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(receive() if sys.argv[2] == "receive" else send())
"""

EXPANDABLE = """
import sys
import torch
from asyncrl.transport.memory.slab import Slab

torch.zeros(1 << 22, device="cuda")
with Slab.create(sys.argv[1], 1 << 20) as slab:
    tensor = slab.view(slab.handle(slab.allocate(64), torch.float32, (16,)))
    tensor.fill_(2)
    print(float(tensor.sum()), flush=True)
"""


name = pytest.fixture(own_name, name="name")


def test_another_process_reads_behind_the_fence(name: str) -> None:
    with Slab.create(name, 1 << 24) as slab, living(LOOK, name) as process:
        handle = slab.handle(slab.allocate(1 << 20), torch.int32, (1 << 18,))
        tensor = slab.view(handle)
        tensor.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(LATE)
        tensor.fill_(3)
        fence = slab.memory.record(0, slab.memory.stream())  # nothing of this has run yet
        say(process, handle.encode().hex())
        say(process, fence.hex())
        assert line(process) == str(3 << 18)
        slab.memory.wait(bytes.fromhex(line(process)), slab.memory.stream())  # the other process writes, too
        assert tensor.eq(4).all()
        say(process)
        assert line(process) == "end" and process.wait(60) == 0


async def test_items_cross_processes_and_memory_is_written_again_behind_its_reader(name: str) -> None:
    with living(QUEUE, name, "receive") as process:
        async with share_device_queue(name, 2, 1 << 24, linger_s=120) as sender:
            source = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
            for i in range(24):
                torch.cuda._sleep(5_000_000)
                source.fill_(i)
                await sender.put({"x": source, "host": torch.ones(3)})
                source.fill_(-1)  # after the put the tensor is the caller's again
        assert await anyio.to_thread.run_sync(line, process) == "attached"
        assert await anyio.to_thread.run_sync(line, process) == str([i << 20 for i in range(24)])
        assert process.wait(60) == 0


async def test_in_one_process_the_items_are_the_memory_itself(name: str) -> None:
    async with share_device_queue(name, 1, 1 << 20) as sender:
        receiver = await attach_device_queue(name)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # another stream than the receiver's
            torch.cuda._sleep(LATE)
            await sender.put({"w": torch.full((4, 4), 2.5, dtype=torch.bfloat16, device="cuda"), "e": torch.zeros(0)})
        with await receiver.get() as item:
            assert item["w"].dtype == torch.bfloat16 and item["w"].sum().item() == 40 and item["e"].shape == (0,)
            assert item["w"].device.type == "cuda"
        receiver.close()


async def test_a_receiver_that_is_killed_breaks_the_put(name: str) -> None:
    with living(QUEUE, name, "receive", "hang") as process:
        async with share_device_queue(name, 1, 1 << 20, linger_s=120) as sender:
            await sender.put({"x": torch.full((10,), 1, device="cuda")})
            assert await anyio.to_thread.run_sync(line, process) == "attached"
            assert await anyio.to_thread.run_sync(line, process) == "10"
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            with pytest.raises(anyio.BrokenResourceError):
                while True:
                    await sender.put({"x": torch.zeros(1, device="cuda")})
    assert torch.ones(4, device="cuda").sum().item() == 4  # the device is well


async def test_a_sender_that_is_killed_breaks_the_get(name: str) -> None:
    with living(QUEUE, name, "send") as process:
        receiver = await attach_device_queue(name, timeout_s=120)
        assert await anyio.to_thread.run_sync(line, process) == "put"
        with await receiver.get() as item:
            assert item["x"].sum().item() == 0
        del item
        torch.cuda.synchronize()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        with anyio.fail_after(60), pytest.raises(anyio.BrokenResourceError):
            while True:
                (await receiver.get()).release()
        receiver.close()
    gc.collect()
    assert torch.ones(4, device="cuda").sum().item() == 4
    async with share_device_queue(name, 1, 1 << 16):  # the next one takes the name over
        pass


def test_a_slab_works_with_expandable_segments(name: str) -> None:
    with living(EXPANDABLE, name, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as process:
        assert line(process) == "32.0"
        assert process.wait(60) == 0


def test_the_memory_goes_with_the_last_tensor_and_too_much_is_refused(name: str) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    size = 1 << 28
    before = torch.cuda.mem_get_info()[0]
    slab = Slab.create(name, size)
    tensor = slab.view(slab.handle(slab.allocate(1 << 20), torch.float32, (1 << 18,)))
    slab.close()
    gc.collect()
    tensor.fill_(1)
    assert tensor.sum().item() == 1 << 18
    assert torch.cuda.mem_get_info()[0] <= before - size
    del tensor
    gc.collect()
    assert torch.cuda.mem_get_info()[0] > before - size // 2
    with pytest.raises(OutOfMemory, match="has no piece of"):
        Slab.create(name, 2 * torch.cuda.mem_get_info()[1])


def test_the_handle_of_another_machine_or_a_dead_process_is_refused(name: str) -> None:
    memory = CudaMemory.allocate(torch.device("cuda"), 1 << 16)
    described = memory.description
    with pytest.raises(PlatformError, match="cannot be opened here"):
        CudaMemory.open(1 << 16, described[:64] + bytes(64) + described[128:])
    with pytest.raises(PlatformError, match="this process sees"):
        CudaMemory.open(1 << 16, b"GPU-elsewhere".ljust(64, b"\0") + described[64:])
