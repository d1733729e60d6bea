"""From scored groups to advantages, through the pumps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pumps_house import live
from pumps_plan import TOKENS, Plan, make_prompt, make_trajectory

from asyncrl.algorithms.registry import build_advantage
from asyncrl.pumps.building import RewardReader
from asyncrl.types import Group, Ticket, Trajectory


def group_of(*trajectories: Trajectory, group_id: int = 0) -> Group:
    members = [replace(t, member=m, group_size=len(trajectories)) for m, t in enumerate(trajectories)]
    return Group(Ticket(group_id, 0, 2), make_prompt(group_id), tuple(members))


def scored(reward: float | None, tokens: int = 2, **rest: object) -> Trajectory:
    return replace(make_trajectory(0, 0, 1, [0] * tokens, reward=reward), **rest)  # type: ignore[arg-type]


def test_rewards_times_lengths_before_the_group_is_compared() -> None:
    group = group_of(scored(1.0, 3, components={"a": 2.0}), scored(2.0, 5), scored(None, 4))
    found = RewardReader(build_advantage("dr_grpo"), {"a": 0.5}, True).numbers(group)
    assert found.rewards == [3.0, 10.0, None] and found.components == {"a": [6.0, None, None]}
    assert found.lengths == [3, 5, 4] and found.weights == {"a": 0.5}
    advantages = RewardReader(build_advantage("dr_grpo"), {}, True).advantages([group])
    assert advantages[0].tolist() == [-3.5, 3.5, 0.0]


def test_set_advantage_to_zero_comes_after_the_comparison() -> None:
    silent = scored(4.0, metadata={"set_advantage_to_zero": True})
    advantages = RewardReader(build_advantage("dr_grpo"), {}, False).advantages(
        [group_of(scored(1.0), silent, scored(4.0))]
    )
    assert advantages[0].tolist() == [-2.0, 0.0, 1.0]  # the mean is of all three


@pytest.mark.parametrize("name", ["grpo_batch", "gdpo", "reinforce_pp"])
def test_a_statistic_of_the_step_sees_every_group_of_it_once(name: str) -> None:
    plan = Plan(
        preset="one_off", advantage_name=name, groups_per_step=3, group_size=2, prompts=6, reward=lambda g, m: g + m * m
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 2
    for report in house.reports:
        expected = RewardReader(build_advantage(name), {}, False).advantages(report.groups)
        assert {g: a.tolist() for g, a in report.advantages.items()} == {g: a.tolist() for g, a in expected.items()}


@pytest.mark.parametrize("preset", ["sync", "async"])
@pytest.mark.parametrize("updates", [1, 2])
def test_groups_without_advantages_are_counted_and_not_run(preset: str, updates: int) -> None:
    """Odd groups teach nothing. N is the same as if they had run; the tokens of the microbatches are not."""
    plan = Plan(
        preset=preset,
        prompts=6,
        groups_per_step=3,
        updates_per_batch=updates,
        train_config={"skip_zero_advantage": True},
        reward=lambda group, member: float(member * (group % 2 == 0)),
    )
    house = live(plan)
    assert house.error is None and house.books.trained == 6
    run = {group for _, batch in house.tokens_trained for group in batch.group_ids.tolist()}
    assert run == {0, 2, 4}
    for report in house.reports:
        assert report.result.sequences == 6 and report.result.tokens == 6 * TOKENS


def test_a_step_of_which_no_group_is_run() -> None:
    plan = Plan(prompts=2, train_config={"skip_zero_advantage": True}, reward=lambda group, member: 1.0)
    house = live(plan)
    assert house.error is None and house.books.trained == 2 and house.trainer.version == 1
    assert house.reports[0].result.sequences == 4
