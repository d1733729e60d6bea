"""The formulas worked in plain Python floats, token by token, with no tensor in sight."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from algorithms_batches import MAX_LENGTH, PaddedBatch, random_batch, value_and_grad

from asyncrl.algorithms import advantages, kl
from asyncrl.algorithms.base import LossInputs, LossSums
from asyncrl.algorithms.registry import LOSSES, build_advantage, build_loss
from asyncrl.errors import ConfigError
from asyncrl.types import Normaliser

LOW, HIGH, CAP, BETA = 0.2, 0.3, 1.4, 0.05


def rows_of(batch: PaddedBatch) -> list[list[list[float]]]:
    """Per sequence its scored tokens: (logp, old, sampler, reference, advantage)."""
    old_BT = batch.logp_BT if batch.old_BT is None else batch.old_BT
    advantage_BT = batch.advantage_B[:, None].expand_as(batch.logp_BT)
    columns = torch.stack([batch.logp_BT, old_BT, batch.sampler_BT, batch.reference_BT, advantage_BT], -1)
    return [row[mask].tolist() for row, mask in zip(columns, batch.mask_BT, strict=True)]


def surrogate_by_hand(name: str, ratio: float, logp: float, advantage: float, phi: float) -> float:
    if name == "cispo":
        return -min(ratio, 1.3) * advantage * logp
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if name == "vespo":
        return -phi * advantage * logp
    if name == "reinforce":
        return -advantage * logp
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -min(ratio * advantage, clipped * advantage)


def loss_by_hand(batch: PaddedBatch, name: str, cap: float | None, beta: float) -> float:
    rows = rows_of(batch)
    per_row = []
    for row in rows:
        terms = []
        mean_log_ratio = sum(logp - old for logp, old, *_ in row) / max(len(row), 1)
        weights = [
            1.0 if cap is None or math.isnan(sampler) else min(math.exp(old - sampler), cap)
            for _, old, sampler, *_ in row
        ]
        log_w = sum(logp - old for logp, old, *_ in row) + sum(map(math.log, weights))
        log_w = min(max(log_w, math.log(1e-8)), 20.0)
        for (logp, old, _, reference, advantage), weight in zip(row, weights, strict=True):
            ratio = math.exp(mean_log_ratio if name in ("gspo", "luspo") else logp - old)
            k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            phi = math.exp(decay + k * log_w - decay * math.exp(log_w))
            term = surrogate_by_hand(name, ratio, logp, advantage, phi)
            if name != "vespo":
                term *= weight
            term += beta * (math.exp(reference - logp) - (reference - logp) - 1)
            terms.append(term)
        per_row.append(terms)
    if name in ("grpo", "gspo", "sapo"):
        return sum(sum(terms) / max(len(terms), 1) for terms in per_row) / len(rows)
    if name == "luspo":
        return sum(map(sum, per_row)) / len(rows)
    if name == "dr_grpo":
        return sum(map(sum, per_row)) / (len(rows) * MAX_LENGTH)
    assert name in ("dapo", "bnpo", "cispo", "vespo", "reinforce", "ppo_clip")
    return sum(map(sum, per_row)) / sum(map(len, per_row))


CLIPPED = ["bnpo", "dapo", "dr_grpo", "grpo", "gspo", "luspo", "ppo_clip"]


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_equals_the_formula(name: str, old: bool, cap: float | None, beta: float) -> None:
    batch = random_batch(11, old=old, nan_share=0.15)
    loss = build_loss(name, epsilon=LOW, epsilon_high=HIGH, importance_cap=cap, kl_coef=beta, cispo_high=1.3)
    value, _, metrics = value_and_grad(batch, loss, [range(7)])
    assert float(value) == pytest.approx(loss_by_hand(batch, name, cap, beta), rel=1e-12)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-15)


def one_token(logp: float, old: float | None, advantage: float, sampler: float | None = None) -> LossInputs:
    def column(x: float) -> torch.Tensor:
        return torch.tensor([x], dtype=torch.float64)

    return LossInputs(
        logp_S=column(logp).requires_grad_(), entropy_S=None, sampler_logp_S=column(logp if sampler is None else sampler),
        advantage_S=column(advantage), sequence_S=torch.tensor([0]), sequences=1,
        old_logp_S=None if old is None else column(old),
    )  # fmt: skip


def check(inputs: LossInputs, sums: LossSums, value: float, gradient: float) -> None:
    sums.total.backward()
    assert inputs.logp_S.grad is not None
    assert (float(sums.total.detach()), float(inputs.logp_S.grad)) == pytest.approx((value, gradient), abs=1e-12)


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.5, 2.0, -2.6, 0.0, 0, 1),  # clipped above: 1.3 x 2
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # a bad token made likelier is never clipped
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # clipped below: 0.8 x 2
        (0.5, 2.0, -1.0, -1.0, 0, 0),
        (1.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_the_four_corners_of_the_clip(
    name: str, ratio: float, advantage: float, value: float, gradient: float, low: int, high: int
) -> None:
    inputs = one_token(-1.0, -1.0 - math.log(ratio), advantage)
    sums = build_loss(name, epsilon=LOW, epsilon_high=HIGH, importance_cap=None)(inputs)
    check(inputs, sums, value, gradient)
    assert float(sums.metrics["clip_ratio/low_mean"].value) == low
    assert float(sums.metrics["clip_ratio/high_mean"].value) == high
    assert float(sums.metrics["clip_ratio/region_mean"].value) == low + high


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # bounded at c |A|
        (2.9, -2.0, 5.8, 5.8),
        (0.5, -2.0, 1.6, 0.0),  # clipped below, as without
        (5.0, 2.0, -2.4, 0.0),  # clipped above, as without
    ],
)
def test_dual_clip(ratio: float, advantage: float, value: float, gradient: float) -> None:
    inputs = one_token(-1.0, -1.0 - math.log(ratio), advantage)
    check(inputs, build_loss("ppo_clip", dual_clip=3.0, importance_cap=None)(inputs), value, gradient)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    """Ratio 1: the gradient is `-A w` per token, with the weight that the aggregation gives the token."""
    batch = random_batch(5, old=False)
    _, grad_BT, metrics = value_and_grad(batch, build_loss(name, importance_cap=None), [range(7)])
    length_B = batch.mask_BT.sum(1).clamp(min=1).double()
    one_B = torch.ones(7, dtype=torch.float64)
    share_B = {
        "grpo": 1 / (7 * length_B),
        "gspo": 1 / (7 * length_B),
        "dapo": one_B / batch.mask_BT.sum(),
        "dr_grpo": one_B / (7 * MAX_LENGTH),
        "sapo": 1 / (7 * length_B),
        "luspo": one_B / 7,
    }.get(name, one_B / batch.mask_BT.sum())
    torch.testing.assert_close(grad_BT, -(batch.advantage_B * share_B)[:, None] * batch.mask_BT, rtol=1e-14, atol=0)
    assert metrics.get("clip_ratio/region_mean", 0) == 0


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("column", [None, "sampler", "other"])
def test_sampler_as_centre_of_the_clip_excludes_the_correction(name: str, column: str | None) -> None:
    """`old_logprobs: sampler` equals a clip around the sampler's column without importance weight."""
    batch = random_batch(21, old=column == "other")
    rows = list(range(7))
    given = batch.replace_old(batch.sampler_BT) if column == "sampler" else batch
    centred = build_loss(name, importance_cap=1.1, old_logprobs="sampler")
    plain = build_loss(name, importance_cap=None)
    value, grad_BT, metrics = value_and_grad(given, centred, [rows])
    expected, expected_grad_BT, _ = value_and_grad(batch.replace_old(batch.sampler_BT), plain, [rows])
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(grad_BT, expected_grad_BT, rtol=1e-14, atol=0)
    assert not any(key.startswith("importance/") for key in metrics)
    difference = (batch.logp_BT - batch.sampler_BT)[batch.mask_BT]
    assert metrics["mismatch/abs_mean"] == pytest.approx(float(difference.abs().mean()), rel=1e-12)


def test_sampler_centre_with_nan_stays_on_policy() -> None:
    inputs = one_token(-1.0, None, 2.0, sampler=float("nan"))
    check(inputs, build_loss("grpo", old_logprobs="sampler")(inputs), -2.0, -2.0)


def test_metrics_have_the_declared_normalisers() -> None:
    batch = random_batch(4, nan_share=0.2)
    for name, entry in LOSSES.items():
        loss = build_loss(name, kl_coef=0.1)
        metrics = loss(batch.pack()).metrics
        assert metrics["loss"].normaliser is entry.normaliser is loss.normaliser
        assert loss.needs_reference and not loss.needs_entropy_grad
        clip = Normaliser.SEQUENCES if name in ("gspo", "luspo") else Normaliser.TOKENS
        if name in CLIPPED:
            assert {metrics[f"clip_ratio/{side}_mean"].normaliser for side in ("low", "high", "region")} == {clip}
        for key in ("kl", "entropy", "mismatch_kl/mean", "mismatch/abs_mean", "importance/ratio_mean"):
            assert metrics[key].normaliser is Normaliser.TOKENS
        for metric in metrics.values():
            assert metric.value.ndim == 0 and not metric.value.requires_grad
    assert not build_loss("grpo").needs_reference


@pytest.mark.parametrize("estimator", kl.KL_ESTIMATORS)
def test_kl_values_and_gradients(estimator: str) -> None:
    by_hand = {
        "k1": lambda d: (-d, 1.0),
        "k2": lambda d: (d * d / 2, -d),
        "mse": lambda d: (d * d / 2, -d),
        "k3": lambda d: (math.exp(d) - d - 1, 1 - math.exp(d)),
        "abs": lambda d: (abs(d), math.copysign(1, -d)),
    }[estimator]
    differences = [-1.5, -0.1, 0.3, 2.0]
    logp = torch.full((4,), -2.0, dtype=torch.float64, requires_grad=True)
    values = kl.estimate(estimator, logp, torch.tensor(differences, dtype=torch.float64) - 2.0)
    values.sum().backward()
    assert logp.grad is not None
    for d, value, gradient in zip(differences, values.tolist(), logp.grad.tolist(), strict=True):
        assert (value, gradient) == pytest.approx(by_hand(d), rel=1e-12)


def test_expected_gradients_of_kl_estimators() -> None:
    """The module's claims, exactly, over five tokens: k1 has none, k2 the reverse KL's, k3 the forward KL's; times the ratio k1 and
    k3 both have that of the reverse KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    reverse = gradient((logp.exp() * (logp - reference)).sum())
    forward = gradient((reference.exp() * (reference - logp)).sum())
    k1, k2, k3 = (kl.estimate(name, logp, reference) for name in ("k1", "k2", "k3"))
    torch.testing.assert_close(gradient((p * k1).sum()), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(gradient((p * k2).sum()), reverse)
    torch.testing.assert_close(gradient((p * k3).sum()), forward)
    ratio = (logp - logp.detach()).exp()
    for estimate in (k1, k3):
        torch.testing.assert_close(gradient((p * estimate * ratio).sum()), reverse)


def test_k3_keeps_its_digits_in_float32() -> None:
    d = torch.tensor([1e-4, -1e-4, 3e-4])
    value = kl.estimate("k3", torch.zeros(3), d)
    assert (value > 0).all()
    torch.testing.assert_close(value, (d * d / 2 + d**3 / 6), rtol=5e-3, atol=0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_unscorable_members_are_left_out(name: str) -> None:
    estimator = build_advantage(name)
    full = estimator([1.0, 2.0, 4.0, 5.0])
    holed = estimator([1.0, None, 2.0, float("nan"), 4.0, 5.0])
    assert holed[[0, 2, 4, 5]].tolist() == full.tolist()
    assert holed[[1, 3]].tolist() == [0.0, 0.0]
    assert estimator(np.array([1.0, np.nan, 2.0], dtype=np.float32)).dtype == np.float64


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages.grpo([1.0, float("inf")])
    with pytest.raises(ValueError, match=r"'length' is inf"):
        advantages.combine_components({"length": float("inf")}, {"length": 1.0})


def test_combine_components() -> None:
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    assert advantages.combine_components({"a": 1.0, "b": 4.0, "c": 0.25}, weights) == 2.5
    assert advantages.combine_components({"a": 1.0, "b": None, "c": float("nan")}, weights) == 1.0
    assert advantages.combine_components({"a": None, "b": float("nan")}, weights) is None
    assert advantages.combine_components({}, weights) is None
    assert advantages.combine_components({"b": 0.0}, weights) == 0.0
    with pytest.raises(ValueError, match=r"'d' has no weight; weights exist for: a, b, c"):
        advantages.combine_components({"d": 1.0}, weights)


def test_unknown_names_accuse_precisely() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown loss 'drgrpo'; did you mean 'dr_grpo'\? Known: bnpo, cispo, dapo, dr_grpo"
    ):
        build_loss("drgrpo")
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'gppo'; did you mean 'grpo'\?"):
        build_advantage("gppo")


def test_kl_without_a_reference_column_says_so() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.kl\.coef is 0\.1, but .*`reference_logp_S`"):
        build_loss("grpo", kl_coef=0.1)(one_token(-1.0, None, 1.0))


def test_advantages_import_no_torch() -> None:
    """A reward worker combines components: importing torch there would cost it seconds."""
    code = "import sys, asyncrl.algorithms.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
