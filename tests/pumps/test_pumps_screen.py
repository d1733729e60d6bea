"""Groups that are scored: in one call or one by one, shaped by their length, dropped and replaced where nothing is in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pumps_house import live
from pumps_plan import TOKENS, Plan, make_prompt, make_trajectory

from asyncrl.algorithms.registry import build_advantage
from asyncrl.algorithms.terms import without_overlong
from asyncrl.config.schema_rollouts import FilterConfig, OverlongConfig
from asyncrl.pumps.building import RewardReader
from asyncrl.pumps.metrics import group_rows
from asyncrl.pumps.screen import NO_SIGNAL, refusal, shaped, unshaped
from asyncrl.types import Group, Ticket, Trajectory

SOLVED = {0, 1, 4, 7}  # all rewards 1


def mixed(group: int, member: int) -> float:
    return 1.0 if group in SOLVED else float(member % 2)


# -- dynamic sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["sync", "one_off", "async"])
def test_groups_without_a_signal_are_replaced_and_the_steps_stay_full(preset: str) -> None:
    plan = Plan(
        preset=preset, rollout={"filter": {"dynamic_sampling": True}}, groups_per_step=3, max_steps=4, reward=mixed
    )
    house = live(plan)
    assert house.error is None
    assert sorted(group for step in house.trained() for group in step) == [2, 3, 5, 6, *range(8, 16)]
    assert all(len(step) == 3 for step in house.trained())
    assert house.book.reasons["dropped: no signal"] == house.ports.counters["filter/no signal"] == len(SOLVED)
    assert house.books.trained == 12 and all(report.result.sequences == 6 for report in house.reports)


def test_without_it_they_are_trained_and_counted() -> None:
    house = live(Plan(groups_per_step=3, max_steps=2, reward=mixed))
    assert sorted(g for step in house.trained() for g in step) == [0, 1, 2, 3, 4, 5]
    assert house.books.dropped == 0


@pytest.mark.parametrize(("max_refills", "dropped_per_step"), [(0, 0), (1, 2), (3, 6)])
def test_a_task_without_any_signal_still_ends_its_steps(max_refills: int, dropped_per_step: int) -> None:
    plan = Plan(
        rollout={"filter": {"dynamic_sampling": True, "max_refills": max_refills}},
        preset="sync",
        max_steps=3,
        reward=lambda group, member: 0.0,
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 3
    assert house.ports.counters["filter/no signal"] == 3 * dropped_per_step
    assert house.ports.counters["filter/kept"] == 6


def test_a_group_whose_members_fail_is_no_group_without_a_signal() -> None:
    """Failed, not filtered: it counts against max_failed_groups and not against the refills."""
    plan = Plan(
        rollout={"filter": {"dynamic_sampling": True}},
        max_steps=2,
        max_failed_groups=1,
        reward=mixed,
        fails=lambda group, member: ValueError("broken") if (group, member) == (2, 1) else None,
    )
    house = live(plan)
    assert house.error is None and house.books.failed == 1
    assert house.ports.counters["filter/no signal"] == len(SOLVED)


def test_slow_and_silent_groups_never_make_another_one_too_old() -> None:
    """Whoever is dropped at the deadline of a step is replaced by a group that is trained in that very step."""
    plan = Plan(
        rollout={"filter": {"dynamic_sampling": True}},
        max_staleness=1,
        groups_per_step=2,
        max_steps=6,
        rollout_s=lambda group, member: 20.0 if group % 5 == 0 else 1.0,
        reward=lambda group, member: 1.0 if group % 5 == 0 else float(member),
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 6
    assert max(version - int(batch.versions.min()) for version, batch in house.tokens_trained) <= 1
    assert house.ports.counters["filter/no signal"] >= 2


# -- difficulty --------------------------------------------------------------------------------------------------------


def test_groups_that_are_too_hard_or_too_easy_are_replaced() -> None:
    """Means of the groups: 0, 0.25, 0.5, 0.75, 1, 0, ..."""
    plan = Plan(
        rollout={"filter": {"min_mean_reward": 0.25, "max_mean_reward": 0.75}},
        group_size=4,
        groups_per_step=3,
        max_steps=3,
        reward=lambda group, member: float(member < group % 5),
    )
    house = live(plan)
    assert house.error is None
    assert {group % 5 for step in house.trained() for group in step} == {1, 2, 3}
    counters = house.ports.counters
    assert counters["filter/too hard"] > 0 and counters["filter/too easy"] > 0


def test_the_filters_may_look_at_one_component() -> None:
    """The environment's own part makes the sums differ; the scripted component does not."""
    plan = Plan(rollout={"filter": {"dynamic_sampling": True, "by": "scripted"}}, max_steps=2, reward=mixed)
    assert live(plan).ports.counters["filter/no signal"] == 3
    plan = replace(plan, rollout={"filter": {"dynamic_sampling": True, "by": "nobody has it", "max_refills": 1}})
    assert live(plan).ports.counters["filter/kept"] == 4  # a group without the component has no signal in it


# -- shaping and batching ----------------------------------------------------------------------------------------------


def test_long_completions_are_punished_softly() -> None:
    """All completions have the longest length, TOKENS: -1 times the weight, as a component of its own."""
    plan = Plan(reward_config={"overlong": {"cache": 2, "weight": 0.5}}, max_steps=1, reward=mixed)
    house = live(plan)
    assert house.error is None and house.config.rollout.max_tokens == TOKENS
    for group in house.reports[0].groups:
        for t in group.trajectories:
            assert t.components == {"scripted": 1.0, "overlong": -1.0} and t.reward == 0.5
    assert house.reports[0].metrics["reward/overlong/mean"] == -1.0


def with_a_tool(trajectory: Trajectory, words: int) -> Trajectory:
    """The same episode with `words` tokens behind it that somebody else wrote."""
    fillers = {"tokens": 7, "mask": False, "logprobs": 0.0, "sampled_logprobs": 0.0, "versions": -1}
    columns = {name: (getattr(trajectory, name), filler) for name, filler in fillers.items()}
    longer = {name: np.concatenate([c, np.full(words, filler, c.dtype)]) for name, (c, filler) in columns.items()}
    return replace(trajectory, **longer)


def test_every_length_counts_the_tokens_that_were_sampled() -> None:
    """Three sampled tokens and thirty of a tool, against a limit of eight tokens of which the last six cost: (8 - 6 - 3) / 6."""
    episode = with_a_tool(make_trajectory(0, 0, 1, [0, 0, 0], reward=1.0), 30)
    assert (episode.completion_length, episode.sampled_length) == (33, 3)
    found = shaped(episode, OverlongConfig(cache=6, max_length=8, weight=0.5))
    assert found.components["overlong"] == pytest.approx(-1 / 6) and found.reward == pytest.approx(1 - 1 / 12)
    group = Group(Ticket(0, 0, 1), make_prompt(0), (episode,))
    assert without_overlong(group, truncated=False, longest=3).trajectories[0].sampled_length == 3
    assert without_overlong(group, truncated=False, longest=2).trajectories[0].sampled_length == 0
    assert group_rows([group])[0].rows[0].length == 3


def test_a_completion_without_a_reward_gets_no_punishment() -> None:
    unscored = make_trajectory(0, 0, 1, [0] * 8, reward=None)
    found = shaped(unscored, OverlongConfig(cache=2, max_length=4))
    assert found.reward is None and found.components["overlong"] is None
    plan = Plan(
        reward_config={"overlong": {"cache": 2}}, groups_per_step=2, max_steps=1, reward=lambda g, m: None if m else 1.0
    )
    metrics = live(plan).reports[0].metrics
    assert metrics["reward/applicable"] == metrics["reward/overlong/applicable"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 0.0)  # 1.0 and the whole punishment


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -2.7, 1.0])
def test_filters_and_rerolls_look_at_rewards_before_the_punishment(reward: float) -> None:
    overlong = OverlongConfig(cache=7, max_length=9, weight=0.3)
    played = tuple(make_trajectory(0, m, 4, [0] * (3 + m), reward=reward) for m in range(4))
    group = Group(Ticket(0, 0, 1), make_prompt(0), tuple(shaped(t, overlong) for t in played))
    assert len({t.reward for t in group.trajectories}) == 4
    before = unshaped(group, overlong)
    assert {t.reward for t in before.trajectories} == {round(reward, 9)}
    assert all("overlong" not in t.components for t in before.trajectories)
    reader = RewardReader(build_advantage("grpo"), {"overlong": 0.3}, False)
    for by, mean, said in (("reward", None, NO_SIGNAL), ("overlong", None, None), ("reward", reward, NO_SIGNAL)):
        filters = FilterConfig(dynamic_sampling=True, by=by, min_mean_reward=mean)
        assert refusal(group, filters, overlong, reader) == said
    hard = FilterConfig(min_mean_reward=reward - 1e-6)  # the mean of the sums is below it
    assert refusal(group, hard, overlong, reader) is None


def test_a_group_is_scored_in_one_call() -> None:
    plan = Plan(score_groups=True, groups_per_step=2, group_size=3, prompts=4, rollout_s=lambda g, m: 1.0 + m)
    house = live(plan)
    assert house.error is None and house.books.trained == 4
    assert sorted(house.reward_calls) == [tuple((group, member) for member in range(3)) for group in range(4)]


def test_one_call_per_completion_otherwise() -> None:
    house = live(Plan(groups_per_step=2, group_size=3, prompts=2))
    assert sorted(house.reward_calls) == [((group, member),) for group in range(2) for member in range(3)]


@pytest.mark.parametrize("score_groups", [True, False])
def test_a_reward_that_does_not_apply_is_asked_for_once(score_groups: bool) -> None:
    plan = Plan(score_groups=score_groups, groups_per_step=2, prompts=2, reward=lambda g, m: None if m else 1.0)
    house = live(plan)
    assert house.error is None and house.books.trained == 2
    asked = [member for call in house.reward_calls for member in call]
    assert sorted(asked) == sorted(set(asked)), "a member was scored twice"


def test_a_group_that_failed_is_not_scored_at_all() -> None:
    plan = Plan(
        score_groups=True,
        prompts=4,
        max_failed_groups=1,
        fails=lambda group, member: ValueError("broken") if (group, member) == (1, 0) else None,
    )
    house = live(plan)
    assert house.error is None and (house.books.trained, house.books.failed) == (3, 1)
    assert all(call[0][0] != 1 for call in house.reward_calls)
