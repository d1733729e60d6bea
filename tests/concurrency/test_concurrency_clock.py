"""The virtual clock: exact jumps, one schedule, and deadlocks that name who waits."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
from virtual_time import VirtualTimeLoop, run_virtual

from asyncrl.errors import StallError


def test_hours_pass_in_no_time_and_exactly() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        stamps = []
        for delay in (0.1, 3600.0, 1e6, 1e-6):
            await asyncio.sleep(delay)
            stamps.append(loop.time())
        return stamps

    began = time.perf_counter()
    stamps = run_virtual(main)
    assert time.perf_counter() - began < 60.0
    assert stamps == [0.1, 0.1 + 3600.0, 0.1 + 3600.0 + 1e6, 0.1 + 3600.0 + 1e6 + 1e-6]


def test_timers_fire_in_order_of_time_then_of_submission() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def sleeper(name: str, delay: float) -> None:
            await anyio.sleep(delay)
            order.append(name)

        async with anyio.create_task_group() as group:
            for name, delay in [("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0)]:
                group.start_soon(sleeper, name, delay)
        return order

    assert run_virtual(main) == ["a", "b1", "b2", "c"]


def test_timeouts_work_in_virtual_time() -> None:
    async def main() -> float:
        with anyio.move_on_after(50.0) as scope:
            await anyio.sleep(100.0)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(25.0):
                await anyio.sleep_forever()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 75.0


def test_very_large_times_do_not_loop_forever() -> None:
    async def main() -> float:
        await asyncio.sleep(1e12)
        await asyncio.sleep(0.5)
        return asyncio.get_running_loop().time()

    assert run_virtual(main, start=1e9) == 1e9 + 1e12 + 0.5


def test_a_deadlock_names_the_tasks_and_what_they_await() -> None:
    async def waits_for_godot(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        event = asyncio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(waits_for_godot, event, name="vladimir")
            group.start_soon(waits_for_godot, event, name="estragon")

    with pytest.raises(StallError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "'vladimir'" in text and "'estragon'" in text and "waits_for_godot" in text and "Event.wait" in text


def test_a_deadlock_still_runs_the_cleanup_of_the_tasks() -> None:
    cleaned = []

    async def blocked() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(asyncio.get_running_loop().time())

    with pytest.raises(StallError):
        run_virtual(blocked)
    assert cleaned == [0.0]


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


def test_hundreds_of_loops_are_cheap() -> None:
    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)

    began = time.process_time()  # whatever else the machine does; some 0.2 s
    for _ in range(500):
        run_virtual(main)
    assert time.process_time() - began < 5.0


def test_a_loop_of_its_own_starts_where_it_is_told() -> None:
    loop = VirtualTimeLoop(start=41.0)
    try:
        assert loop.run_until_complete(asyncio.sleep(1.0, result="x")) == "x"
        assert loop.time() == 42.0
    finally:
        loop.close()
