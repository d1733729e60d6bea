"""The queue in a process: it ends by closing, pushes back, and a cancel scope loses and doubles nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from asyncrl.telemetry.budget import lane_budget
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue


async def test_items_come_in_order_then_the_end_and_the_send_end_stays_closed() -> None:
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
    with pytest.raises(anyio.ClosedResourceError):
        await sender.put(10)
    with pytest.raises(anyio.EndOfStream):
        await receiver.get()
    receiver.close()


async def test_a_full_queue_makes_its_producer_wait() -> None:
    sender: QueueSender[int]
    sender, receiver = open_queue("q", 2)
    async with sender, receiver:
        await sender.put(0)
        await sender.put(1)
        with pytest.raises(anyio.WouldBlock):
            sender.put_nowait(2)
        with anyio.move_on_after(0.01) as scope:
            await sender.put(2)
        assert scope.cancelled_caught
        assert await receiver.get() == 0
        await sender.put(3)
        assert [await receiver.get(), await receiver.get()] == [1, 3]


async def test_closing_wakes_whoever_waits() -> None:
    heard: list[str] = []

    async def hear(what: str, call: Callable[[], Awaitable[object]], error: type[Exception]) -> None:
        with pytest.raises(error):
            await call()
        heard.append(what)

    first: tuple[QueueSender[int], QueueReceiver[int]] = open_queue("first", 1)
    second: tuple[QueueSender[int], QueueReceiver[int]] = open_queue("second", 1)
    async with anyio.create_task_group() as group:
        group.start_soon(hear, "end", first[1].get, anyio.EndOfStream)
        await second[0].put(1)
        group.start_soon(hear, "broken", lambda: second[0].put(2), anyio.BrokenResourceError)
        await anyio.wait_all_tasks_blocked()
        first[0].close()
        second[1].close()
    assert sorted(heard) == ["broken", "end"]
    with pytest.raises(anyio.BrokenResourceError):
        second[0].put_nowait(3)
    first[1].close()
    second[0].close()


@pytest.mark.parametrize("side", ["get", "put"])
async def test_a_scope_that_is_cancelled_after_the_hand_over_loses_nothing(side: str) -> None:
    sender: QueueSender[int]
    sender, receiver = open_queue("q", 1)
    kept: list[object] = []

    async def victim(call: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
        with scope:
            kept.append(await call())

    async with sender, receiver, anyio.create_task_group() as group:
        scope = anyio.CancelScope()
        if side == "put":
            sender.put_nowait(0)
        group.start_soon(victim, receiver.get if side == "get" else lambda: sender.put(7), scope)
        await anyio.wait_all_tasks_blocked()
        if side == "get":
            sender.put_nowait(7)
        else:
            assert await receiver.get() == 0
        scope.cancel()
    assert kept == [7] if side == "get" else kept == [None]


async def test_the_depth_and_who_waits_are_recorded() -> None:
    recorder = Recorder(nvtx=False)
    sender: QueueSender[int]
    sender, receiver = open_queue("scored", 2, recorder)
    async with sender, receiver, anyio.create_task_group() as group:
        await sender.put(1)
        await sender.put(2)
        assert recorder.drain()["queue/scored/depth"] == 2
        group.start_soon(sender.put, 3, name="score pump")
        await anyio.wait_all_tasks_blocked()
        [wait] = recorder.active_waits()
        assert (wait.who, wait.what, wait.cause) == ("score pump", "room", "group")
        assert wait.on == "the receiver of queue scored"
        await receiver.get()
    assert recorder.active_waits() == []


async def test_a_receiver_without_work_is_no_cause_of_idle_time() -> None:
    recorder = Recorder()
    recorder.register_lane("lane")
    receiver: QueueReceiver[int]
    sender, receiver = open_queue("scored", 1, recorder)

    async def consume() -> None:
        async with receiver:
            assert [item async for item in receiver] == []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        assert [wait.what for wait in recorder.active_waits()] == ["an item"]
        with recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
            await anyio.wait_all_tasks_blocked()
        during = lane_budget(recorder.take_window(), "lane")
        sender.close()
    assert set(during.idle) == {"slots", "unexplained"}
    assert set(lane_budget(recorder.take_window(), "lane").idle) == {"unexplained"}
