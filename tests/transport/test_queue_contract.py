"""One contract for every queue of tensors: through shared memory, and through a slab. asyncio and uvloop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio
import numpy as np
import pytest
import torch
import uvloop

from asyncrl.transport.queues.device_queue import attach_device_queue, share_device_queue
from asyncrl.transport.queues.tensor_queue import TensorReceiver, TensorSender, attach_queue, share_queue

Ends: TypeAlias = tuple[Any, Any]  # TensorSender, TensorReceiver
Open: TypeAlias = Callable[..., AbstractAsyncContextManager[Ends]]


@asynccontextmanager
async def through_shared_memory(name: str, capacity: int) -> AsyncIterator[Ends]:
    async with share_queue(name, capacity, 1 << 20) as sender:
        receiver = await attach_queue(name, timeout_s=0)
        yield sender, receiver
        receiver.close()


@asynccontextmanager
async def through_a_slab(name: str, capacity: int, *, device: str = "cpu") -> AsyncIterator[Ends]:
    """The queue for CUDA tensors, with shared memory in the device's place."""
    async with share_device_queue(name, capacity, 1 << 20, device=device) as sender:
        receiver = await attach_device_queue(name, timeout_s=0)
        yield sender, receiver
        receiver.close()


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
QUEUES = [
    pytest.param(through_shared_memory, id="shared memory"),
    pytest.param(through_a_slab, id="slab"),
    pytest.param(partial(through_a_slab, device="cuda"), id="CUDA", marks=GPU),
]


def contract(test: Callable[[Open, str], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Against every queue, under every loop."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    @pytest.mark.parametrize("queue", QUEUES)
    def under(name: str, queue: Open, run: Callable[..., Any]) -> None:
        async def bounded() -> None:
            with anyio.fail_after(300):
                await test(queue, name)

        run(bounded())

    under.__name__, under.__doc__ = test.__name__, test.__doc__
    return under


def item(number: int) -> dict[str, np.ndarray]:
    return {"number": np.array([number]), "tokens": np.full((number % 5, 3), number, np.int32)}


def number(received: Any) -> int:
    """The number of a whole item, which is then released."""
    found = int(received["number"][0])
    assert {name: array.tolist() for name, array in received.items()} == {k: v.tolist() for k, v in item(found).items()}
    release = getattr(received, "release", None)
    if release is not None:
        release()
    return found


@contract
async def test_items_arrive_whole_and_in_order_until_the_sender_is_closed(queue: Open, name: str) -> None:
    got: list[int] = []

    async def consume(receiver: TensorReceiver) -> None:
        async for received in receiver:
            got.append(number(received))
        got.append(-1)

    async with queue(name, 3) as (sender, receiver), anyio.create_task_group() as tasks:
        tasks.start_soon(consume, receiver)
        for i in range(10):
            await sender.put(item(i))
        sender.close()
        sender.close()
    assert got == [*range(10), -1]


@contract
async def test_what_was_put_before_the_end_is_delivered_and_then_the_end_stays(queue: Open, name: str) -> None:
    async with queue(name, 3) as (sender, receiver):
        await sender.put(item(1))
        sender.put_nowait(item(2))
        sender.close()
        assert [number(await receiver.get()), number(receiver.get_nowait())] == [1, 2]
        for _ in range(2):
            with pytest.raises(anyio.EndOfStream):
                await receiver.get()
            with pytest.raises(anyio.EndOfStream):
                receiver.get_nowait()
        with pytest.raises(anyio.ClosedResourceError):
            await sender.put(item(3))
        with pytest.raises(anyio.ClosedResourceError):
            sender.put_nowait(item(3))


@contract
async def test_credits_bound_what_is_under_way(queue: Open, name: str) -> None:
    async with queue(name, 2) as (sender, receiver):
        with pytest.raises(anyio.WouldBlock):
            receiver.get_nowait()
        await sender.put(item(0))
        await sender.put(item(1))
        with pytest.raises(anyio.WouldBlock):
            sender.put_nowait(item(2))
        with anyio.move_on_after(0.01) as scope:
            await sender.put(item(2))
        assert scope.cancelled_caught
        assert number(receiver.get_nowait()) == 0
        await sender.put(item(3))
        assert [number(receiver.get_nowait()), number(await receiver.get())] == [1, 3]
        assert (sender.puts, sender.capacity, receiver.capacity) == (3, 2, 2)


@contract
async def test_closing_wakes_whoever_waits(queue: Open, name: str) -> None:
    heard: list[str] = []

    async def hear(what: str, call: Callable[[], Any], error: type[BaseException]) -> None:
        with pytest.raises(error):
            await call()
        heard.append(what)

    for end in ("closed put", "broken put"):
        async with queue(name, 1) as (sender, receiver), anyio.create_task_group() as tasks:
            await sender.put(item(0))
            error = anyio.ClosedResourceError if end == "closed put" else anyio.BrokenResourceError
            tasks.start_soon(hear, end, partial(sender.put, item(1)), error)
            await anyio.wait_all_tasks_blocked()
            (sender if end == "closed put" else receiver).close()
    async with queue(name, 1) as (_, receiver), anyio.create_task_group() as tasks:
        tasks.start_soon(hear, "closed get", receiver.get, anyio.ClosedResourceError)
        await anyio.wait_all_tasks_blocked()
        receiver.close()
        with pytest.raises(anyio.ClosedResourceError):
            await receiver.get()
    async with queue(name, 1) as (sender, receiver), anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(hear, "ended get", receiver.get, anyio.EndOfStream)
        await anyio.wait_all_tasks_blocked()
        sender.close()
    assert sorted(heard) == ["broken put", "closed get", "closed put", "ended get", "ended get"]


@contract
async def test_a_cancel_at_the_moment_of_the_wake_up_loses_nothing(queue: Open, name: str) -> None:
    async with queue(name, 1) as (sender, receiver), asyncio.TaskGroup() as tasks:
        victim: asyncio.Task[Any] = tasks.create_task(receiver.get())
        other: asyncio.Task[Any] = tasks.create_task(receiver.get())
        await anyio.wait_all_tasks_blocked()
        sender.put_nowait(item(7))
        victim.cancel()
        assert number(await other) == 7
        sender.put_nowait(item(0))
        victim = tasks.create_task(sender.put(item(1)))
        other = tasks.create_task(sender.put(item(2)))
        await anyio.wait_all_tasks_blocked()
        assert number(receiver.get_nowait()) == 0
        victim.cancel()
        await other
        assert number(await receiver.get()) == 2
        with pytest.raises(anyio.WouldBlock):
            receiver.get_nowait()


@contract
async def test_random_cancellations_deliver_exactly_what_was_put(queue: Open, name: str) -> None:
    """An item is delivered once iff its `put` returned; each producer's order is kept. Native cancels, at any await."""
    for seed in range(15):
        rng = random.Random(seed)
        put: list[int] = []
        got: list[int] = []

        async def until_the_end(call: Callable[[], Any]) -> Any:
            try:
                return await call()
            except anyio.EndOfStream:
                return anyio.EndOfStream

        async def patiently(call: Callable[[], Any], rng: random.Random) -> Any:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(until_the_end(call))
                for _ in range(rng.choice([0, 1, 2, 3, 1000])):
                    if task.done():
                        break
                    await asyncio.sleep(0)
                task.cancel()
            return None if task.cancelled() else task

        async def produce(sender: TensorSender, who: int, rng: random.Random, put: list[int]) -> None:
            for i in range(6):
                if await patiently(partial(sender.put, item(10 * who + i)), rng) is not None:
                    put.append(10 * who + i)

        async def consume(receiver: TensorReceiver, rng: random.Random, got: list[int]) -> None:
            while True:
                task = await patiently(receiver.get, rng)
                if task is not None and task.result() is anyio.EndOfStream:
                    return
                if task is not None:
                    got.append(number(task.result()))

        async with queue(f"{name}.{seed}", rng.choice([1, 2, 3])) as (sender, receiver):
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(consume, receiver, rng, got)
                async with anyio.create_task_group() as producers:
                    for who in range(3):
                        producers.start_soon(produce, sender, who, rng, put)
                sender.close()
        assert sorted(got) == sorted(put) and put
        for who in range(3):
            mine = [n for n in put if n // 10 == who]
            assert mine == sorted(mine)
