"""The one way in: groups from outside are shaped, filtered, scored and given back as own ones are; slots, rows and leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import Lease, Plan, ScriptedReward, make_prompt, make_trajectory

from asyncrl.errors import DataError, HookError, LedgerError, LifecycleError, RewardError
from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.metrics import COUNTED
from asyncrl.records.check import MAX_COMPONENTS, Limits
from asyncrl.types import Group, Prompt, Trajectory


def members(group: int, version: int, size: int = 2, reward: float | None = None, tokens: int = 4) -> list[Trajectory]:
    """With rewards `reward`, `reward` + 1, ..."""
    rewards = [None if reward is None else reward + member for member in range(size)]
    return [make_trajectory(group, m, size, [version] * tokens, reward=rewards[m]) for m in range(size)]


async def submit(
    house: House, group: int, *, version: int | None = None, reward: float | None = 0.0, leases: Sequence[Lease] = ()
) -> bool:
    """Without a version: that of the weights of now. Without leases: as a program submits."""
    version = house.trainer.version if version is None else version
    given = members(group, version, house.plan.group_size, reward)
    if not leases:
        return await house.graph.submit(given, make_prompt(group))
    return await house.graph.open_intake().submit(given, make_prompt(group), leases)


async def wait_for_version(house: House, version: int) -> None:
    while house.trainer.version < version:
        await house.ledger.wait_changed(house.ledger.changes)


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    return error


def nothing_here(house: House, group: int) -> bool:
    return group not in house.book and group not in house.store and house.graph.intake.incomplete == 0


# -- nobody asks where a group came from -------------------------------------------------------------------------------


def mixed(group: int, member: int) -> float:
    """Means 0, 0.25, 0.5, ... of four members."""
    return float(member < group % 5)


def sharper(group: Group) -> Group | None:
    """A hook: every third group gets other rewards, and one of those has no signal any more."""
    if group.group_id % 3:
        return None
    shift = 0.0 if group.group_id == 6 else 1.0
    members = tuple(replace(t, reward=0.125 + shift * t.member) for t in group.trajectories)
    return replace(group, trajectories=members)


ALIKE: dict[str, tuple[dict[str, Any], Hooks]] = {
    "plain": ({}, Hooks()),
    "no signal": ({"rollout": {"filter": {"dynamic_sampling": True}}}, Hooks()),
    "difficulty": ({"rollout": {"filter": {"min_mean_reward": 0.3, "max_mean_reward": 0.8}}}, Hooks()),
    "component": ({"rollout": {"filter": {"dynamic_sampling": True, "by": "scripted"}}}, Hooks()),
    "refills": ({"rollout": {"filter": {"min_mean_reward": 0.6, "max_refills": 0}}}, Hooks()),
    "shaped": ({"reward_config": {"overlong": {"cache": 2, "weight": 0.5}}}, Hooks()),
    "shaped and filtered": (
        {"reward_config": {"overlong": {"cache": 2, "weight": 0.5}}, "rollout": {"filter": {"max_mean_reward": 0.0}}},
        Hooks(),
    ),
    "hook": ({"rollout": {"filter": {"dynamic_sampling": True}}}, Hooks(after_rewards=sharper)),
}


def life(plan: Plan, hooks: Hooks, body: Any = None) -> tuple[dict[int, list[Any]], dict[str, Any]]:
    """Groups as they were trained, and everything that was counted; the calls of the hook are counted too."""
    called: list[int] = []

    def after_rewards(group: Group) -> Group | None:
        assert hooks.after_rewards is not None
        called.append(group.group_id)
        return hooks.after_rewards(group)  # type: ignore[return-value]

    wrapped = Hooks(after_rewards=after_rewards) if hooks.after_rewards else Hooks()
    house = live(plan, body=body, ports={"hooks": wrapped})
    assert house.error is None and house.graph.intake.incomplete == 0
    trained = {
        group.group_id: [
            (t.reward, dict(t.components), t.tokens.tolist(), t.mask.tolist(), t.logprobs.tolist(), t.versions.tolist())
            for t in group.trajectories
        ]
        for report in house.reports
        for group in report.groups
    }
    books = house.books
    counted = {
        "counters": {name: number for name, number in house.counted.items() if name.startswith(COUNTED)},
        "reasons": dict(house.book.reasons),
        "books": (books.admitted, books.trained, books.dropped, books.failed),
        "scored": house.graph.intake.scored,
        "hook": sorted(called),
        "calls": sorted(house.reward_calls),
    }
    return trained, counted


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_a_submitted_group_is_treated_as_an_own_one(name: str, leased: bool) -> None:
    """Eight groups of version 0 fill the slots of four steps; the same eight are played, and submitted without rewards."""
    given, hooks = ALIKE[name]
    plan = Plan(group_size=4, groups_per_step=4, max_staleness=1, reward=mixed, score_groups=True, prompts=8, **given)
    leases: list[Lease] = []

    async def body(house: House, supervisor: object) -> None:
        for group in range(8):
            leases.append(Lease(house, group))
            assert await submit(house, group, version=0, reward=None, leases=leases[-1:] if leased else ())

    own, own_counts = life(plan, hooks)
    submitted, submitted_counts = life(plan, hooks, body)
    assert own.keys() == submitted.keys() and own_counts == submitted_counts
    assert [own[g] for g in own] == [submitted[g] for g in own]
    assert all(lease.ended == int(leased) for lease in leases)  # trained or dropped
    if name == "plain":
        assert len(own) == 8
    elif name == "refills":
        assert own_counts["counters"]["filter/kept"] == 6 and len(own) == 8
    elif name != "shaped":
        assert 0 < own_counts["books"][2] < 8, "the filters had nothing to do"
    if name == "hook":
        assert own_counts["hook"] == list(range(8)) and 6 not in own and own[0][1][0] == 1.125
    if name == "shaped":
        assert {components["overlong"] for group in own.values() for _, components, *_ in group} == {-1.0}


# -- rewards -----------------------------------------------------------------------------------------------------------


class Listening(ScriptedReward):
    """The scripted reward; what it is asked with is written down."""

    def __init__(self, house: House | None = None) -> None:
        self.asked: list[tuple[dict[str, Any], list[int]]] = []
        self.house = house  # type: ignore[assignment]

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        self.asked.append((dict(prompt.columns), [t.member for t in trajectories]))
        return await super().score(prompt, trajectories)


def test_only_the_member_without_a_reward_is_scored_and_the_columns_are_passed() -> None:
    reward = Listening()

    async def body(house: House, supervisor: object) -> None:
        reward.house = house
        mine = members(7, 0, size=3, reward=0.5)
        mine[1] = replace(mine[1], reward=None)
        prompt = replace(make_prompt(7), columns={"answer": "42"})
        assert await house.graph.submit(mine, prompt)
        assert await submit(house, 8, reward=0.25)  # nobody has to be asked

    house = live(Plan(group_size=3, reward=lambda group, member: -9.0), body=body, ports={"reward": reward})
    assert house.error is None and house.trained() == [[7, 8]]
    assert reward.asked == [({"answer": "42"}, [1])] and house.reward_calls == [((7, 1),)]
    first, second = house.reports[0].groups
    assert [t.reward for t in first.trajectories] == [0.5, -9.0, 2.5]
    assert [dict(t.components) for t in first.trajectories] == [{}, {"scripted": -9.0}, {}]
    assert [t.reward for t in second.trajectories] == [0.25, 1.25, 2.25]


def test_a_group_without_a_reward_is_refused_where_the_run_gives_none() -> None:
    async def body(house: House, supervisor: object) -> None:
        lease = Lease(house, 3)
        mine = members(3, 0, reward=1.0)
        mine[1] = replace(mine[1], reward=None)
        with pytest.raises(DataError, match=r"member 1 came without a reward, and the run has no reward functions"):
            await house.graph.submit(mine, make_prompt(3))
        assert lease.ended == 0 and nothing_here(house, 3) and house.books.admitted == 0
        assert await submit(house, 3)  # with them, under the same name: the refused one has not been here

    house = live(Plan(), body=body, ports={"scores": False})
    assert house.error is None and house.trained() == [[3]] and house.reward_calls == []


# -- what is dropped, or goes wrong in the middle ----------------------------------------------------------------------


def test_a_filtered_group_gives_slot_and_lease_back_at_once() -> None:
    plan = Plan(
        groups_per_step=2, max_staleness=0, rollout={"filter": {"max_mean_reward": 2.0}}, publish_s=lambda v, s: 9.0
    )

    async def body(house: House, supervisor: object) -> None:
        leases = [Lease(house, group) for group in range(4)]
        assert await submit(house, 0, leases=leases[:1])
        for group in (1, 2):  # twice through the second of two slots, without a wait
            assert await submit(house, group, reward=5.0, leases=[leases[group]])
            assert leases[group].ended == 1 and nothing_here(house, group)
            assert house.books.live == 1 and leases[0].ended == 0
        assert anyio.current_time() == 0.0 and house.trainer.version == 0
        assert await submit(house, 3, leases=[leases[3]])

    house = live(plan, body=body)
    assert house.error is None and house.trained() == [[0, 3]]
    assert house.book.reasons["dropped: too easy"] == 2


def broken_hook(group: Group) -> Group:
    if group.group_id == 1:
        raise ValueError("a hook of no use")
    return group


MIDDLES: dict[str, tuple[dict[str, Any], Hooks, type[Exception]]] = {
    "reward": (
        {"reward_fails": lambda group, member: RewardError("no idea") if (group, member) == (1, 1) else None},
        Hooks(),
        RewardError,
    ),
    "hook": ({}, Hooks(after_rewards=broken_hook), HookError),
    "hook's answer": (
        {},
        Hooks(after_rewards=lambda group: 3 if group.group_id == 1 else None),  # type: ignore[arg-type,return-value]
        HookError,
    ),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_a_submit_that_fails_in_the_middle_leaves_nothing_and_ends_no_lease(name: str) -> None:
    given, hooks, kind = MIDDLES[name]
    leases: list[Lease] = []

    async def body(house: House, supervisor: object) -> None:
        leases.extend(Lease(house, group) for group in range(3))
        assert await submit(house, 0, reward=None, leases=leases[:1])
        with pytest.raises(kind):
            await submit(house, 1, reward=None, leases=leases[1:2])
        assert nothing_here(house, 1) and house.store.statistics().rows == 2
        assert house.books.live + house.books.claimed == 1
        assert await submit(house, 2, reward=None, leases=leases[2:])
        await wait_for_version(house, 1)

    house = live(Plan(groups_per_step=2, max_staleness=0, **given), body=body, ports={"hooks": hooks})
    assert house.error is None and house.trained() == [[0, 2]]
    assert [lease.ended for lease in leases] == [1, 0, 1]
    assert house.book.reasons == {"dropped: did not become ready": 1}


@pytest.mark.parametrize("where", ["slot", "reward", "hook"])
def test_a_submit_that_is_cancelled_leaves_nothing_and_ends_no_lease(where: str) -> None:
    leases: list[Lease] = []

    async def slow(group: Group) -> None:
        await anyio.sleep(2.0 if where == "hook" and group.group_id == 2 else 0.0)

    async def body(house: House, supervisor: object) -> None:
        leases.extend(Lease(house, group) for group in range(4))
        for group in (0, 1):
            assert await submit(house, group, leases=[leases[group]])
        await wait_for_version(house, 1)  # both slots are held until the publish is done
        if where != "slot":
            await anyio.sleep(5.0)
        with anyio.move_on_after(1.0) as impatient:
            await submit(house, 2, reward=None, leases=[leases[2]])
        assert impatient.cancelled_caught and nothing_here(house, 2)
        assert house.books.live == 0 and leases[2].ended == 0
        assert await submit(house, 3, leases=[leases[3]])

    plan = Plan(
        max_staleness=0,
        publish_s=lambda version, sink: 5.0,
        reward_s=lambda group, member: 2.0 if where == "reward" else 0.0,
    )
    house = live(plan, body=body, ports={"hooks": Hooks(after_rewards=slow)})
    assert house.error is None and house.trained() == [[0, 1], [3]]
    assert [lease.ended for lease in leases] == [1, 1, 0, 1]
    assert house.books.admitted == (3 if where == "slot" else 4)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_ends_with_the_commit_of_its_step() -> None:
    """Not when the group is claimed, packed or trained on; and the report's arrays are its own by then."""

    async def body(house: House, supervisor: object) -> None:
        for group in range(4):
            assert await submit(house, group, leases=[Lease(house, group)])

    house = live(Plan(groups_per_step=2, max_staleness=1, publish_s=lambda version, sink: 3.0), body=body)
    assert house.error is None and house.trained() == [[0, 1], [2, 3]]
    log = house.events("microbatch", "finished", "commit", "clear", "lease ends")
    for step in (0, 1):
        at = [index for index, event in enumerate(log) if event.what == "commit"][step]
        ids = log[at].groups
        assert [event.what for event in log[at - 1 : at + 4]] == [
            "finished",
            "commit",
            "clear",
            "lease ends",
            "lease ends",
        ]
        assert tuple(event.groups[0] for event in log[at + 2 : at + 4]) == ids
        assert {event.at for event in log[at : at + 4]} == {log[at].at}
    assert len(house.events("lease ends")) == 4


def test_the_report_does_not_read_what_was_lent() -> None:
    """The owner of the memory writes over it as soon as its lease ends."""
    lent = members(0, 0, reward=0.0)

    class Overwritten(Lease):
        def release(self) -> None:
            super().release()
            for trajectory in lent:
                trajectory.tokens[:] = -1
                trajectory.versions[:] = 99

    async def body(house: House, supervisor: object) -> None:
        assert await house.graph.intake.submit(lent, make_prompt(0), [Overwritten(house, 0)])

    expected = [t.tokens.tolist() for t in lent]
    house = live(Plan(), body=body)
    assert house.error is None and (lent[0].tokens == -1).all()
    [group] = house.reports[0].groups
    assert [t.tokens.tolist() for t in group.trajectories] == expected
    assert {int(t.versions.max()) for t in group.trajectories} == {0}
    assert house.reports[0].metrics.keys() and np.isfinite(list(house.reports[0].metrics.values())).all()


def test_a_step_that_is_given_back_keeps_its_leases() -> None:
    """Its optimizer step failed: the groups were not trained, so their memory stays their owner's when the run ends."""
    leases: list[Lease] = []

    async def body(house: House, supervisor: object) -> None:
        for group in (0, 1):
            leases.append(Lease(house, group))
            assert await submit(house, group, leases=leases[-1:])

    house = live(Plan(trainer_fails={("finish", 1): RuntimeError("the device is gone")}), body=body)
    assert house.error is not None and "the device is gone" in str(innermost(house.error))
    assert house.names("rollback") == ["rollback"] and [lease.ended for lease in leases] == [0, 0]


def test_leases_of_what_was_not_trained_are_not_ended_when_the_training_is_over() -> None:
    leases: list[Lease] = []

    async def body(house: House, supervisor: object) -> None:
        for group in range(4):
            leases.append(Lease(house, group))
            assert await submit(house, group, leases=leases[-1:])
        with pytest.raises(LifecycleError, match="the training ended"):
            leases.append(Lease(house, 4))
            await submit(house, 4, leases=leases[-1:])

    plan = Plan(groups_per_step=2, max_staleness=1, max_steps=1, late="drop", publish_s=lambda version, sink: 5.0)
    house = live(plan, body=body)
    assert house.error is None and house.trained() == [[0, 1]]
    assert [lease.ended for lease in leases] == [1, 1, 0, 0, 0]
    assert house.books.dropped == 2 and house.store.statistics().rows == 0


def test_a_hopeless_group_ends_its_lease_at_once() -> None:
    """Two versions behind where one is allowed: no place could come."""

    async def body(house: House, supervisor: object) -> None:
        for group in range(4):
            assert await submit(house, group, version=0)
        await wait_for_version(house, 2)
        lease = Lease(house, 9)
        assert not await submit(house, 9, version=0, leases=[lease])
        assert lease.ended == 1 and house.counted["staleness/dropped"] == 1

    house = live(Plan(groups_per_step=2, max_staleness=1), body=body)
    assert house.error is None and nothing_here(house, 9)


def crowd(end: Callable[[House], Any] | None = None, **settings: Any) -> tuple[House, list[Lease]]:
    """Two groups of version 0 have the two places of their step; a third one of that version is too late."""
    leases: list[Lease] = []

    async def body(house: House, supervisor: object) -> None:
        async with anyio.create_task_group() as others:
            leases.extend(Lease(house, group) for group in range(3))
            others.start_soon(lambda: submit(house, 0, version=0, reward=None, leases=leases[:1]))
            others.start_soon(lambda: submit(house, 1, version=0, leases=leases[1:2]))
            await anyio.sleep(1.0)
            assert not await submit(house, 2, version=0, leases=leases[2:])
            assert leases[2].ended == 0 and nothing_here(house, 2)
            assert house.counted["staleness/dropped"] == 1
            if end is not None:
                await end(house)

    plan = Plan(groups_per_step=2, max_staleness=0, reward_s=lambda group, member: 2.0, **settings)
    return live(plan, body=body), leases


async def a_step_has_ended(house: House) -> None:
    while house.ledger.turn < 1:
        await house.ledger.wait_changed(house.ledger.changes)


@pytest.mark.parametrize("closed", [False, True], ids=["goes on", "nobody may submit any more"])
def test_a_crowded_group_keeps_its_lease_until_a_step_has_ended(closed: bool) -> None:
    async def end(house: House) -> None:
        if closed:
            house.graph.intake.close("nobody may submit any more")
        await a_step_has_ended(house)

    house, leases = crowd(end)
    assert house.error is None and house.trained() == [[1, 0]]
    assert [lease.ended for lease in leases] == [1, 1, 1]
    [commit] = house.events("commit")
    assert commit.at >= 4.0 and {event.at for event in house.events("lease ends")} == {commit.at}


def test_or_until_a_group_was_dropped() -> None:
    """The first group turns out to be too easy: it made room."""
    house, leases = crowd(rollout={"filter": {"max_mean_reward": 2.0}}, reward=lambda group, member: 5.0)
    assert house.error is None and house.trained() == [[1]]
    ends = {event.groups[0]: event.at for event in house.events("lease ends")}
    [dropped], [commit] = house.events("dropped"), house.events("commit")
    assert ends[0] == ends[2] == dropped.at == 4.0 < commit.at == ends[1]
    assert [lease.ended for lease in leases] == [1, 1, 1]


# -- own groups --------------------------------------------------------------------------------------------------------


def test_members_of_a_group_whose_sibling_failed_leave_nothing() -> None:
    """Two members are scored, a third one is with the reward worker, when the fourth fails."""
    seen: list[int] = []

    def fails(group: int, member: int) -> BaseException | None:
        if (group, member) == (1, 3):
            seen.append(house_of[0].graph.intake.incomplete)
            return ValueError("broken")
        return None

    house_of: list[House] = []

    async def body(house: House, supervisor: Any) -> None:
        house_of.append(house)
        await house.graph.run(supervisor)
        assert house.graph.intake.incomplete == 0 and house.store.statistics().rows == 0
        [failed] = house.events("failed")
        assert (failed.at, failed.groups) == (4.0, (1,))

    plan = Plan(
        group_size=4,
        prompts=3,
        max_failed_groups=1,
        workers=4,
        rollout_s=lambda group, member: 12.0 if group == 2 else 1.0 + member,  # the worker's answer comes at 8
        reward_s=lambda group, member: 5.0 if (group, member) == (1, 2) else 0.0,
        fails=fails,
    )
    house = live(plan, body=body)
    assert house.error is None and (house.books.trained, house.books.failed) == (2, 1)
    assert seen == [2] and ((1, 2),) in house.reward_calls
    assert house.graph.intake.scored == 2 * 4 + 2  # not the one that came back after the end of its group


def test_with_roles_no_group_is_taken_from_outside() -> None:
    """Only `run` sends groups on, so a group that is submitted before it would keep its slot for ever."""

    async def body(house: House, supervisor: Any) -> None:
        with pytest.raises(LifecycleError, match=r"distributed\.roles or .* is set.*; leave both out"):
            await submit(house, 0)

    assert live(Plan(), body=body, ports={"depart": lambda group: None}).error is None


def test_while_run_generates_the_groups_no_group_is_taken_from_outside() -> None:
    async def body(house: House, supervisor: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.graph.run, supervisor)
            await wait_for_version(house, 1)
            with pytest.raises(LifecycleError, match=r"run\(\) generates the groups of this Runtime; use"):
                await submit(house, 99)

    assert live(Plan(max_steps=3), body=body).error is None


def test_names_of_components_from_outside_are_bounded_over_all_groups() -> None:
    """Each becomes metrics, which sinks keep as long as they live."""
    refusals: list[str] = []

    async def body(house: House, supervisor: Any) -> None:
        intake = house.graph.open_intake()
        [good, _] = members(0, 0, reward=1.0)
        for number in range(MAX_COMPONENTS - 1):
            intake.check(replace(good, components={"known": 1.0, f"n{number}": 2.0}), Limits())
        for names in (["n1", "one more"], ["another"], [f"m{number}" for number in range(1000)]):
            with pytest.raises(DataError, match=f"at most {MAX_COMPONENTS} different names") as raised:
                intake.check(replace(good, components=dict.fromkeys(names, 1.0)), Limits())
            refusals.append(str(raised.value))
        intake.check(replace(good, components={"known": 1.0, "n5": None}), Limits())

    assert live(Plan(), body=body).error is None
    assert "new name 'one more'" in refusals[0] and "'m0'" in refusals[2]


# -- backpressure, refusals, and that nobody waits for a training that has ended -------------------------------------


def test_more_groups_of_one_version_than_can_be_trained_in_time_are_refused_at_once() -> None:
    answers: list[bool] = []

    async def body(house: House, supervisor: object) -> None:
        for group in range(6):
            answers.append(await submit(house, group, version=0))

    house = live(Plan(groups_per_step=2, max_staleness=1), body=body)
    assert house.error is None
    assert answers == [True] * 4 + [False] * 2 and house.books.trained == 4
    assert house.counted["staleness/dropped"] == 2


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
        with pytest.raises(DataError, match="numbers are \\[0, 0\\]"):
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
