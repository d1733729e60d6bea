"""What a run promises from its first to its last step, one schedule each. test_flow_properties.py plays hundreds of schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import uvloop
from pumps_house import House, live
from pumps_plan import TOKENS, Plan

from asyncrl.errors import TrainStepError


def slow(*groups: int, seconds: float = 10.0, others: float = 1.0):  # type: ignore[no-untyped-def]
    return lambda group, member: seconds if group in groups else others


# -- a streaming train pump ------------------------------------------------------------------------------------------


def test_groups_are_dispatched_in_the_order_of_their_arrival() -> None:
    """Not in prompt order: group 3 is done first, group 0 last."""
    house = live(Plan(groups_per_step=4, prompts=4, rollout_s=lambda group, member: 5.0 - group))
    assert house.trained() == [[3, 2, 1, 0]]
    assert [event.groups for event in house.events("microbatch")] == [(3,), (2,), (1,), (0,)]


def test_training_starts_before_the_slowest_rollout_of_the_same_step_ends() -> None:
    house = live(Plan(groups_per_step=4, prompts=4, rollout_s=slow(2, seconds=30.0)))
    [first] = [event.at for event in house.events("begin")]
    slowest = max(event.at for event in house.events("rollout ends") if event.groups == (2,))
    assert first == pytest.approx(1.0) and slowest == pytest.approx(30.0)
    early = [event for event in house.events("microbatch") if event.at < slowest]
    assert {group for event in early for group in event.groups} == {0, 1, 3}
    [step] = house.trained()
    assert set(step[:3]) == {0, 1, 3} and step[3] == 2


@pytest.mark.parametrize("call", ["microbatch", "finish"])
def test_a_step_that_does_not_commit_is_aborted(call: str) -> None:
    house = live(Plan(groups_per_step=2, prompts=8, trainer_fails={(call, 2): TrainStepError("the device is gone")}))
    assert isinstance(house.error, TrainStepError) and "the device is gone" in str(house.error)
    assert house.names("abort", "rollback") == ["abort", "rollback"]
    assert house.events("abort")[0].at >= house.events(call)[-1].at
    assert not house.trainer.step_open


@pytest.mark.parametrize("prompts", [0, 4])
def test_an_empty_step_is_a_no_op(prompts: int) -> None:
    """Nothing is left after the last group: the pump leaves without begin, finish, commit, clear or publish."""
    house = live(Plan(groups_per_step=2, prompts=prompts))
    steps = prompts // 2
    assert house.error is None
    for call in ("begin", "finish", "commit", "clear", "release"):
        assert len(house.events(call)) == steps, call
    assert house.trainer.version == steps and house.events("abort", "rollback") == []


def test_each_step_clears_its_rows_once_all_of_them_and_only_after_its_commit() -> None:
    house = live(Plan(groups_per_step=3, prompts=12, rollout_s=lambda group, member: 1.0 + (group * 7 + member) % 5))
    assert house.names("finish", "commit", "clear") == ["finish", "commit", "clear"] * 4
    dispatched: list[set[int]] = [set()]
    for event in house.events("microbatch", "clear"):
        if event.what == "clear":
            assert len(event.groups) == len(set(event.groups)) and set(event.groups) == dispatched[-1]
            dispatched.append(set())
        else:
            dispatched[-1].update(event.groups)
    assert dispatched[-1] == set()
    assert house.store.clears == 4


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_last_smaller_step_is_trained_with_its_true_size() -> None:
    house = live(Plan(groups_per_step=4, group_size=2, prompts=6))
    assert [len(step) for step in house.trained()] == [4, 2]
    last = house.reports[-1]
    assert last.result.sequences == 4 and last.result.tokens == 4 * TOKENS
    assert last.metrics["train/groups"] == 2


@pytest.mark.parametrize("preset", ["sync", "async"])
def test_without_partial_final_step_the_rest_is_dropped(preset: str) -> None:
    house = live(Plan(preset=preset, groups_per_step=4, prompts=6, partial_final_step=False))
    assert house.error is None
    assert [len(step) for step in house.trained()] == [4]
    assert house.books.dropped == 2 and house.trainer.version == 1
    assert house.book.reasons == {"dropped: the run ended first": 2}


@pytest.mark.parametrize("preset", ["sync", "one_off", "async"])
def test_max_steps_generates_just_what_it_needs(preset: str) -> None:
    house = live(Plan(preset=preset, groups_per_step=3, max_steps=5))
    assert len(house.reports) == 5
    assert house.prompts.delivered == 15 and house.books.trained == 15 and house.books.dropped == 0


def test_the_time_limit_ends_the_run_after_the_step_in_progress() -> None:
    """Steps take 10 s each; the limit falls into the third. Whatever is not in it is dropped and counted."""
    house = live(Plan(groups_per_step=2, max_staleness=0, time_limit_s=25.0, rollout_s=lambda group, member: 10.0))
    assert house.error is None and len(house.reports) == 3
    assert house.events("commit")[-1].at == pytest.approx(30.0, abs=0.1)
    assert house.ended_at == pytest.approx(30.0, abs=0.1)


def test_a_run_returns_only_when_its_last_episode_has_cleaned_up() -> None:
    async def body(house: House, supervisor: object) -> None:
        await house.graph.run(supervisor)  # type: ignore[arg-type]
        house.note("returned")

    plan = Plan(max_staleness=1, time_limit_s=5.0, rollout_s=lambda g, m: 1.0 + 50.0 * (g % 4 == 3), cleanup_s=7.0)
    house = live(replace(plan, late="drop"), body=body)
    assert house.error is None
    given_up = house.events("rollout gives up")
    assert given_up and given_up[-1].at <= house.events("returned")[0].at
    assert house.events("rollout starts", "rollout ends", "rollout gives up")[-1].at == given_up[-1].at


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_same_flow_runs_on_real_loops(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Nothing takes time here but the iterations of the loop."""
    nothing = {"rollout_s": lambda group, member: 0.0, "train_token_s": 0.0, "finish_s": 0.0}
    house = House(Plan(groups_per_step=2, prompts=9, **nothing))
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(house.run())
    house.check_over()
    assert [len(step) for step in house.trained()] == [2, 2, 2, 2, 1]


# -- presets -------------------------------------------------------------------------------------------------------


def test_sync_trains_whole_steps_in_prompt_order_whoever_is_faster() -> None:
    plan = Plan(
        preset="sync",
        groups_per_step=3,
        prompts=9,
        rollout_s=lambda group, member: 9.0 - group,
        tokens_per_microbatch=9,
    )
    house = live(plan)
    assert house.trained() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    order = [group for event in house.events("microbatch") for group in event.groups]
    assert [group for index, group in enumerate(order) if group not in order[:index]] == list(range(9))
    for step in range(3):
        ends = [event.at for event in house.events("rollout ends") if event.groups[0] // 3 == step]
        starts = [event.at for event in house.events("microbatch") if event.groups[0] // 3 == step]
        assert max(ends) <= min(starts), "sync waits for the whole step"


def test_sync_is_the_same_run_whatever_the_timing() -> None:
    def microbatches(plan: Plan) -> list[tuple[int, list[int], list[int]]]:
        house = live(plan)
        return [(v, b.group_ids.tolist(), b.versions.tolist()) for v, b in house.tokens_trained]

    plan = Plan(preset="sync", groups_per_step=3, prompts=9, tokens_per_microbatch=30)
    other = replace(
        plan, rollout_s=lambda g, m: 1.0 + (5 * g + 3 * m) % 7, publish_s=lambda version, sink: 2.0, workers=1
    )
    assert microbatches(plan) == microbatches(other)


def test_old_logprobs_are_the_trainers_own_unless_the_sampler_is_asked_for() -> None:
    own = live(Plan(prompts=4))
    sampler = live(Plan(prompts=4, old_logprobs="sampler"))
    assert not any(own.trainer.old_logprobs_given) and all(sampler.trainer.old_logprobs_given)
    for _, batch in sampler.tokens_trained:
        np.testing.assert_array_equal(batch.old_logprobs, batch.sampler_logprobs)


def test_a_straggler_waits_for_its_deadline_and_delays_nobody_before_it() -> None:
    """Age 2: group 0 takes 100 s. Steps 1 and 2 go on without it; step 3 waits for it. It is trained at age 2."""
    house = live(Plan(groups_per_step=2, max_staleness=2, prompts=8, rollout_s=slow(0, seconds=100.0)))
    assert [0 in step for step in house.trained()] == [False, False, True, False]
    commits = [event.at for event in house.events("commit")]
    assert commits[1] < 5.0 and commits[2] >= 100.0
    assert house.reports[2].metrics["staleness/max"] == 2
    assert house.books.dropped == 0


def test_with_late_drop_a_straggler_is_dropped_and_counted_instead() -> None:
    house = live(Plan(groups_per_step=2, max_staleness=2, late="drop", prompts=20, rollout_s=slow(0, seconds=100.0)))
    assert house.error is None and house.books.dropped == 1 and house.books.trained == 19
    assert house.counted["staleness/dropped"] == 1
    assert house.events("commit")[2].at < 10.0
    assert house.book.reasons == {"dropped: past its deadline": 1}


@pytest.mark.parametrize("offset", [-1e-10, 0.0, 1e-10])
def test_a_group_may_be_dropped_for_its_age_on_its_way_to_the_train_pump(offset: float) -> None:
    """Its last reward comes in the iteration of the loop in which the train pump looks for expired groups."""

    def plan(straggling: float) -> Plan:
        late_reward = lambda group, member: straggling if group == 0 else 0.0  # noqa: E731
        return Plan(groups_per_step=1, group_size=1, max_staleness=1, late="drop", prompts=6, reward_s=late_reward)

    [dropped] = live(plan(100.0)).events("dropped")
    house = live(plan(dropped.at - 1.0 + offset))  # rollouts take 1 s
    assert house.error is None
    assert house.books.trained == 5 and house.books.dropped == 1


def test_tokens_of_one_trajectory_may_span_versions_and_keep_their_own() -> None:
    """The dry-run engine in the loop: continuous batching on the trainer's lane, weights change between two decode steps."""
    house = live(Plan(engine=True, prompts=24, group_size=2, groups_per_step=2))
    assert house.error is None and house.books.trained == 24
    spans = [len(set(t.versions[t.mask].tolist())) for r in house.reports for g in r.groups for t in g.trajectories]
    assert max(spans) > 1
    assert any(report.metrics["staleness/spanning_token_share"] > 0 for report in house.reports)


# -- rounds of a sharded model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "all at once"])
@pytest.mark.parametrize(("every", "groups"), [(2, 8), (3, 8), (1, 5)])
def test_a_rank_joins_the_rounds_that_the_claims_make_due_however_late_it_looks(
    every: int, groups: int, together: bool
) -> None:
    """The last rounds go on until all ranks are finishing: here the third one is."""
    calls: list[bool] = []

    async def join(finishing: bool) -> bool:
        calls.append(finishing)
        return calls.count(True) == 3

    plan = Plan(
        rollout={"streaming_min_groups": every},
        groups_per_step=groups,
        prompts=groups,
        rollout_s=lambda group, member: 1.0 if together else 1.0 + group,
    )
    assert live(plan, ports={"round": join}).error is None
    assert calls == [False] * (groups // every) + [True] * 3


def test_a_step_that_is_not_streamed_has_its_last_rounds_alone() -> None:
    calls: list[bool] = []

    async def join(finishing: bool) -> bool:
        calls.append(finishing)
        return finishing

    house = live(Plan(preset="sync", groups_per_step=4, prompts=4), ports={"round": join})
    assert house.error is None and calls == [True]
