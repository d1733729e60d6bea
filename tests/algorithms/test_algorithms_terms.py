"""The terms around a surrogate, by hand: centres of the clip, top entropy, entropy bonus, KL forms, KL in the reward, overlong
filters; and who declares which normaliser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithms_batches import random_batch, value_and_grad, value_and_grads

from asyncrl.algorithms import kl
from asyncrl.algorithms.base import LossInputs, token_ratio
from asyncrl.algorithms.registry import (
    LOSSES,
    build_loss,
    build_reward_penalty,
    make_loss,
    make_terms,
    methods,
    settings,
)
from asyncrl.algorithms.terms import entropy_threshold, without_overlong
from asyncrl.config.methods import flat_values
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.types import FinishReason, Group, Microbatch, Normaliser, Prompt, Ticket, Trajectory

ROWS = [range(7)]


def test_numbers_are_the_settings() -> None:
    """Same defaults: `build_loss` takes the algorithm section as it is."""
    given = flat_values(AlgorithmConfig())
    for name in LOSSES:
        assert make_loss(name, **given) == make_loss(name)
    assert make_terms(**given) == make_terms()


def test_the_one_sided_clip_of_torchtitan_is_the_clip() -> None:
    for seed in range(5):
        batch = random_batch(seed, shift=0.8)
        value, _, metrics = value_and_grad(
            batch, build_loss("ppo_clip", epsilon=0.2, epsilon_high=0.3, importance_cap=None), ROWS
        )
        inputs = batch.pack()
        ratio_S, advantage_S = token_ratio(inputs), inputs.advantage_S
        bounded_S = ratio_S.clamp(max=1.3).where(advantage_S > 0, ratio_S.clamp(min=0.8))
        torch.testing.assert_close(value, -(bounded_S * advantage_S).mean(), rtol=1e-13, atol=0)
        assert metrics["clip_ratio/low_mean"] > 0


def test_a_flat_name_stands_for_one_setting() -> None:
    by_name = settings()
    assert all(by_name[each.flat] == each for method in methods() for each in method.settings())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_force_on_policy_reads_no_old_column(name: str) -> None:
    batch = random_batch(5)
    forced = build_loss(name, force_on_policy=True)
    found = value_and_grad(batch, forced, ROWS)
    expected = value_and_grad(batch.replace_old(None), build_loss(name), ROWS)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not forced.needs_old and build_loss(name).needs_old
    assert not build_loss(name, old_logprobs="sampler").needs_old


def test_entropy_threshold_is_a_quantile_of_all_tokens() -> None:
    entropy = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.5], dtype=torch.float64)
    assert entropy_threshold(entropy, 0.5) == pytest.approx(0.3)
    assert entropy_threshold(entropy, 0.35) == pytest.approx(0.36)  # place 2.6 between 0.3 and 0.4
    assert entropy_threshold(entropy, 1.0) == pytest.approx(0.1)
    assert entropy_threshold(entropy[:0], 0.5) == -math.inf
    for share in (0.05, 0.2, 0.7):
        values = torch.rand(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert entropy_threshold(values, share) == pytest.approx(float(values.quantile(1 - share)), rel=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_entropy_bonus_is_a_mean_over_tokens_whatever_the_loss(name: str) -> None:
    batch = random_batch(6)
    loss = build_loss(name, entropy_coef=0.03)
    by_tokens = LOSSES[name].normaliser is Normaliser.TOKENS
    assert loss.needs_entropy_grad and loss.needs_whole_step is not by_tokens
    assert loss.bonus_needs_scale is not by_tokens
    value, grad_BT, entropy_grad_BT, _ = value_and_grads(batch, loss, ROWS)
    plain, plain_grad_BT, _, _ = value_and_grads(batch, build_loss(name), ROWS)
    tokens = float(batch.mask_BT.sum())
    bonus = -0.03 * float(batch.entropy_BT[batch.mask_BT].sum()) / tokens
    assert float(value - plain) == pytest.approx(bonus, rel=1e-10)
    torch.testing.assert_close(grad_BT, plain_grad_BT, rtol=0, atol=0)
    torch.testing.assert_close(entropy_grad_BT, -0.03 / tokens * batch.mask_BT.double(), rtol=1e-13, atol=0)
    known = loss.with_bonus_scale(batch.count(loss.normaliser) / tokens)
    torch.testing.assert_close(value_and_grads(batch, known, ROWS)[2], entropy_grad_BT, rtol=1e-13, atol=0)
    assert not known.needs_whole_step


def test_missing_columns_accuse_precisely() -> None:
    batch = random_batch(1)
    with pytest.raises(ValueError, match=r"algorithm\.top_entropy\.quantile is 0\.3, but .*`keep_S`"):
        build_loss("grpo", top_entropy_quantile=0.3)(batch.pack())
    inputs = batch.pack()
    bare = LossInputs(
        inputs.logp_S, None, inputs.sampler_logp_S, inputs.advantage_S, inputs.sequence_S, inputs.sequences
    )
    with pytest.raises(ValueError, match=r"the entropy coefficient is 0\.1, but .*`entropy_S`"):
        build_loss("grpo", entropy_coef=0.1)(bare)


@pytest.mark.parametrize("clamp", [None, 0.3])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("estimator", sorted(kl.KL_ESTIMATORS))
def test_kl_term_by_hand(estimator: str, correct: bool, clamp: float | None) -> None:
    batch = random_batch(8, shift=0.7)
    loss = build_loss(
        "dapo", kl_coef=0.5, kl_estimator=estimator, use_bias_correction_kl=correct, kl_clamp=clamp, importance_cap=None
    )
    value, _, metrics = value_and_grad(batch.with_advantages(0 * batch.advantage_B), loss, ROWS)
    assert batch.old_BT is not None
    total = 0.0
    for logp, old, reference in zip(
        *(column[batch.mask_BT].tolist() for column in (batch.logp_BT, batch.old_BT, batch.reference_BT)), strict=True
    ):
        d = reference - logp
        term = {"k1": -d, "k2": d * d / 2, "mse": d * d / 2, "k3": math.exp(d) - d - 1, "abs": abs(d)}[estimator]
        term *= math.exp(logp - old) if correct else 1.0
        total += term if clamp is None else min(max(term, -clamp), clamp)
    mean = total / float(batch.mask_BT.sum())
    assert float(value) == pytest.approx(0.5 * mean, rel=1e-11)
    assert metrics["kl"] == pytest.approx(mean, rel=1e-11)


def test_kl_clamp_holds_far_log_ratios_at_20_nats() -> None:
    logp = torch.tensor([-1.0, -90.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-90.0, -1.0], dtype=torch.float64)
    values = kl.estimate("k1", logp, reference, clamp=1e9)
    assert values.tolist() == pytest.approx([20.0, -20.0])
    values.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_kl_clamp_bounds_what_the_ratio_multiplies(estimator: str) -> None:
    """By hand: ratio 100 (log-prob -1 after -1 - log 100), a KL of less than 1 before it; clamp 1. NeMo-RL: 1, gradient 0."""
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    ratio = (logp - (logp.detach() - torch.tensor([math.log(100.0), 0.0], dtype=torch.float64))).exp()
    reference = logp.detach() - 0.9
    plain = kl.estimate(estimator, logp.detach(), reference)
    assert 0 < float(plain[0]) < 1 and float(plain[0]) * 100 > 1
    value = kl.estimate(estimator, logp, reference, 1.0, ratio)
    assert value.tolist() == pytest.approx([1.0, float(plain[1])])
    value.sum().backward()
    assert logp.grad is not None and logp.grad[0] == 0 and logp.grad[1] != 0


def trajectory(
    member: int, length: int, reason: FinishReason = FinishReason.STOP, reward: float | None = 1.0
) -> Trajectory:
    mask = np.array([False] * 2 + [True] * length)
    zeros = np.zeros(2 + length, np.float32)
    return Trajectory(
        3, member, 3, 2, np.zeros(2 + length, np.int32), mask, zeros, zeros, mask.astype(np.int32) - 1, 1.0, reason, reward=reward
    )  # fmt: skip


def group(*members: Trajectory) -> Group:
    return Group(Ticket(3, 0, 2), Prompt(3, np.zeros(2, np.int32), ""), members)


def test_overlong_filters_zero_tokens_and_keep_the_sequence_and_its_reward() -> None:
    given = group(trajectory(0, 4, FinishReason.LENGTH), trajectory(1, 5), trajectory(2, 3))
    cut = without_overlong(given, truncated=True, longest=None)
    assert [int(t.mask.sum()) for t in cut.trajectories] == [0, 5, 3]
    long = without_overlong(given, truncated=False, longest=4)
    assert [int(t.mask.sum()) for t in long.trajectories] == [4, 0, 3]
    assert [t.reward for t in long.trajectories] == [1.0] * 3 and [t.tokens.size for t in long.trajectories] == [
        6,
        7,
        5,
    ]
    assert without_overlong(given, truncated=False, longest=None) is given


def test_kl_in_the_reward_by_hand() -> None:
    penalty = build_reward_penalty(kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    assert penalty is not None
    assert build_reward_penalty(kl_coef=0.5) is None and build_reward_penalty(kl_in="reward") is None
    assert not build_loss("grpo", kl_coef=0.5, kl_in="reward").needs_reference
    zeros = np.zeros(1, np.int64)
    batch = Microbatch(
        tokens=zeros, positions=zeros, node_length=zeros, node_parent=zeros, member_sequence=zeros, member_node=zeros,
        source=np.zeros(4, np.int64), target=zeros, sequence=np.array([0, 0, 2, 2]),
        sampler_logprobs=np.array([-1.0, -2.0, -0.5, np.nan], np.float32), temperature=np.ones(4, np.float32),
        advantages=np.zeros(4, np.float32), versions=np.zeros(4, np.int32),
        group_ids=np.array([3, 3, 3]), members=np.array([0, 1, 2]),
    )  # fmt: skip
    found, total = penalty.penalties(batch, np.array([-1.5, -1.0, -1.0, -7.0], np.float32))
    assert found == pytest.approx({(3, 0): 0.5 * (0.5 - 1.0), (3, 1): 0.0, (3, 2): 0.5 * 0.5})
    assert total == pytest.approx(0.0)
    less = kl.subtract_penalties(group(trajectory(0, 2), trajectory(1, 1), trajectory(2, 2, reward=None)), found)
    assert [t.reward for t in less.trajectories] == [1.25, 1.0, None]
