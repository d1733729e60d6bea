"""Advantages against TRL 1.16: the code of `GRPOTrainer` and `RLOOTrainer` itself, driven with given rewards in float64.

Both compute advantages inline in `_generate_and_score_completions`; it runs unbound on a stand-in that holds what it reads.
Shape legend: B completions, F reward functions.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms_batches import random_batch
from test_algorithms_trl_oracle import GROUP, stand_in
from torch import Tensor

from asyncrl.algorithms.advantages import GroupRewards, combine_components, soft_overlong
from asyncrl.algorithms.registry import build_advantage
from asyncrl.pumps.metrics import GroupRows, Row, StepPart, step_metrics
from asyncrl.types import StepResult

NAMES = ("a", "b", "c")
WEIGHTS = dict(zip(NAMES, (1.0, 0.5, 2.0), strict=True))

# ours -> (TRL's trainer, scale_rewards, multi_objective_aggregation)
SPELLING = {
    "grpo": ("grpo", "group", "sum_then_normalize"),
    "grpo_batch": ("grpo", "batch", "sum_then_normalize"),
    "dr_grpo": ("grpo", "none", "sum_then_normalize"),
    "gdpo": ("grpo", "group", "normalize_then_sum"),
    "rloo": ("rloo", "none", "sum_then_normalize"),
}


def theirs(
    trl: Any, rewards_BF: Tensor, name: str, weights: dict[str, float], group: int = GROUP, logged: Any = None
) -> Tensor:
    """[B] of TRL's own code, which adds its metrics to the lists of `logged`."""
    kind, scale, aggregation = SPELLING[name]
    batch = random_batch(0, sequences=len(rewards_BF), old=False)
    stub = stand_in(batch, rewards_BF, loss="grpo", scale_rewards=scale, cap=None, beta=0.0, epsilon_high=None)
    stub.model.column = batch.logp_BT
    vars(stub).update(
        num_generations=group, multi_objective_aggregation=aggregation, normalize_advantages=False, reward_clip_range=None,
        reward_weights=torch.tensor([weights[n] for n in NAMES]),
    )  # fmt: skip
    if kind == "rloo":
        prompt_ids, ids, _, texts, *_ = stub._generate([1] * len(rewards_BF))
        stub._generate = lambda prompts: (prompt_ids, ids, texts)
    if logged is not None:
        stub._metrics["train"] = logged
    inputs = getattr(trl, kind)._generate_and_score_completions(stub, [{"prompt": "p"}] * len(rewards_BF))
    return inputs["advantages"]  # type: ignore[no-any-return]


def ours(rewards_BF: Tensor, name: str, weights: dict[str, float], group: int = GROUP) -> Tensor:
    groups = []
    for start in range(0, len(rewards_BF), group):
        rows = rewards_BF[start : start + group].tolist()
        components = {n: [None if row[f] != row[f] else row[f] for row in rows] for f, n in enumerate(NAMES)}
        rewards = [combine_components(dict(zip(NAMES, row, strict=True)), weights) for row in rows]
        groups.append(GroupRewards(rewards, components, weights))
    return torch.cat([torch.from_numpy(a) for a in build_advantage(name).of_step(groups)])


def random_rewards(seed: int, groups: int) -> Tensor:
    """[B, F]: entries that do not apply, an unscorable row, a group with one scorable row, one whose rewards are equal."""
    generator = torch.Generator().manual_seed(seed)
    rewards_BF = torch.randn(groups * GROUP, len(NAMES), generator=generator, dtype=torch.float64)
    rewards_BF[torch.rand(rewards_BF.shape, generator=generator) < 0.25] = float("nan")
    rewards_BF[2] = float("nan")
    if groups > 3:
        rewards_BF[GROUP : 2 * GROUP - 1] = float("nan")
        rewards_BF[2 * GROUP : 3 * GROUP] = torch.tensor([0.1, 0.3, 0.7])
    return rewards_BF


@pytest.mark.parametrize("weights", [WEIGHTS, dict.fromkeys(NAMES, 1.0), {"a": 0.0, "b": -1.5, "c": 1.0}])
@pytest.mark.parametrize("groups", [2, 6])
@pytest.mark.parametrize("name", sorted(SPELLING))
def test_equal_to_trl(trl: Any, name: str, groups: int, weights: dict[str, float]) -> None:
    for seed in range(5):
        rewards_BF = random_rewards(seed, groups)
        expected_B = theirs(trl, rewards_BF, name, weights)
        # 1e-11: TRL divides the rounding error of a mean of equal rewards by 1e-4, where ours are exactly 0
        torch.testing.assert_close(ours(rewards_BF, name, weights), expected_B, rtol=1e-9, atol=1e-11)
        assert expected_B.count_nonzero() > GROUP // 2
        assert ours(rewards_BF, name, weights)[2] == 0


@pytest.mark.parametrize("name", ["grpo", "grpo_batch", "rloo"])
def test_the_metrics_of_rewards_are_those_of_trl(trl: Any, name: str) -> None:
    rewards_BF, logged = random_rewards(3, 6), defaultdict[str, list[float]](list)
    theirs(trl, rewards_BF, name, WEIGHTS, logged=logged)
    rows = []
    for values in rewards_BF.tolist():
        components = {n: None if value != value else value for n, value in zip(NAMES, values, strict=True)}
        rows.append(Row(combine_components(components, WEIGHTS), components, 1, False, False))
    groups = [GroupRows(i, 0, tuple(rows[i * GROUP : i * GROUP + GROUP])) for i in range(6)]
    found = step_metrics([StepPart(tuple(groups))], 0, StepResult(1, 0.0, 0.0, 0.0, 1, 1, 1), 1.0)
    for ours, their in [("", "reward_{}"), *((f"{n}/", f"rewards/{n}/{{}}") for n in NAMES)]:
        for kind in ("mean", "std"):
            if their.format(kind) in logged:
                assert found[f"reward/{ours}{kind}"] == pytest.approx(logged[their.format(kind)][0], rel=1e-9)
    assert logged["reward"] == [pytest.approx(found["reward/mean"])]
    assert {"reward_std", "rewards/a/std"} <= set(logged)


def test_two_completions_a_group(trl: Any) -> None:
    rewards_BF = random_rewards(11, 3)[: 2 * 3]
    for name in SPELLING:
        got, expected = ours(rewards_BF, name, WEIGHTS, 2), theirs(trl, rewards_BF, name, WEIGHTS, 2)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_equal_rewards_are_exactly_zero_where_trl_leaves_rounding_errors(trl: Any) -> None:
    """On purpose: "no signal" is tested for with `== 0`."""
    rewards_BF = torch.tensor([[0.1, 0.0, 0.0]], dtype=torch.float64).expand(7, 3)
    for name in SPELLING:
        assert ours(rewards_BF, name, WEIGHTS, 7).count_nonzero() == 0
    assert theirs(trl, rewards_BF, "grpo", WEIGHTS, 7).count_nonzero() > 0


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (10, 10), (7, 1), (12, 0)])
def test_soft_overlong_equals_trl(trl: Any, longest: int, cache: int) -> None:
    lengths = range(longest + 3)
    expected = trl.soft_overlong(longest, cache)(completion_ids=[[1] * n for n in lengths])
    assert [soft_overlong(n, longest, cache) for n in lengths] == expected
    assert min(expected) == -1.0 and max(expected) == 0.0


async def test_grpo_async_equals_trls_rollout_worker(trl: Any) -> None:
    """`trl.experimental.async_grpo` sums without weights, and takes the population std: driven by its own method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", exc_type=ImportError)
    ones = dict.fromkeys(NAMES, 1.0)
    row = SimpleNamespace(input_ids=[1], completion_mask=[1], old_log_probs=[0.0])
    for seed in range(5):
        rewards_BF = random_rewards(seed, 6)
        found = []
        for start in range(0, len(rewards_BF), GROUP):
            rows = rewards_BF[start : start + GROUP].tolist()

            def function(index: int, rows: list[list[float]] = rows) -> Any:
                async def reward(**kwargs: Any) -> list[float | None]:
                    return [None if r[index] != r[index] else r[index] for r in rows]

                return reward

            group = SimpleNamespace(
                completions=["c"] * GROUP, prompts=["p"] * GROUP, completions_ids=[[1]] * GROUP,
                completions_sequences=[[row]] * GROUP, reward_kwargs={}, env_rewards=[None] * GROUP,
                rollout_rewards=[None] * GROUP, tool_call_counts=[0] * GROUP, tool_failure_counts=[0] * GROUP,
                model_version=0, group_id=0,
            )  # fmt: skip
            stub = SimpleNamespace(
                reward_funcs=[function(index) for index in range(len(NAMES))],
                reward_func_names=list(NAMES),
                _env_reward_types=[],
                _provides_rollout_reward=False,
            )
            found += [sample.advantage for sample in await module._AsyncRolloutLoop._score_group(stub, group)]
        expected_B = torch.tensor(found, dtype=torch.float64)
        # 1e-7: TRL divides the rounding error of a mean of equal rewards by 1e-8, where ours are exactly 0
        torch.testing.assert_close(ours(rewards_BF, "grpo_async", ones), expected_B, rtol=1e-9, atol=1e-7)
        differing = expected_B.abs() > 1e-6
        torch.testing.assert_close(
            ours(rewards_BF, "grpo_async", ones)[differing], expected_B[differing], rtol=1e-9, atol=0
        )
        assert differing.sum() > GROUP
