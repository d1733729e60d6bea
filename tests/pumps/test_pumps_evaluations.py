"""Evaluations that go on beside steps, where the engine can pin a version: what may happen meanwhile, and what waits."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from pumps_house import House, live
from pumps_plan import Plan, episode_ports, make_prompt, make_trajectory

from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.pumps.evaluate import EvaluatePump, Evaluations
from asyncrl.types import Generation, GenerationRequest


class FakePin:
    def __init__(self, version: int) -> None:
        self.version, self.over = version, anyio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        raise AssertionError("the scripted environment asks for nothing")

    def end(self) -> None:
        self.over.set()


class Workers:
    """An engine of which a part can be pinned, and its sink: two halves, the older of which is not written while it is."""

    def __init__(self, spare: bool = True, in_place: bool = False) -> None:
        """`in_place`: the optimizer step itself writes into a half."""
        self.spare, self.in_place = spare, in_place
        self.house: House | None = None
        self.pins: list[FakePin] = []
        self.version = 0

    async def pin(self, version: int) -> FakePin | None:
        assert self.version == version, "all are there"
        assert all(pin.over.is_set() for pin in self.pins), "one at a time"
        if self.spare:
            self.pins.append(FakePin(version))
        return self.pins[-1] if self.spare else None

    async def generate(self, request: GenerationRequest) -> Generation:
        raise AssertionError("nor of the engine")

    def statistics(self) -> dict[str, float]:
        return {}

    async def update_weights(self, version: int) -> None:
        assert self.house is not None
        await self._leave()
        for replica in self.house.sinks:
            await replica.update_weights(version)
        self.version = version

    async def settled(self) -> None:
        if self.in_place:
            await self._leave()

    async def _leave(self) -> None:
        if self.pins and self.pins[-1].version < self.version:
            await self.pins[-1].over.wait()


def beside(plan: Plan, workers: Workers, embedded: Any = None, **given: Any) -> House:
    async def body(house: House, supervisor: Supervisor) -> None:
        workers.house, house.pinned = house, True
        if embedded is not None:
            return await embedded(house)
        await house.graph.run(supervisor)

    return live(plan, body=body, ports={"engine": workers, "sinks": [workers]}, **given)


def at(house: House, what: str) -> dict[int, float]:
    return {event.version: event.at for event in house.events(what)}


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_steps_go_on_beside_an_evaluation_until_they_need_its_half(in_place: bool) -> None:
    """Evaluations are 20 times as long as a step."""
    plan = Plan(groups_per_step=2, max_steps=6, held_out=3, evaluate_every=2, evaluation_s=20.0)
    workers = Workers(in_place=in_place)

    house = beside(plan, workers)

    assert house.error is None and [pin.version for pin in workers.pins] == [2, 4]
    assert sorted(house.evaluations) == [0, 2, 4, 6]
    finished, evaluated, taken = at(house, "finished"), at(house, "evaluated"), at(house, "weights taken")
    released = at(house, "release")
    for version in (2, 4):
        assert released[version - 1] <= taken[version + 1] <= released[version] < evaluated[version]
        assert (finished[version + 2] < evaluated[version]) == (not in_place)
        assert taken[version + 2] >= evaluated[version], "the half of the evaluation was written"
    assert finished[1] >= evaluated[0] and finished[6] <= evaluated[6], "before the first step, and after the last"
    assert [event.version for event in house.events("told")] == list(range(7))


@pytest.mark.parametrize(
    ("evaluated", "version", "owed", "owed_at_the_end"),
    [
        (-1, 3, True, True),  # one of an earlier release, or `evaluate.every` is new
        (0, 3, False, True),
        (0, 4, True, True),  # stopped during the evaluation of 4
        (0, 5, True, True),  # or beside it, a step later
        (4, 5, False, True),
        (4, 7, False, True),
        (4, 8, True, True),
        (8, 8, False, False),
        (9, 9, False, False),  # it was the last one before
        (9, 12, True, True),
    ],
)
def test_which_evaluation_is_owed(evaluated: int, version: int, owed: bool, owed_at_the_end: bool) -> None:
    """Of those at every fourth version; the newest one that was made is known."""
    engine: Any = Workers()
    ports = episode_ports(None, None, held_out=1, evaluate_every=4)
    evaluations = Evaluations(EvaluatePump(ports, [], "", evaluated), engine, anyio.sleep_forever)
    assert (evaluations.owes(version, last=False), evaluations.owes(version, last=True)) == (owed, owed_at_the_end)
    assert not Evaluations(None, engine, anyio.sleep_forever).owes(version, last=True)


def test_without_a_part_to_spare_the_next_step_waits() -> None:
    plan = Plan(groups_per_step=2, max_steps=4, held_out=2, evaluate_every=2, evaluation_s=20.0)

    house = beside(plan, Workers(spare=False))

    finished, evaluated = at(house, "finished"), at(house, "evaluated")
    assert finished[3] >= evaluated[2] and sorted(evaluated) == [0, 2, 4]


def test_the_next_evaluation_waits_for_the_one_that_runs() -> None:
    plan = Plan(groups_per_step=2, max_steps=4, held_out=2, evaluate_every=1, evaluation_s=20.0)
    workers = Workers()

    house = beside(plan, workers)

    assert [pin.version for pin in workers.pins] == [1, 2, 3] and sorted(house.evaluations) == [0, 1, 2, 3, 4]
    marks = [e for e in house.log if e.what == "evaluated" or (e.what == "rollout starts" and e.groups[0] < 0)]
    assert [mark.what for mark in marks] == ["rollout starts", "rollout starts", "evaluated"] * 5
    finished, evaluated = at(house, "finished"), at(house, "evaluated")
    assert finished[2] < evaluated[1] and finished[3] < evaluated[2]


def test_with_an_interval_of_the_hand_over_the_steps_between_need_no_half() -> None:
    plan = Plan(
        rollout={"weight_sync_interval": 3, "max_staleness": 5},
        groups_per_step=2,
        max_steps=8,
        held_out=1,
        evaluate_every=4,
        evaluation_s=60.0,
    )
    workers = Workers()

    house = beside(plan, workers)

    assert house.error is None and [pin.version for pin in workers.pins] == [4]
    finished, evaluated = at(house, "finished"), at(house, "evaluated")
    assert finished[7] < evaluated[4] and sorted(evaluated) == [0, 4, 8]
    assert [event.version for event in house.events("told")] == list(range(9))


def test_a_loop_of_ones_own_is_evaluated_before_its_first_step_and_after_its_last() -> None:
    """Nobody knew that the third one is the last. Steps wait for the first evaluation, though their groups do not."""
    plan = Plan(groups_per_step=2, held_out=2, evaluate_every=2, evaluation_s=20.0)
    workers = Workers()

    async def embedded(house: House) -> None:
        for group in range(6):
            members = [make_trajectory(group, member, 2, [0] * 4, float(member)) for member in range(2)]
            await house.graph.submit(members, make_prompt(group))
        while len(house.reports) < 3:  # noqa: ASYNC110  in virtual time
            await anyio.sleep(0.1)
        assert sorted(house.evaluations) == [0] and house.graph.evaluating == (0, 2)
        assert [event.version for event in house.events("told")] == [0, 1]

    house = beside(plan, workers, embedded)

    assert house.error is None and sorted(house.evaluations) == [0, 2, 3]
    assert at(house, "finished")[1] >= at(house, "evaluated")[0] and house.graph.evaluating is None
    assert [event.version for event in house.events("told")] == [
        0,
        1,
        2,
        3,
        3,
    ]  # the evaluation goes into the line of 3


def test_an_evaluation_that_fails_ends_the_run_and_the_pin() -> None:
    plan = Plan(
        groups_per_step=2,
        max_steps=6,
        held_out=2,
        evaluate_every=2,
        evaluation_s=3.0,
        reward_fails=lambda group, member: RuntimeError("held out") if group == -2 and workers.pins else None,
    )
    workers = Workers()

    house = beside(plan, workers)

    assert isinstance(house.error, RuntimeError) and "held out" in str(house.error)
    assert sorted(house.evaluations) == [0] and workers.pins[0].over.is_set()
    assert [event.version for event in house.events("told")] == [0, 1]  # the line of its version is written at the end


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
def test_cancelled_at_any_moment_the_books_add_up_and_lines_are_in_order(native: bool) -> None:
    plan = Plan(groups_per_step=2, max_steps=4, held_out=2, evaluate_every=2, evaluation_s=3.0)
    length = beside(plan, Workers()).ticks
    inside = 0
    for tick in range(1 + native, length + 1, 2):
        workers = Workers()
        house = beside(plan, workers, cancel_at_tick=tick, native_cancel=native)
        assert house.error is None or isinstance(house.error, asyncio.CancelledError), (tick, house.error)
        told = [event.version for event in house.events("told")]
        assert told == list(range(len(told))), (tick, told)
        inside += bool(workers.pins) and 2 not in house.evaluations
    assert inside > 10, "few were cancelled during the evaluation"
