"""What fails, who pays for it and what the error says: one group, a step, or the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import Lease, Plan, make_prompt, make_trajectory

from asyncrl.data.store import Store
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.errors import (
    DataError,
    DivergenceError,
    OutOfMemory,
    RewardCrash,
    RewardError,
    RewardTimeout,
    TrainStepError,
)
from asyncrl.pumps.book import MAX_REASONS, OTHER_REASON, GroupBook
from asyncrl.pumps.intake import ScorePump
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import open_queue
from asyncrl.types import Group


def test_a_failed_group_gives_back_one_slot_whatever_fails_after_it() -> None:
    """All members of group 1 fail, at different times. One slot comes back, at the first failure, and is used again."""
    plan = Plan(
        groups_per_step=2,
        group_size=4,
        max_staleness=0,
        max_failed_groups=1,
        prompts=5,
        rollout_s=lambda group, member: 1.0 + member if group == 1 else 10.0,
        fails=lambda group, member: ValueError(f"member {member}") if group == 1 else None,
    )
    house = live(plan)
    assert house.error is None
    [failed] = house.events("failed")
    assert failed.groups == (1,) and failed.at == pytest.approx(1.0)
    assert [event.at for event in house.events("admit") if event.groups == (2,)] == [failed.at]
    assert house.books.failed == 1 and house.books.trained == 4
    assert house.book.reasons == {"failed: ValueError: member #": 1}


async def test_reasons_of_their_own_for_each_failed_group_are_bounded() -> None:
    """Each would be a metric, a curve of the report and a line at the end."""
    recorder = Recorder(max_events=0)
    ledger = LocalLedger(Reservation(1, 0), recorder)
    book = GroupBook(ledger, Store())
    for group in range(200):
        ticket = await ledger.admit(group)
        assert ticket is not None
        book.add(ticket)
        await book.end(group, "failed", "a reason of all" if group < 10 else f"id {group}")
    assert len(book.reasons) == MAX_REASONS + 1 and book.reasons.total() == 200
    assert [book.reasons[f"failed: {each}"] for each in ("a reason of all", OTHER_REASON)] == [10, 191 - MAX_REASONS]
    counted = {name: count for name, count in recorder.drain().items() if name.startswith("groups/failed/")}
    assert len(counted) == MAX_REASONS + 1 and sum(counted.values()) == 200


def test_groups_that_can_never_be_whole_are_dropped_when_the_rollouts_end() -> None:
    """A scorer that hears the end of the rollouts with half a group in the stash: counted, its slot released, no hang."""

    async def body(house: House, supervisor: object) -> None:
        ports = house.ports
        scoring_in, scoring_out = open_queue("scoring", 4)
        for group, members in ((0, 2), (1, 1)):
            ticket = await ports.ledger.admit(group)
            assert ticket is not None
            ports.book.add(ticket)
            for member in range(members):
                trajectory = make_trajectory(group, member, 2, [0])
                await scoring_in.put(Group(ticket, make_prompt(group), (trajectory,)))
        scoring_in.close()
        await ScorePump(house.graph.intake, scoring_out, calls=1).run()
        assert house.books.live + house.books.claimed == 1 and house.books.dropped == 1

    house = live(Plan(), body=body)
    assert house.error is None and house.trained() == [[0]]
    assert house.book.reasons["dropped: incomplete at the end of the rollouts"] == 1


@pytest.mark.parametrize("where", ["advantage", "logprobs", "begin"])
def test_a_failure_before_begin_leaves_no_open_step(where: str) -> None:
    def broken(rewards: object) -> object:
        raise ZeroDivisionError("no estimator")

    no_pass = {("logprobs", call): ZeroDivisionError("no pass") for call in (1, 2)}
    plan = {
        "advantage": Plan(prompts=4, advantage=broken),
        "logprobs": Plan(prompts=4, updates_per_batch=2, trainer_fails=no_pass),
        "begin": Plan(prompts=4, trainer_fails={("begin", 1): ZeroDivisionError("no step")}),
    }[where]
    house = live(plan)
    error = house.error if where == "begin" else house.error and house.error.__cause__  # of the second group
    assert isinstance(error, ZeroDivisionError)
    assert house.events("microbatch", "finish", "commit", "clear") == []
    assert house.events("rollback") and house.trainer.version == 0
    assert bool(house.events("abort")) == (where == "begin")  # where begin was not called there is nothing to abort


def test_a_failed_weight_update_ends_the_run_and_its_step_stays_unreleased() -> None:
    house = live(Plan(prompts=20, publish_fails={2: ConnectionError("an engine is gone")}))
    assert isinstance(house.error, ConnectionError)
    assert any("training" in note for note in house.error.__notes__)
    assert [event.version for event in house.events("release")] == [0]
    assert house.books.held >= 2  # of the step that no engine acknowledged


@pytest.mark.parametrize("kind", [RewardError, RewardTimeout, RewardCrash])
def test_a_failed_reward_ends_the_run_with_that_error(kind: type[RewardError]) -> None:
    plan = Plan(
        prompts=20,
        group_size=4,
        workers=1,
        reward_s=lambda group, member: 0.5,
        max_failed_groups=100,  # these are for environments: a reward has a policy of its own
        reward_fails=lambda group, member: kind("accuracy: division by zero") if group == 5 else None,
    )
    house = live(plan)
    assert type(house.error) is kind and "accuracy" in str(house.error)
    assert house.books.failed == 0, "the groups that waited for a scorer are not to blame"


def test_members_without_a_reward_are_trained_with_advantage_zero() -> None:
    """Policy `none`: the component does not apply, here to a whole group and to a single member."""
    plan = Plan(
        groups_per_step=2,
        group_size=3,
        prompts=2,
        reward=lambda group, member: None if group == 0 or member == 1 else float(member),
    )
    house = live(plan)
    assert house.error is None
    advantages = house.reports[0].advantages
    assert advantages[0].tolist() == [0, 0, 0]
    assert advantages[1][1] == 0 and advantages[1][0] == -advantages[1][2] != 0


# -- a group that a step fails on: dropped by its name once; the second one ends the run -----------------------------


def fed(plan: Plan, groups: int, **ports: Any) -> tuple[House, list[Lease]]:
    """A run to which so many groups are submitted, each with a lease."""
    leases: list[Lease] = []

    async def body(house: House, supervisor: object) -> None:
        for group in range(groups):
            leases.append(Lease(house, group))
            size = house.plan.group_size
            given = [make_trajectory(group, m, size, [-1] * 4, reward=float(m + group)) for m in range(size)]
            await house.graph.open_intake().submit(given, make_prompt(group), leases[-1:])

    return live(plan, body=body, ports=ports), leases


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
    notes: list[str] = []
    house, leases = fed(failing(call, 1, **settings), 5, note=notes.append)
    assert house.error is None
    trained = [group for step in house.trained() for group in step]
    [lost] = set(range(5)) - set(trained)
    assert len(trained) == 4 and [lease.ended for lease in leases] == [1] * 5
    said = f"group {lost} (group {lost} of somebody) failed in the step (RuntimeError: call 1)"
    assert house.book.reasons == {f"dropped: {said}": 1} and house.books.dropped == 1
    assert notes == [f"{said}: dropped; a second failed step ends the run"]
    assert house.names("abort", "rollback").count("rollback") == 1 and house.book.failed == 0


def test_the_second_group_ends_the_run_with_both_names_and_neither_stays_with_its_owner() -> None:
    house, leases = fed(failing("microbatch", 1, 2), 4)
    assert type(house.error) is TrainStepError and isinstance(house.error.__cause__, RuntimeError)
    first, second = (event.groups[0] for event in house.events("microbatch")[:2])
    said = str(house.error)
    assert said.startswith(f"group {second} (group {second} of somebody) failed in the step (RuntimeError: call 2)")
    assert f"failed, too: group {first} (group {first} of somebody) failed in the step (RuntimeError: call 1)" in said
    assert [lease.group for lease in leases if lease.ended] == [first, second]
    assert house.trained() == []


def test_of_several_ranks_none_drops_by_itself_but_the_group_is_not_replayed() -> None:
    house, leases = fed(failing("microbatch", 1), 4, ranks=2)
    assert type(house.error) is TrainStepError and "failed in the step (RuntimeError: call 1)" in str(house.error)
    assert [lease.ended for lease in leases].count(1) == 1 and house.trained() == []


def test_of_a_round_that_fails_no_group_of_the_step_is_replayed() -> None:
    """A sharded model runs its microbatches in rounds: which group it was, nobody says."""

    async def round_(finishing: bool) -> bool:
        raise RuntimeError("no memory")

    plan = failing("microbatch", preset="sync", max_staleness=None)
    house, leases = fed(plan, 2, ranks=2, round=round_)
    assert type(house.error) is TrainStepError and "failed in the step (RuntimeError: no memory)" in str(house.error)
    assert [lease.ended for lease in leases] == [1, 1] and house.trained() == []


@pytest.mark.parametrize(
    ("call", "error", "ended"),
    [
        ("microbatch", TrainStepError("the device is gone"), [0, 0, 0, 0]),
        ("finish", DivergenceError("the norm is inf"), [1, 1, 0, 0]),
    ],
)
def test_what_is_not_of_a_group_ends_the_run(call: str, error: Exception, ended: list[int]) -> None:
    """It leaves the records to their owner, but for those of a gradient that is not finite: its step is not replayed."""
    house, leases = fed(failing(call, 1, error=error), 4)
    assert house.error is error and house.trained() == []
    assert [lease.ended for lease in leases] == ended


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
    error = kind("the loss is nan")
    error.groups = (1,)
    house, _ = fed(failing(call, 1, error=error, **settings), 3)
    assert house.error is None and sorted(group for step in house.trained() for group in step) == [0, 2]
    said = f"group 1 (group 1 of somebody) failed in the step ({kind.__name__}: the loss is nan)"
    assert said in str(house.book.reasons)


@pytest.mark.parametrize("what", ["raises", "is infinite"])
def test_an_advantage_that_cannot_be_computed_is_laid_to_its_group(what: str) -> None:
    def advantage(rewards: Any) -> Any:
        values = np.array(rewards, dtype=np.float64)
        if 1.0 not in values or 2.0 not in values:  # of any group but 1
            return values
        if what == "raises":
            raise ZeroDivisionError("no spread")
        return values * 1e300

    house, _ = fed(Plan(groups_per_step=2, max_staleness=4, advantage=advantage), 5)
    assert house.error is None and sorted(group for step in house.trained() for group in step) == [0, 2, 3, 4]
    [reason] = house.book.reasons
    assert reason.startswith("dropped: group 1 (group 1 of somebody) failed in the step")
    assert ("no spread" if what == "raises" else "beyond float32") in reason
