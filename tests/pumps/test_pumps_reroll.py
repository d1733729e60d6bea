"""Prompts of which every completion failed are played again: when, how often, in whose place, and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
from pumps_house import House, live
from pumps_plan import Plan

from asyncrl.config.schema import DataConfig
from asyncrl.data import prompts
from asyncrl.data.prompts import REROLLS, PromptSource, attempt_of
from asyncrl.pumps import screen

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


def plan(**rest: Any) -> Plan:
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
    house = live(plan())
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
    house = live(plan(engine=True, reward=lambda group, member: hard(group, member)))
    tokens: dict[int, list[int]] = {}
    for report in house.reports:
        for group in report.groups:
            tokens[group.group_id] = [int(t) for each in group.trajectories for t in each.tokens]
    assert tokens[2] != tokens[2 + REROLLS]


@pytest.mark.parametrize(("attempts", "expected"), [(1, [1]), (3, [1, 2, 3])])
def test_attempts_are_bounded(attempts: int, expected: list[int]) -> None:
    only = plan(
        reroll={"start_fraction": 0.0, "attempts": attempts},
        reward=lambda group, member: 0.0 if group % REROLLS == 2 else float(member),
    )
    assert [attempt for _, ordinal, attempt in again(live(only)) if ordinal == 2] == expected


@pytest.mark.parametrize(("fraction", "first"), [(0.2, 2), (0.65, 6), (1.0, None)])
def test_it_starts_at_a_fraction_of_the_run(fraction: float, first: int | None) -> None:
    """Every prompt fails. After `first` steps the first of them is played again: group 0, of the very first step."""
    house = live(plan(reroll={"start_fraction": fraction}, reward=lambda group, member: 0.0))
    found = again(house)
    if first is None:
        assert found == [] and not house.ports.counters["reroll/failed"]
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
    house = live(plan(reroll={"start_fraction": 0.0, "groups_per_step": 2}, reward=lambda group, member: -1.0))
    assert max(report.metrics["reroll/groups"] for report in house.reports) == 2


def test_what_counts_as_failed() -> None:
    """Nobody above the threshold; one good completion, or none that could be scored, is no failure."""
    rewards: dict[int, list[float | None]] = {0: [-1.0, 0.0], 1: [0.0, 0.1], 2: [None, None], 3: [None, -0.5]}
    some = plan(
        groups_per_step=4,
        reward=lambda group, member: rewards[group % REROLLS][member] if group % REROLLS in rewards else 1.0,
    )
    assert {ordinal for _, ordinal, _ in again(live(some))} == {0, 3}


def test_groups_that_the_filters_drop_are_seen_too() -> None:
    house = live(plan(rollout={"filter": {"dynamic_sampling": True}}))
    assert house.error is None
    assert house.ports.counters["reroll/admitted"] == house.ports.counters["reroll/failed"] == 3
    assert house.ports.counters["filter/no signal"] == 6  # each of them failed twice
    assert again(house) == []


def test_epochs_are_a_measure_of_the_run_too() -> None:
    """Two epochs of ten rows in steps of two: ten steps, so half of the run is turn 5. Two have failed before, one after."""
    house = live(plan(max_steps=None, cursor=lambda: cursor(2.0), max_epochs=2.0, reroll={"start_fraction": 0.5}))
    assert house.error is None and again(house) == [(6, 2, 1), (7, 5, 1), (9, 12, 1)]


def test_the_oldest_failure_gives_way_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "MAX_FAILED", 3)
    monkeypatch.setattr(prompts, "MAX_FAILED", 3)
    house = live(plan(reroll={"start_fraction": 0.5}, reward=lambda group, member: 0.0))
    assert [report.metrics["reroll/waiting"] for report in house.reports][:4] == [2, 3, 3, 3]
    assert again(house)[0] == (6, 7, 1)  # 7, 8 and 9 of the first five steps were left
    assert house.ports.counters["reroll/evicted"] > 0


def test_what_waits_is_part_of_the_cursors_state() -> None:
    first = cursor()
    for _ in range(6):
        first.next()
    assert [first.failed(group, 1) for group in (4, 1, 4)] == [True, True, False]
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
