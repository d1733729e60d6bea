"""Groups from outside: backpressure, refusals, and that nobody waits for a training that has ended."""

from __future__ import annotations

import anyio
import pytest
from pumps_house import House, live
from pumps_plan import Plan, make_prompt, make_trajectory

from asyncrl.errors import DataError, LedgerError, LifecycleError


async def submit(house: House, group: int, version: int | None = None, size: int = 2) -> bool:
    version = house.trainer.version if version is None else version
    members = tuple(make_trajectory(group, member, size, [version] * 3, reward=float(member)) for member in range(size))
    return await house.graph.submit(members, make_prompt(group))


async def wait_for_version(house: House, version: int) -> None:
    while house.trainer.version < version:
        await house.ledger.wait_changed(house.ledger.changes)


def test_submitted_groups_are_trained_and_the_rest_in_a_last_smaller_step() -> None:
    async def body(house: House, supervisor: object) -> None:
        for group in range(5):
            assert await submit(house, group)

    house = live(Plan(groups_per_step=2, max_staleness=2), body=body)

    assert house.error is None
    assert house.trained() == [[0, 1], [2, 3], [4]]


def test_more_groups_of_one_version_than_can_be_trained_in_time_are_refused_at_once() -> None:
    answers: list[bool] = []

    async def body(house: House, supervisor: object) -> None:
        for group in range(6):
            answers.append(await submit(house, group, version=0))

    house = live(Plan(groups_per_step=2, max_staleness=1), body=body)

    assert house.error is None
    assert answers == [True] * 4 + [False] * 2 and house.books.trained == 4
    assert house.ports.counters["staleness/dropped"] == 2


def test_submit_waits_for_a_slot_that_comes_back_with_the_publish() -> None:
    async def body(house: House, supervisor: object) -> None:
        assert await submit(house, 0) and await submit(house, 1)
        await wait_for_version(house, 1)
        assert await submit(house, 2)  # both slots are held until the engines have version 1
        house.note("submitted", 2)

    house = live(Plan(groups_per_step=2, max_staleness=0, publish_s=lambda version, sink: 9.0), body=body)

    assert house.error is None
    assert house.events("submitted")[0].at == house.events("release")[0].at >= 9.0


@pytest.mark.parametrize("ticks", range(12))
def test_the_end_may_come_in_any_tick_after_the_start(ticks: int) -> None:
    """No wake-up is lost between the first look of the train pump and the start of its watchers."""

    async def body(house: House, supervisor: object) -> None:
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()

    house = live(Plan(), body=body)

    assert house.error is None and house.reports == []


def test_a_group_is_submitted_once_and_a_refusal_costs_no_slot() -> None:
    async def body(house: House, supervisor: object) -> None:
        assert await submit(house, 0)
        with pytest.raises(LedgerError, match="admitted twice"):
            await submit(house, 0)
        assert await submit(house, 1)
        await wait_for_version(house, 1)
        with pytest.raises(DataError, match="group 1 was submitted before"):
            await submit(house, 1)
        broken = (make_trajectory(2, 0, 2, [1], reward=0.0), make_trajectory(2, 0, 2, [1, 1], reward=0.0))
        with pytest.raises(DataError, match="member are \\[0, 0\\]"):
            await house.graph.submit(broken, make_prompt(2))

    house = live(Plan(groups_per_step=2), body=body)

    assert house.error is None
    assert house.books.trained == 2 and house.books.dropped == 0


def test_nobody_waits_for_a_slot_once_the_training_has_ended() -> None:
    """max_steps is 1 and reached, its publish takes long, five callers wait: they hear the end, and so does the next."""
    heard: list[int] = []

    async def body(house: House, supervisor: object) -> None:
        async def one(group: int) -> None:
            try:
                await submit(house, group)
            except LifecycleError as error:
                assert "the training ended" in str(error)
                heard.append(group)

        await submit(house, 0)
        await submit(house, 1)
        await wait_for_version(house, 1)
        async with anyio.create_task_group() as callers:
            for group in range(2, 7):
                callers.start_soon(one, group)
        await one(7)

    plan = Plan(groups_per_step=2, max_staleness=0, late="drop", max_steps=1, publish_s=lambda version, sink: 5.0)
    house = live(plan, body=body)

    assert house.error is None
    assert house.books.trained == 2 and heard[-1] == 7 and sorted(heard) == [2, 3, 4, 5, 6, 7]
    assert house.graph._callbacks == []


def test_a_submit_that_is_cancelled_leaves_no_trace() -> None:
    async def body(house: House, supervisor: object) -> None:
        assert await submit(house, 0) and await submit(house, 1)
        await wait_for_version(house, 1)
        with anyio.move_on_after(2.0) as impatient:
            await submit(house, 2)
        assert impatient.cancelled_caught
        assert await submit(house, 3)

    plan = Plan(groups_per_step=2, max_staleness=0, publish_s=lambda version, sink: 5.0)
    house = live(plan, body=body)

    assert house.error is None
    assert house.trained() == [[0, 1], [3]] and house.books.admitted == 3
