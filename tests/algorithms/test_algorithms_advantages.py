"""Advantage estimators by hand, in plain Python floats, where TRL has no counterpart; and what holds for all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.algorithms.advantages import Estimator, GroupRewards
from asyncrl.algorithms.registry import ADVANTAGES, build_advantage

STEP_ADVANTAGES = [name for name, estimator in ADVANTAGES.items() if estimator.needs_whole_step]
GROUP_NAMES = [name for name, estimator in ADVANTAGES.items() if not estimator.needs_whole_step]
COMPARING = [name for name in ADVANTAGES if name not in ("none", "reinforce_pp")]  # equal rewards teach nothing


def test_conventions_of_the_std_by_hand() -> None:
    """1, 2, 6: mean 3, deviations -2, -1, 3, squares 14."""
    rewards = [1.0, 2.0, 6.0]
    sample, population = math.sqrt(14 / 2), math.sqrt(14 / 3)
    expected = {
        "grpo": [d / (sample + 1e-4) for d in (-2, -1, 3)],
        "grpo_verl": [d / (sample + 1e-6) for d in (-2, -1, 3)],
        "grpo_async": [d / (population + 1e-8) for d in (-2, -1, 3)],
        "grpo_atropos": [d / population for d in (-2, -1, 3)],
        "dr_grpo": [-2.0, -1.0, 3.0],
        "rloo": [1 - 4.0, 2 - 3.5, 6 - 1.5],
        # the others of 1 are 2 and 6: mean 4, unbiased variance 4 + 4; of 2: 1 and 6; of 6: 1 and 2
        "grpo_nemo": [-3.0 / (math.sqrt(8) + 1e-6), -1.5 / (math.sqrt(12.5) + 1e-6), 4.5 / (math.sqrt(0.5) + 1e-6)],
        "none": rewards,
        "zero": [0.0] * 3,
    }
    assert set(expected) == set(GROUP_NAMES)
    for name, values in expected.items():
        assert build_advantage(name)(rewards).tolist() == pytest.approx(values, rel=1e-12), name


def test_nemo_does_not_divide_where_the_others_have_no_spread() -> None:
    nemo = build_advantage("grpo_nemo")
    assert nemo([0.0, 1.0]).tolist() == [-1.0, 1.0]  # one other: its std is unknown
    spread = math.sqrt(1 / 3) + 1e-6  # of 0, 0, 1 seen by one of the zeros' siblings
    assert nemo([0.0, 0.0, 0.0, 1.0]).tolist() == pytest.approx([-(1 / 3) / spread] * 3 + [1.0], rel=1e-12)


@pytest.mark.parametrize(("name", "value"), [("grpo_atropos", 0.7), ("grpo_verl", 0.7 / (1 + 1e-6)), ("none", 0.7)])
def test_a_group_of_one_keeps_its_raw_score(name: str, value: float) -> None:
    assert build_advantage(name)([0.7]).tolist() == [value]
    assert build_advantage(name)([None]).tolist() == [0.0]


def of_step(name: str, *groups: GroupRewards) -> list[list[float]]:
    return [values.tolist() for values in build_advantage(name).of_step(groups)]


def test_grpo_batch_by_hand() -> None:
    """Rewards 0, 2 | 5, 9 | None, 4: mean 4, squares 16 + 4 + 1 + 25 + 0 = 46, unbiased variance 46 / 4."""
    std = math.sqrt(46 / 4) + 1e-4
    found = of_step("grpo_batch", GroupRewards([0.0, 2.0]), GroupRewards([5.0, 9.0]), GroupRewards([None, 4.0]))
    assert found == [pytest.approx(x, rel=1e-12) for x in ([-1 / std, 1 / std], [-2 / std, 2 / std], [0.0, 0.0])]


def test_gdpo_by_hand() -> None:
    """Two groups of two, components `small` and `large`; z-scores of two values a < b are -+ d/2 over d/sqrt(2) + 1e-4."""

    def z(distance: float) -> float:
        return (distance / 2) / (distance / math.sqrt(2) + 1e-4)

    weights = {"small": 2.0, "large": 0.5}
    first = GroupRewards([0.0, 0.0], {"small": [0.0, 0.1], "large": [30.0, 10.0]}, weights)
    second = GroupRewards([0.0, 0.0], {"small": [1.0, 1.0], "large": [7.0, None]}, weights)  # no signal at all
    s = 2.0 * z(0.1) - 0.5 * z(20.0)
    std = math.sqrt(2 * s * s / 3)  # of -s, s, 0, 0
    [a, b] = of_step("gdpo", first, second)
    assert a == pytest.approx([-s / (std + 1e-4), s / (std + 1e-4)], rel=1e-12) and b == [0.0, 0.0]


def whitened(values: list[float], lengths: list[int]) -> list[float]:
    tokens = [v for v, n in zip(values, lengths, strict=True) for _ in range(n)]
    mean = sum(tokens) / len(tokens)
    variance = sum((t - mean) ** 2 for t in tokens) / (len(tokens) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_reinforce_pp_by_hand() -> None:
    """Every token carries its completion's reward: statistics over tokens, as in verl."""
    first = GroupRewards([1.0, 0.0, None], lengths=[3, 1, 50])
    second = GroupRewards([2.0, -1.0], lengths=[2, 7])
    plain = whitened([1.0, 0.0, 2.0, -1.0], [3, 1, 2, 7])
    [a, b] = of_step("reinforce_pp", first, second)
    assert [a[0], a[1], *b] == pytest.approx(plain, rel=1e-12) and a[2] == 0.0
    baseline = whitened([0.5, -0.5, 1.5, -1.5], [3, 1, 2, 7])
    [a, b] = of_step("reinforce_pp_baseline", first, second)
    assert [a[0], a[1], *b] == pytest.approx(baseline, rel=1e-12) and a[2] == 0.0


@pytest.mark.parametrize("name", COMPARING)
def test_no_signal_is_exactly_zero(name: str) -> None:
    of_one: list[float | None] = [] if ADVANTAGES[name].alone else [0.7]
    for rewards in ([0.1] * 7, [None], [None, None], [0.3, None], of_one, []):
        [values] = of_step(name, GroupRewards(rewards, lengths=[5] * len(rewards)))
        assert values == [0.0] * len(rewards)
        assert not ADVANTAGES[name].has_signal(GroupRewards(rewards))
    assert ADVANTAGES[name].has_signal(GroupRewards([0.0, 1.0])) == (name != "zero")


def test_gdpo_sees_a_signal_where_the_sum_hides_it() -> None:
    group = GroupRewards([1.0, 1.0], {"a": [0.0, 1.0], "b": [1.0, 0.0]}, {"a": 1.0, "b": 2.0})
    assert ADVANTAGES["gdpo"].has_signal(group) and not ADVANTAGES["grpo"].has_signal(group)
    assert np.abs(of_step("gdpo", group)[0]).min() > 0.5


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_of_a_group_does_not_depend_on_its_neighbours(name: str) -> None:
    groups = [GroupRewards([0.0, 1.0, 5.0]), GroupRewards([2.0, None, 2.5]), GroupRewards([9.0, 9.0])]
    alone = [of_step(name, group)[0] for group in groups]
    assert of_step(name, *groups) == alone and of_step(name, *groups[::-1]) == alone[::-1]


@pytest.mark.parametrize("name", STEP_ADVANTAGES)
def test_of_a_step_does_depend_on_the_neighbours_and_says_so(name: str) -> None:
    first = GroupRewards([0.0, 1.0], {"a": [0.0, 1.0]}, lengths=[1, 4])
    second = GroupRewards([5.0, 9.0], {"a": [5.0, 9.3], "b": [1.0, 0.5]}, lengths=[2, 2])
    assert of_step(name, first, second)[0] != of_step(name, first)[0]
    with pytest.raises(AssertionError, match="all groups of the step"):
        build_advantage(name)([0.0, 1.0])
    assert of_step(name) == []


def test_an_estimator_of_ones_own() -> None:
    halves = Estimator("halves", lambda rewards: np.asarray(rewards, dtype=np.float64) / 2)
    assert [v.tolist() for v in halves.of_step([GroupRewards([2.0, 4.0])])] == [[1.0, 2.0]]
    assert halves.has_signal(GroupRewards([2.0, 2.0])) and not halves.has_signal(GroupRewards([0.0]))
