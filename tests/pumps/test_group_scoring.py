"""Groups that are scored, in one call or one by one: shaped, dropped and replaced; prompts that are played again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import TOKENS, Plan, make_prompt, make_trajectory

from asyncrl.algorithms.registry import build_advantage
from asyncrl.algorithms.terms import without_overlong
from asyncrl.config.schema import DataConfig
from asyncrl.config.schema_rollouts import FilterConfig, OverlongConfig
from asyncrl.data import prompts
from asyncrl.data.prompts import REROLLS, PromptSource, attempt_of
from asyncrl.pumps import screen
from asyncrl.pumps.building import RewardReader
from asyncrl.pumps.metrics import group_rows
from asyncrl.pumps.screen import NO_SIGNAL, refusal, shape_reward, unshape_group
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
    assert house.book.reasons["dropped: no signal"] == len(SOLVED)
    assert house.books.trained == 12 and all(report.result.sequences == 6 for report in house.reports)
    house = live(replace(plan, rollout={}))  # without it they are trained
    assert sorted(group for step in house.trained() for group in step) == list(range(12)) and house.books.dropped == 0


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
    assert house.book.reasons["dropped: no signal"] == 3 * dropped_per_step
    assert house.counted["filter/kept"] == 6


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
    assert house.book.reasons["dropped: no signal"] == len(SOLVED)


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
    assert house.book.reasons["dropped: no signal"] >= 2


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
    assert house.book.reasons["dropped: too hard"] > 0 and house.book.reasons["dropped: too easy"] > 0


def test_the_filters_may_look_at_one_component() -> None:
    """The environment's own part makes the sums differ; the scripted component does not."""
    plan = Plan(rollout={"filter": {"dynamic_sampling": True, "by": "scripted"}}, max_steps=2, reward=mixed)
    assert live(plan).book.reasons["dropped: no signal"] == 3
    plan = replace(plan, rollout={"filter": {"dynamic_sampling": True, "by": "nobody has it", "max_refills": 1}})
    assert live(plan).counted["filter/kept"] == 4  # a group without the component has no signal in it


# -- shaping and batching ----------------------------------------------------------------------------------------------


def test_long_completions_are_punished_softly() -> None:
    """All completions have the longest length, TOKENS: -1 times the weight, as a component of its own."""
    house = live(Plan(reward_config={"overlong": {"cache": 2, "weight": 0.5}}, max_steps=1, reward=mixed))
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
    found = shape_reward(episode, OverlongConfig(cache=6, max_length=8, weight=0.5))
    assert found.components["overlong"] == pytest.approx(-1 / 6) and found.reward == pytest.approx(1 - 1 / 12)
    group = Group(Ticket(0, 0, 1), make_prompt(0), (episode,))
    assert without_overlong(group, truncated=False, longest=3).trajectories[0].sampled_length == 3
    assert without_overlong(group, truncated=False, longest=2).trajectories[0].sampled_length == 0
    assert group_rows([group])[0].rows[0].tokens == 3


def test_a_completion_without_a_reward_gets_no_punishment() -> None:
    unscored = make_trajectory(0, 0, 1, [0] * 8, reward=None)
    found = shape_reward(unscored, OverlongConfig(cache=2, max_length=4))
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
    group = Group(Ticket(0, 0, 1), make_prompt(0), tuple(shape_reward(t, overlong) for t in played))
    assert len({t.reward for t in group.trajectories}) == 4
    before = unshape_group(group, overlong)
    assert {t.reward for t in before.trajectories} == {round(reward, 9)}
    assert all("overlong" not in t.components for t in before.trajectories)
    reader = RewardReader(build_advantage("grpo"), {"overlong": 0.3}, False)
    for by, mean, said in (("reward", None, NO_SIGNAL), ("overlong", None, None), ("reward", reward, NO_SIGNAL)):
        filters = FilterConfig(dynamic_sampling=True, by=by, min_mean_reward=mean)
        assert refusal(group, filters, overlong, reader) == said
    hard = FilterConfig(min_mean_reward=reward - 1e-6)  # the mean of the sums is below it
    assert refusal(group, hard, overlong, reader) is None


@pytest.mark.parametrize("whole", [True, False])
def test_every_completion_is_scored_once_with_its_group_or_alone(whole: bool) -> None:
    """Also where the reward does not apply: no second call asks for it."""
    house = live(
        Plan(score_groups=whole, group_size=3, prompts=4, rollout_s=lambda g, m: 1.0 + m, reward=lambda g, m: m or None)
    )
    assert house.error is None and house.books.trained == 4
    groups = [tuple((group, member) for member in range(3)) for group in range(4)]
    assert sorted(house.reward_calls) == (groups if whole else [(each,) for group in groups for each in group])


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


# -- prompts of which every completion failed are played again -------------------------------------------------------


STEPS = 10


class Letters:
    chat_template: Any = None

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [ord(c) for c in text]


def cursor(max_epochs: float | None = None) -> PromptSource:
    """Ten rows, in their order."""
    rows = [{"prompt": f"p{n}", "row": n} for n in range(10)]
    return PromptSource(rows, Letters(), DataConfig(shuffle=False), max_epochs=max_epochs)


def hard(group: int, member: int) -> float:
    """Groups 2, 5 and 12 of the stream fail, whenever they are played; all others teach something."""
    return 0.0 if group % REROLLS in (2, 5, 12) else float(member)


def with_reroll(**rest: Any) -> Plan:
    settings: dict[str, Any] = {
        "preset": "sync",
        "cursor": cursor,
        "max_steps": STEPS,
        "reward": hard,
        "reroll": {"start_fraction": 0.0},
    }
    return Plan(**(settings | rest))


def again(house: House) -> list[tuple[int, int, int]]:
    """(step, ordinal, attempt) of the trained groups that were played before."""
    return [
        (report.version, group.group_id % REROLLS, attempt_of(group.group_id))
        for report in house.reports
        for group in report.groups
        if attempt_of(group.group_id)
    ]


def test_a_failed_prompt_is_played_again_in_place_of_a_fresh_one() -> None:
    """Steps of two groups: 0 1 | 2 3 | 2' 4 | 5 6 | 5' 7 | ... Every step is full, no prompt of the stream is lost."""
    house = live(with_reroll())
    assert house.error is None and all(len(step) == 2 for step in house.trained())
    assert again(house) == [(3, 2, 1), (5, 5, 1), (9, 12, 1)]
    fresh = [group for step in house.trained() for group in step if group < REROLLS]
    assert sorted(fresh) == list(range(2 * STEPS - 3))
    for report in house.reports:
        for group in report.groups:
            row = group.group_id % REROLLS % 10
            assert group.prompt.columns == {"row": row} and group.prompt.prompt == f"p{row}"
    assert house.reports[2].metrics["reroll/groups"] == 1 and house.reports[3].metrics["reroll/groups"] == 0


def test_a_new_attempt_has_random_numbers_of_its_own() -> None:
    house = live(with_reroll(engine=True, reward=lambda group, member: hard(group, member)))
    tokens: dict[int, list[int]] = {}
    for report in house.reports:
        for group in report.groups:
            tokens[group.group_id] = [int(t) for each in group.trajectories for t in each.tokens]
    assert tokens[2] != tokens[2 + REROLLS]


@pytest.mark.parametrize(("attempts", "expected"), [(1, [1]), (3, [1, 2, 3])])
def test_attempts_are_bounded(attempts: int, expected: list[int]) -> None:
    only = with_reroll(
        reroll={"start_fraction": 0.0, "attempts": attempts},
        reward=lambda group, member: 0.0 if group % REROLLS == 2 else float(member),
    )
    assert [attempt for _, ordinal, attempt in again(live(only)) if ordinal == 2] == expected


@pytest.mark.parametrize(("fraction", "first"), [(0.2, 2), (0.65, 6), (1.0, None)])
def test_it_starts_at_a_fraction_of_the_run(fraction: float, first: int | None) -> None:
    """Every prompt fails. After `first` steps the first of them is played again: group 0, of the very first step."""
    house = live(with_reroll(reroll={"start_fraction": fraction}, reward=lambda group, member: 0.0))
    found = again(house)
    if first is None:
        assert found == [] and all("reroll/waiting" not in report.metrics for report in house.reports)
    else:
        assert min(step for step, _, _ in found) == first + 1
        assert [step for step, _, _ in found] == list(range(first + 1, STEPS + 1))  # one per step, and no more
        assert [ordinal for _, ordinal, _ in found] == list(range(STEPS - first))  # in the order in which they failed
        waiting = [report.metrics["reroll/waiting"] for report in house.reports]
        assert waiting[: first - 1] == [
            2.0 * step for step in range(1, first)
        ]  # two groups a step, none given back yet
        assert waiting[first - 1] == 2.0 * first - 1


def test_more_per_step() -> None:
    house = live(with_reroll(reroll={"start_fraction": 0.0, "groups_per_step": 2}, reward=lambda group, member: -1.0))
    assert max(report.metrics["reroll/groups"] for report in house.reports) == 2


def test_what_counts_as_failed() -> None:
    """Nobody above the threshold; one good completion, or none that could be scored, is no failure."""
    rewards: dict[int, list[float | None]] = {0: [-1.0, 0.0], 1: [0.0, 0.1], 2: [None, None], 3: [None, -0.5]}
    some = with_reroll(
        groups_per_step=4,
        reward=lambda group, member: rewards[group % REROLLS][member] if group % REROLLS in rewards else 1.0,
    )
    assert {ordinal for _, ordinal, _ in again(live(some))} == {0, 3}


def test_groups_that_the_filters_drop_are_seen_too() -> None:
    house = live(with_reroll(rollout={"filter": {"dynamic_sampling": True}}))
    assert house.error is None
    assert house.book.reasons["dropped: no signal"] == 6  # each of them failed twice
    assert again(house) == []


@pytest.mark.parametrize("max_steps", [None, 100])
def test_epochs_are_a_measure_of_the_run_too(max_steps: int | None) -> None:
    """Two epochs of ten rows in steps of two: ten steps, so half of the run is turn 5. Two have failed before, one after."""
    house = live(
        with_reroll(max_steps=max_steps, cursor=lambda: cursor(2.0), max_epochs=2.0, reroll={"start_fraction": 0.5})
    )
    assert house.error is None and again(house) == [(6, 2, 1), (7, 5, 1), (9, 12, 1)]


def test_the_oldest_failure_gives_way_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "MAX_FAILED", 3)
    monkeypatch.setattr(prompts, "MAX_FAILED", 3)
    house = live(with_reroll(reroll={"start_fraction": 0.5}, reward=lambda group, member: 0.0))
    assert [report.metrics["reroll/waiting"] for report in house.reports][:4] == [2, 3, 3, 3]
    assert again(house)[0] == (6, 7, 1)  # 7, 8 and 9 of the first five steps were left
    assert house.counted["reroll/evicted"] > 0


def test_what_waits_is_part_of_the_cursors_state() -> None:
    first = cursor()
    for _ in range(6):
        first.next()
    assert [first.add_failed(group, 1) for group in (4, 1, 4)] == [True, True, False]
    assert first.reroll(1) == [4 + REROLLS]
    second = cursor()
    second.load_state_dict(first.state_dict())
    for each in (first, second):
        one = each.next()
        assert one is not None and one.group_id == 4 + REROLLS and one.columns["row"] == 4
        assert each.reroll(9) == [1 + REROLLS] and each.reroll(9) == []
        following = [prompt.group_id for _ in range(2) if (prompt := each.next()) is not None]
        assert following == [1 + REROLLS, 6]
    second.requeue([4 + REROLLS, 5])  # as a resume does it with prompts that were under way
    following = [prompt.group_id for _ in range(2) if (prompt := second.next()) is not None]
    assert following == [5, 4 + REROLLS]
