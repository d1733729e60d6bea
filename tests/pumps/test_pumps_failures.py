"""What fails, who pays for it and what is said: one group, a step, or the run with the right error."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pumps_house import House, live
from pumps_plan import Plan, make_prompt, make_trajectory

from asyncrl.data.store import Store
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.errors import RewardCrash, RewardError, RewardTimeout
from asyncrl.pumps.book import MOST_REASONS, OTHER, GroupBook
from asyncrl.pumps.intake import ScorePump
from asyncrl.pumps.pipeline import Scoring
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import open_queue


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
    assert house.book.reasons == {"failed: ValueError: member 0": 1}


async def test_reasons_of_their_own_for_each_failed_group_are_bounded() -> None:
    """Each would be a metric, a curve of the report and a line at the end."""
    recorder = Recorder(max_events=0)
    ledger = LocalLedger(1, 0, recorder=recorder)
    book = GroupBook(ledger, Store())
    for group in range(200):
        ticket = await ledger.admit(group)
        assert ticket is not None
        book.open(ticket)
        await book.end(group, "failed", "a reason of all" if group < 10 else f"id {group}")
    assert len(book.reasons) == MOST_REASONS + 1 and book.reasons.total() == 200
    assert book.reasons["failed: a reason of all"] == 10 and book.reasons[f"failed: {OTHER}"] == 190 - MOST_REASONS + 1
    counted = {name: count for name, count in recorder.drain().items() if name.startswith("groups/failed/")}
    assert len(counted) == MOST_REASONS + 1 and sum(counted.values()) == 200


def test_one_failed_group_too_many_ends_the_run_with_its_cause() -> None:
    plan = Plan(
        prompts=8, max_failed_groups=1, fails=lambda group, member: KeyError("tool") if group in (2, 3) else None
    )

    house = live(plan)

    assert "tool" in str(house.error) and isinstance(house.error.__cause__, KeyError)
    assert "rollout.max_failed_groups allows 1" in str(house.error)
    assert house.books.failed == 2


@pytest.mark.parametrize("preset", ["sync", "one_off", "async"])
def test_failed_groups_are_replaced_until_max_steps_is_reached(preset: str) -> None:
    """A replacement must not wait for a whole batch of slots: the open step may wait for nothing but it."""
    plan = Plan(
        preset=preset,
        groups_per_step=3,
        max_steps=4,
        max_failed_groups=100,
        rollout_s=lambda group, member: 1.0 + group % 3,
        fails=lambda group, member: ValueError("no") if group % 3 == 1 and member == 1 else None,
    )

    house = live(plan)

    assert house.error is None
    assert [len(step) for step in house.trained()] == [3, 3, 3, 3]
    assert house.books.failed > 0


def test_an_episode_that_cancels_itself_fails_its_group_and_hangs_nobody() -> None:
    """User code may await a task that somebody cancelled: to us that is a failure of its group, not a farewell."""
    plan = Plan(
        groups_per_step=2,
        max_staleness=0,
        prompts=6,
        max_failed_groups=1,
        fails=lambda group, member: asyncio.CancelledError() if (group, member) == (3, 1) else None,
    )

    house = live(plan)

    assert house.error is None
    assert house.books.failed == 1 and house.books.trained == 5


def test_an_environment_that_returns_another_member_fails_its_group() -> None:
    class Confused:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        async def run(self, prompt, member, group_size, generate):  # type: ignore[no-untyped-def]
            trajectory = await self.inner.run(prompt, member, group_size, generate)  # type: ignore[attr-defined]
            return replace(trajectory, member=0) if prompt.group_id == 1 else trajectory

    async def body(house: House, supervisor: object) -> None:
        house.ports.environment = Confused(house.ports.environment)  # type: ignore[assignment]
        await house.graph.run(supervisor)  # type: ignore[arg-type]

    house = live(Plan(groups_per_step=2, max_staleness=0, max_steps=3, max_failed_groups=1), body=body)

    assert house.error is None
    assert house.books.failed == 1 and len(house.reports) == 3
    [reason] = house.book.reasons
    assert "member 0" in reason and "member 1" in reason


def test_groups_that_can_never_be_whole_are_dropped_when_the_rollouts_end() -> None:
    """A scorer that hears the end of the rollouts with half a group in the stash: counted, its slot released, no hang."""

    async def body(house: House, supervisor: object) -> None:
        ports = house.ports
        scoring_in, scoring_out = open_queue("scoring", 4)
        for group, members in ((0, 2), (1, 1)):
            ticket = await ports.ledger.admit(group)
            assert ticket is not None
            ports.book.open(ticket)
            for member in range(members):
                trajectory = make_trajectory(group, member, 2, [0])
                await scoring_in.put(Scoring(ticket, make_prompt(group), (trajectory,)))
        scoring_in.close()
        await ScorePump(house.graph.intake, scoring_out, workers=1).run()
        assert house.books.live + house.books.claimed == 1 and house.books.dropped == 1

    house = live(Plan(), body=body)

    assert house.error is None and house.trained() == [[0]]
    assert house.book.reasons["dropped: incomplete at the end of the rollouts"] == 1


def test_a_failed_finish_keeps_version_and_rows_until_the_run_is_over() -> None:
    seen: dict[str, object] = {}

    class Watching(Exception):
        pass

    plan = Plan(groups_per_step=2, prompts=4, max_staleness=0, trainer_fails={("finish", 2): Watching("lost a rank")})

    async def body(house: House, supervisor: object) -> None:
        try:
            await house.graph.run(supervisor)  # type: ignore[arg-type]
        finally:  # the train pump is gone, nobody has cleaned up yet
            seen["rows"] = house.store.statistics().rows
            seen["books"] = house.books
            seen["version"] = house.trainer.version

    house = live(plan, body=body)

    assert isinstance(house.error, Watching)
    assert house.names("finish", "abort", "clear")[-2:] == ["finish", "abort"]
    assert seen["version"] == 1 and house.trainer.version == 1
    assert seen["rows"] == 2 * house.config.rollout.group_size
    assert len(house.events("clear")) == 1


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
