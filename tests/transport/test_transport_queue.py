"""The queue's contract: ends by closing, backpressure, and cancellation that loses and doubles nothing."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest
from virtual_time import run_virtual

from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue


async def test_order_and_end() -> None:
    sender: QueueSender[int]
    sender, receiver = open_queue("q", 2)
    got: list[int] = []

    async def consume() -> None:
        async for item in receiver:
            got.append(item)
        got.append(-1)

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        async with sender:
            for i in range(10):
                await sender.put(i)
    assert got == [*range(10), -1]


async def test_backpressure() -> None:
    sender: QueueSender[int]
    sender, receiver = open_queue("q", 2)
    await sender.put(0)
    await sender.put(1)
    with pytest.raises(anyio.WouldBlock):
        sender.put_nowait(2)
    with anyio.move_on_after(0.01) as scope:
        await sender.put(2)
    assert scope.cancelled_caught
    assert receiver.get_nowait() == 0
    await sender.put(3)
    assert [receiver.get_nowait(), receiver.get_nowait()] == [1, 3]
    with pytest.raises(anyio.WouldBlock):
        receiver.get_nowait()


async def test_the_last_clone_ends_the_queue_and_what_is_left_is_delivered() -> None:
    sender: QueueSender[str]
    sender, receiver = open_queue("q", 5)
    clone = sender.clone()
    await sender.put("a")
    sender.close()
    sender.close()
    await clone.put("b")
    clone.close()
    assert await receiver.get() == "a"
    assert receiver.get_nowait() == "b"
    with pytest.raises(anyio.EndOfStream):
        await receiver.get()
    with pytest.raises(anyio.ClosedResourceError):
        await sender.put("c")
    with pytest.raises(anyio.ClosedResourceError):
        sender.clone()


async def test_closing_wakes_whoever_waits() -> None:
    heard: list[str] = []

    async def getter(receiver: QueueReceiver[int]) -> None:
        with pytest.raises(anyio.EndOfStream):
            await receiver.get()
        heard.append("end")

    async def closed_getter(receiver: QueueReceiver[int]) -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await receiver.get()
        heard.append("closed getter")

    async def putter(sender: QueueSender[int]) -> None:
        with pytest.raises(anyio.BrokenResourceError):
            await sender.put(2)
        heard.append("broken")

    async with anyio.create_task_group() as group:
        s1: QueueSender[int]
        s1, r1 = open_queue("one", 1)
        group.start_soon(getter, r1)
        s2: QueueSender[int]
        s2, r2 = open_queue("two", 1)
        group.start_soon(closed_getter, r2)
        s3: QueueSender[int]
        s3, r3 = open_queue("three", 1)
        await s3.put(1)
        group.start_soon(putter, s3)
        await anyio.wait_all_tasks_blocked()
        s1.close()
        r2.close()
        r3.close()
    assert sorted(heard) == ["broken", "closed getter", "end"]
    with pytest.raises(anyio.BrokenResourceError):
        s2.put_nowait(1)


@pytest.mark.parametrize("side", ["get", "put"])
async def test_a_cancel_at_the_moment_of_the_wake_up_loses_nothing(side: str) -> None:
    sender: QueueSender[int]
    sender, receiver = open_queue("q", 1)
    async with asyncio.TaskGroup() as group:
        if side == "get":
            victim: asyncio.Task[object] = group.create_task(receiver.get())
            other: asyncio.Task[object] = group.create_task(receiver.get())
            await anyio.wait_all_tasks_blocked()
            sender.put_nowait(7)  # wakes the victim ...
            victim.cancel()  # ... which is cancelled before it runs
            assert await other == 7
        else:
            sender.put_nowait(0)
            victim = group.create_task(sender.put(1))
            other = group.create_task(sender.put(2))
            await anyio.wait_all_tasks_blocked()
            assert receiver.get_nowait() == 0
            victim.cancel()
            await other
            assert receiver.get_nowait() == 2
    assert victim.cancelled()
    s = receiver.statistics()
    assert s.depth == 0 and s.puts == s.gets and s.waiting_gets == s.waiting_puts == 0


def test_random_cancellations_deliver_exactly_what_was_put() -> None:
    """1000 schedules: an item is delivered once iff its `put` returned; producers' orders are kept."""

    def one(seed: int) -> None:
        rng = random.Random(seed)
        put: list[tuple[int, int]] = []
        got: list[tuple[int, int]] = []

        async def produce(sender: QueueSender[tuple[int, int]], who: int) -> None:
            async with sender:
                for i in range(6):
                    try:
                        async with asyncio.timeout(rng.choice([0.0, 1.0, 2.0, 50.0])):
                            await sender.put((who, i))
                            put.append((who, i))
                    except TimeoutError:
                        pass
                    await asyncio.sleep(rng.choice([0, 0, 1.0]))

        async def consume(receiver: QueueReceiver[tuple[int, int]]) -> None:
            while True:
                try:
                    async with asyncio.timeout(rng.choice([0.0, 1.0, 2.0, 50.0])):
                        got.append(await receiver.get())
                except TimeoutError:
                    pass
                except anyio.EndOfStream:
                    return
                await asyncio.sleep(rng.choice([0, 1.0, 1.0]))

        async def main() -> None:
            sender: QueueSender[tuple[int, int]]
            sender, receiver = open_queue("q", rng.choice([1, 2, 3]))
            async with anyio.create_task_group() as group:
                for who in range(3):
                    group.start_soon(produce, sender.clone(), who)
                sender.close()
                for _ in range(2):
                    group.start_soon(consume, receiver)

        run_virtual(main)
        assert sorted(got) == sorted(put)
        for who in range(3):
            mine = [i for w, i in put if w == who]
            assert mine == sorted(mine)

    for seed in range(1000):
        one(seed)


async def test_statistics_gauge_and_waits_are_recorded() -> None:
    recorder = Recorder(nvtx=False)
    sender: QueueSender[int]
    sender, receiver = open_queue("scored", 2, recorder)
    await sender.put(1)
    await sender.put(2)
    assert recorder.drain()["queue/scored/depth"] == 2
    s = sender.statistics()
    assert (s.depth, s.capacity, s.most_depth, s.puts, s.gets, s.open_senders) == (2, 2, 2, 2, 0, 1)
    async with anyio.create_task_group() as group:
        group.start_soon(sender.put, 3, name="score pump")
        await anyio.wait_all_tasks_blocked()
        (wait,) = recorder.active_waits()
        assert (wait.who, wait.what, wait.cause) == ("score pump", "room", "group")
        assert "queue scored" in wait.on
        assert sender.statistics().waiting_puts == 1
        await receiver.get()
    assert recorder.active_waits() == []


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        open_queue("q", 0)
