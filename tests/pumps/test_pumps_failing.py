"""A group that a step fails on: dropped by its name, once; the second one ends the run; neither comes to the next run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import Plan, make_prompt, make_trajectory

from asyncrl.errors import DataError, DivergenceError, OutOfMemory, TrainStepError


class Lease:
    def __init__(self, group: int) -> None:
        self.group, self.ended = group, 0

    def release(self) -> None:
        self.ended += 1

    def __str__(self) -> str:
        return f"group {self.group} of somebody"


def fed(groups: int, leases: list[Lease]) -> Callable[[House, object], Any]:
    async def body(house: House, supervisor: object) -> None:
        for group in range(groups):
            lease = Lease(group)
            leases.append(lease)
            size = house.plan.group_size
            given = [make_trajectory(group, m, size, [-1] * 4, reward=float(m + group)) for m in range(size)]
            await house.graph.open_intake().submit(given, make_prompt(group), [lease])

    return body


def failing(call: str, *calls: int, error: Exception | None = None, **settings: Any) -> Plan:
    """One microbatch a group."""
    fails = {(call, number): error or RuntimeError(f"call {number}") for number in calls}
    return Plan(
        **{"groups_per_step": 2, "max_staleness": 4, "tokens_per_microbatch": 8, "trainer_fails": fails} | settings
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        ("microbatch", {}),
        ("microbatch", {"preset": "sync", "max_staleness": None}),
        ("logprobs", {"updates_per_batch": 2}),
    ],
)
def test_a_group_that_a_step_fails_on_is_dropped_by_name_and_the_others_are_trained(
    call: str, settings: dict[str, Any]
) -> None:
    leases: list[Lease] = []
    notes: list[str] = []
    house = live(failing(call, 1, **settings), body=fed(5, leases), ports={"note": notes.append})

    assert house.error is None
    trained = [group for step in house.trained() for group in step]
    [lost] = set(range(5)) - set(trained)
    assert len(trained) == 4 and [lease.ended for lease in leases] == [1] * 5
    said = f"group {lost} (group {lost} of somebody) failed in the step (RuntimeError: call 1)"
    assert house.book.reasons == {f"dropped: {said}": 1} and house.books.dropped == 1
    assert notes == [f"{said}: dropped; a second one ends the run"]
    assert house.names("abort", "rollback").count("rollback") == 1 and house.book.failed == 0


def test_the_second_group_ends_the_run_with_both_names_and_neither_stays_with_its_owner() -> None:
    leases: list[Lease] = []
    house = live(failing("microbatch", 1, 2), body=fed(4, leases))

    assert type(house.error) is TrainStepError and isinstance(house.error.__cause__, RuntimeError)
    first, second = (event.groups[0] for event in house.events("microbatch")[:2])
    said = str(house.error)
    assert said.startswith(f"group {second} (group {second} of somebody) failed in the step (RuntimeError: call 2)")
    assert f"before it group {first} (group {first} of somebody) failed in the step (RuntimeError: call 1)" in said
    assert [lease.group for lease in leases if lease.ended] == [first, second]
    assert house.trained() == []


def test_of_several_ranks_none_drops_by_itself_but_the_group_is_not_replayed() -> None:
    leases: list[Lease] = []
    house = live(failing("microbatch", 1), body=fed(4, leases), ports={"ranks": 2})

    assert type(house.error) is TrainStepError and "failed in the step (RuntimeError: call 1)" in str(house.error)
    assert [lease.ended for lease in leases].count(1) == 1 and house.trained() == []


def test_of_a_round_that_fails_no_group_of_the_step_is_replayed() -> None:
    """A sharded model runs its microbatches in rounds: which group it was, nobody says."""

    async def round_(finishing: bool) -> bool:
        raise RuntimeError("no memory")

    leases: list[Lease] = []
    plan = failing("microbatch", preset="sync", max_staleness=None)
    house = live(plan, body=fed(2, leases), ports={"ranks": 2, "round": round_})

    assert type(house.error) is TrainStepError and "failed in the step (RuntimeError: no memory)" in str(house.error)
    assert [lease.ended for lease in leases] == [1, 1] and house.trained() == []


def test_what_is_not_of_a_group_ends_the_run_and_leaves_the_records() -> None:
    leases: list[Lease] = []
    house = live(failing("microbatch", 1, error=TrainStepError("the device is gone")), body=fed(2, leases))

    assert str(house.error) == "the device is gone"
    assert [lease.ended for lease in leases] == [0, 0] and house.trained() == []


@pytest.mark.parametrize(
    ("kind", "call", "settings"),
    [
        (DivergenceError, "finish", {}),
        (DataError, "finish", {}),
        (DataError, "microbatch", {"tokens_per_microbatch": 10_000, "preset": "sync", "max_staleness": None}),
        (DataError, "logprobs", {"tokens_per_microbatch": 10_000, "updates_per_batch": 2}),
        (OutOfMemory, "microbatch", {}),
    ],
)
def test_what_the_trainer_lays_to_a_group_is_laid_to_that_alone(
    kind: type[DivergenceError | DataError | OutOfMemory], call: str, settings: dict[str, Any]
) -> None:
    """Also where others are in the same microbatch."""
    leases: list[Lease] = []
    error = kind("the loss is nan")
    error.groups = (1,)
    house = live(failing(call, 1, error=error, **settings), body=fed(3, leases))

    assert house.error is None and sorted(group for step in house.trained() for group in step) == [0, 2]
    said = f"group 1 (group 1 of somebody) failed in the step ({kind.__name__}: the loss is nan)"
    assert said in str(house.book.reasons)


def test_a_gradient_that_is_not_finite_ends_the_run_and_its_step_is_not_replayed() -> None:
    leases: list[Lease] = []
    house = live(failing("finish", 1, error=DivergenceError("the norm is inf")), body=fed(4, leases))

    assert type(house.error) is DivergenceError and str(house.error) == "the norm is inf"
    assert [lease.ended for lease in leases] == [1, 1, 0, 0] and house.trained() == []


@pytest.mark.parametrize("what", ["raises", "is infinite"])
def test_an_advantage_that_cannot_be_computed_is_laid_to_its_group(what: str) -> None:
    def advantage(rewards: Any) -> Any:
        values = np.array(rewards, dtype=np.float64)
        if 1.0 not in values or 2.0 not in values:  # of any group but 1
            return values
        if what == "raises":
            raise ZeroDivisionError("no spread")
        return values * 1e300

    leases: list[Lease] = []
    house = live(Plan(groups_per_step=2, max_staleness=4, advantage=advantage), body=fed(5, leases))

    assert house.error is None and sorted(group for step in house.trained() for group in step) == [0, 2, 3, 4]
    [reason] = house.book.reasons
    assert reason.startswith("dropped: group 1 (group 1 of somebody) failed in the step")
    assert ("no spread" if what == "raises" else "beyond float32") in reason
