"""What only the queue through shared memory does: leases, room, another process and its death."""

from __future__ import annotations

import gc
import os
import signal

import anyio
import numpy as np
import pytest
import torch
from transport_helpers import both_loops, child, finish, line, names
from transport_records import SMALL, planned, whole

from asyncrl.errors import ArenaOwned, OutOfMemory, RingDetached, TransportError
from asyncrl.transport.memory.handles import Handle
from asyncrl.transport.queues.tensor_queue import attach_queue, share_queue
from asyncrl.transport.queues.tensor_wire import handles_of, item_message, number_of
from asyncrl.transport.rings.producer import AsyncProducer
from asyncrl.transport.rings.record_ring import RecordRing

HELD = """
import asyncio, sys
import numpy as np
from asyncrl.transport.queues.tensor_queue import attach_queue, share_queue

async def receive():
    async with await attach_queue(sys.argv[1], timeout_s=300) as receiver:
        print("attached", flush=True)
        async for item in receiver:
            with item:
                print(int(item["x"].sum()), flush=True)
            if sys.argv[3:] == ["hang"]:
                await asyncio.get_running_loop().create_future()
    print("end", flush=True)

async def send():
    async with share_queue(sys.argv[1], 8, 1 << 20) as sender:
        for i in range(3):
            await sender.put({"x": np.full(1000, i)})
        print("put", flush=True)
        if sys.argv[3:] == ["hang"]:
            await asyncio.get_running_loop().create_future()

asyncio.run(receive() if sys.argv[2] == "receive" else send())
"""


@both_loops
async def test_items_are_views_of_the_slab_until_they_are_released(name: str) -> None:
    async with share_queue(name, 1, 1 << 16) as sender, await attach_queue(name) as receiver:
        source = np.arange(6, dtype=np.float16).reshape(2, 3)
        await sender.put({"x": source, "flag": np.array(True), "none": np.zeros((0, 4))})
        source[:] = 0
        item = await receiver.get()
        assert item["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and item["x"].dtype == np.float16
        assert bool(item["flag"]) and item["none"].shape == (0, 4) and item["x"].ctypes.data % 64 == 0
        with pytest.raises(anyio.WouldBlock):
            sender.put_nowait({"x": source})
        assert sender.depth == 1
        item.release()
        item.release()
        sender.put_nowait({"x": source})
        with await receiver.get():
            pass
        await sender.put({"x": source})  # hears of the release first
        assert (sender.puts, sender.depth) == (3, 1)


@both_loops
async def test_an_item_is_released_when_the_last_of_its_arrays_is_collected(name: str) -> None:
    async with share_queue(name, 1, 1 << 16) as sender, await attach_queue(name) as receiver:
        await sender.put({"x": np.arange(4), "y": np.arange(4)})
        item = await receiver.get()
        part = item["x"][1:3]
        del item
        gc.collect()
        with anyio.move_on_after(0.02) as scope:
            await sender.put({"x": np.zeros(4)})
        assert scope.cancelled_caught and part.tolist() == [1, 2]
        del part
        gc.collect()
        with anyio.fail_after(120):
            await sender.put({})
        empty = await receiver.get()
        assert dict(empty) == {}
        del empty
        gc.collect()
        with anyio.fail_after(120):
            await sender.put({"x": np.zeros(4)})


@both_loops
async def test_put_waits_for_room_and_refuses_what_can_never_fit(name: str) -> None:
    async with share_queue(name, 4, 1 << 17) as sender, await attach_queue(name) as receiver:
        big = np.zeros(80_000, np.uint8)
        await sender.put({"x": big})
        with pytest.raises(anyio.WouldBlock):  # three credits are left, room is not
            sender.put_nowait({"x": big})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.put, {"x": big})
            await anyio.wait_all_tasks_blocked()
            (await receiver.get()).release()
        (await receiver.get()).release()
        with pytest.raises(OutOfMemory, match="bytes in one piece"):
            await sender.put({"x": np.zeros(1 << 18, np.uint8)})
        with pytest.raises(ValueError, match="no place in shared memory"):
            await sender.put({"x": np.array(["text"])})
        for strange in ([1], torch.zeros(1)):
            with pytest.raises(TypeError, match=r"'x' is a (list|Tensor); expected a numpy array"):
                await sender.put({"x": strange})
        with pytest.raises(ValueError, match="bytes of handles"):
            await sender.put({f"{i}": np.zeros(1, np.uint8) for i in range(1600)})
        assert sender.depth == 0
        await sender.put({"x": big})  # nothing of the refused ones is left in the slab
        (await receiver.get()).release()


@both_loops
async def test_items_wait_for_a_receiver_and_a_second_one_is_refused(name: str) -> None:
    async with anyio.create_task_group() as tasks:

        async def later() -> None:
            async with await attach_queue(name, timeout_s=300) as receiver:
                with pytest.raises(RingDetached, match="another receiver has it"):
                    await attach_queue(name, timeout_s=0)
                assert [int(item["x"][0]) async for item in receiver] == [0, 1]

        async with share_queue(name, 2, 1 << 16, linger_s=300) as sender:
            for i in range(2):
                await sender.put({"x": np.array([i])})
            sender.close()
            tasks.start_soon(later)
        # the block ended: the items were handed over first
    with pytest.raises(TransportError, match="1 items were put and no receiver attached"):
        async with share_queue(name, 2, 1 << 16, linger_s=0.01) as sender:
            await sender.put({"x": np.zeros(1)})
    with pytest.raises(RingDetached, match="nobody shares it"):
        await attach_queue(name, timeout_s=0)
    async with share_queue(name, 2, 1 << 16):  # nothing was put: nobody has to come
        pass
    assert names(name) == []


@both_loops
async def test_a_sender_that_leaves_by_an_error_breaks_the_queue(name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with share_queue(name, 2, 1 << 16, linger_s=300) as sender:
            receiver = await attach_queue(name)
            await sender.put({"x": np.arange(3)})
            raise ZeroDivisionError
    item = await receiver.get()  # what was put is there, and stays where it is
    with pytest.raises(anyio.BrokenResourceError):
        await receiver.get()
    receiver.close()
    assert item["x"].tolist() == [0, 1, 2] and names(name) == []


@both_loops
async def test_a_release_that_the_sender_never_read_hides_nothing(name: str) -> None:
    """The sender closes while a release lies unread with it: the kernel resets the connection, what was put is still here."""
    async with share_queue(name, 4, 1 << 16) as sender:
        receiver = await attach_queue(name)
        for i in range(3):
            sender.put_nowait({"x": np.array([i])})
        receiver.get_nowait().release()  # no await from here to the end of the block: the sender cannot read it
        sender.close()
    assert [int(item["x"][0]) async for item in receiver] == [1, 2]
    receiver.close()


@both_loops
async def test_another_process_receives(name: str) -> None:
    process = child(HELD, name, "receive")
    async with share_queue(name, 2, 1 << 16, linger_s=300) as sender:
        for i in range(6):
            await sender.put({"x": np.full(100, i)})
    said = [await anyio.to_thread.run_sync(line, process) for _ in range(8)]
    assert said == ["attached", *(str(100 * i) for i in range(6)), "end"] and finish(process) == 0


@both_loops
async def test_another_process_sends_and_is_killed(name: str) -> None:
    process = child(HELD, name, "send", "hang")
    async with await attach_queue(name, timeout_s=300) as receiver:
        assert await anyio.to_thread.run_sync(line, process) == "put"
        os.kill(process.pid, signal.SIGKILL)
        got = [await receiver.get() for _ in range(3)]
        with pytest.raises(anyio.BrokenResourceError):
            await receiver.get()
        assert [int(item["x"].sum()) for item in got] == [0, 1000, 2000]
    assert finish(process) == -signal.SIGKILL and len(names(name)) == 1
    async with share_queue(name, 2, 1 << 15) as sender:  # the next sender takes the name over
        assert sender.depth == 0
    assert names(name) == []


@both_loops
async def test_a_queue_does_not_take_the_name_of_a_record_ring(name: str) -> None:
    """The ring's owner was killed: what was accepted waits for the next one."""
    ring = RecordRing(name, SMALL)
    async with ring:
        producer = await AsyncProducer.attach(name)
        await producer.put(planned(7))
        with pytest.raises(ArenaOwned):
            async with share_queue(name, 2, 1 << 16):
                raise AssertionError
        assert ring.close() is True
    with pytest.raises(
        TransportError, match=rf"queue '{name}': .* is no queue's: 1 record rings .*asyncrl shm clear {name}`"
    ):
        async with share_queue(name, 2, 1 << 16):
            raise AssertionError
    async with RecordRing(name, SMALL) as ring:
        delivery = await ring.get()
        assert delivery.record.group == 7 and whole(delivery.record)
        delivery.release()
        await producer.close()


@both_loops
async def test_a_receiver_that_is_killed_breaks_the_put_that_waits(name: str) -> None:
    process = child(HELD, name, "receive", "hang")
    async with share_queue(name, 1, 1 << 16, linger_s=300) as sender:
        assert await anyio.to_thread.run_sync(line, process) == "attached"
        await sender.put({"x": np.zeros(1)})
        await sender.put({"x": np.zeros(1)})
        with pytest.raises(anyio.BrokenResourceError):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, os.kill, process.pid, signal.SIGKILL)
                try:
                    await sender.put({"x": np.zeros(1)})
                except anyio.BrokenResourceError as error:
                    broken = error
            raise broken
        assert sender.depth == 0
    assert finish(process) == -signal.SIGKILL and names(name) == []


@both_loops
async def test_waiting_makes_no_noise(name: str) -> None:
    """A receiver and a sender that wait do not run: no polling behind the queue."""
    async with share_queue(name, 1, 1 << 16) as sender, await attach_queue(name) as receiver:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receiver.get)
            await anyio.sleep(0.05)
            before = os.times()
            await anyio.sleep(0.3)
            after = os.times()
            tasks.cancel_scope.cancel()
        assert after.user + after.system - before.user - before.system <= 0.1
        await sender.put({})
        (await receiver.get()).release()


def test_messages_name_any_number_of_tensors() -> None:
    handles = {f"t{i}": Handle(b"r" * 16, 64 * i, "<f4", (i, 2)) for i in range(100)}
    for chosen in ({}, {"x": handles["t3"]}, handles):
        message = item_message(7, chosen)
        assert number_of(message) == 7 and handles_of(message) == chosen
