"""The virtual clock: exact jumps, one schedule, and deadlocks that name who waits."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from asyncrl.errors import StallError
from asyncrl_bench.virtual_time import run_virtual


def test_time_passes_exactly_in_order_and_at_no_cost() -> None:
    """Far from zero, in steps of very different size, and as often as a property test asks."""

    async def main() -> tuple[list[str], list[float]]:
        order, stamps = list[str](), list[float]()

        async def sleeper(name: str, delay: float) -> None:
            await anyio.sleep(delay)
            order.append(name)

        async with anyio.create_task_group() as group:
            for name, delay in [("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0)]:
                group.start_soon(sleeper, name, delay)
        for delay in (1e12, 0.5):
            await asyncio.sleep(delay)
            stamps.append(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(25.0):
                await anyio.sleep_forever()
        stamps.append(asyncio.get_running_loop().time())
        return order, stamps

    began = time.process_time()
    for _ in range(100):
        assert run_virtual(main, start=41.0) == (["a", "b1", "b2", "c"], [1e12 + 44, 1e12 + 44.5, 1e12 + 69.5])
    assert time.process_time() - began < 5.0


def test_a_deadlock_names_the_tasks_and_what_they_await_and_cleans_up() -> None:
    cleaned = list[float]()

    async def waits_for_godot(event: asyncio.Event) -> None:
        try:
            await event.wait()
        finally:
            cleaned.append(asyncio.get_running_loop().time())

    async def main() -> None:
        event = asyncio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(waits_for_godot, event, name="vladimir")
            group.start_soon(waits_for_godot, event, name="estragon")

    with pytest.raises(StallError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "'vladimir'" in text and "'estragon'" in text and "waits_for_godot" in text and "Event.wait" in text
    assert cleaned == [0.0, 0.0]


def test_an_error_in_main_comes_out_and_leftover_tasks_are_cancelled() -> None:
    seen = []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            seen.append("cancelled")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            await asyncio.sleep(1)
            raise KeyError("mine")

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main)
    assert isinstance(caught.value.exceptions[0], KeyError)
    assert seen == ["cancelled"]
