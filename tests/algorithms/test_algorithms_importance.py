"""Importance modes, veto, clamps and OPSM, worked in plain Python floats; and that the weights are detached."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithms_batches import random_batch, value_and_grad
from torch import Tensor

from asyncrl.algorithms.base import LossInputs
from asyncrl.algorithms.importance import IMPORTANCE_MODES, Importance, importance_weights
from asyncrl.algorithms.registry import build_loss
from asyncrl.algorithms.terms import off_policy_keep
from asyncrl.types import Normaliser

NAN = float("nan")
# Log-ratios old - sampler of four sequences (lengths 3, 2, 1, 0) with an unknown token in the first.
ROWS = [[0.9, NAN, -0.3], [-0.5, -0.6], [0.25], []]


def columns(rows: list[list[float]], old: float = -1.0, logp: float | None = None) -> LossInputs:
    d = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    old_S = torch.full_like(d, old)
    return LossInputs(
        logp_S=old_S.clone() if logp is None else torch.full_like(d, logp),
        entropy_S=None,
        sampler_logp_S=old_S - d,
        advantage_S=torch.ones_like(d),
        sequence_S=torch.tensor([b for b, row in enumerate(rows) for _ in row], dtype=torch.int64),
        sequences=len(rows),
        old_logp_S=old_S,
    )


def by_hand(mode: str, floor: float | None, cap: float | None) -> list[float]:
    result = []
    low, high = floor if floor is not None else -math.inf, cap if cap is not None else math.inf
    for row in ROWS:
        d = [0.0 if math.isnan(x) else x for x in row]
        for x in d:
            level = {"sequence": sum(d), "geometric": sum(d) / max(len(d), 1)}.get(mode.split("_")[0], x)
            if mode == "sequence_mask_tis":
                inside = low <= math.exp(sum(d) / len(d)) <= high
                result.append(math.exp(x) if inside else 0.0)
            elif mode.endswith("truncate") or mode == "tis":
                result.append(min(max(math.exp(level), low), high))
            else:
                result.append(math.exp(level) if low <= math.exp(level) <= high else 0.0)
    return result


@pytest.mark.parametrize(("floor", "cap"), [(None, 1.5), (0.8, 1.5), (0.8, None), (0.999, 1.2)])
@pytest.mark.parametrize("mode", sorted(IMPORTANCE_MODES))
def test_modes_by_hand(mode: str, floor: float | None, cap: float | None) -> None:
    n = Importance(mode=mode, floor=floor, cap=cap)
    weight_S, metrics = importance_weights(columns(ROWS), n)
    assert weight_S.tolist() == pytest.approx(by_hand(mode, floor, cap), rel=1e-12)
    token_level = IMPORTANCE_MODES[mode].level == "token"
    assert metrics["importance/ratio_mean"].normaliser is (Normaliser.TOKENS if token_level else Normaliser.SEQUENCES)


@pytest.mark.parametrize(("mode", "expected"), [("token_truncate", [0.5, 1.0, 1.0]), ("token_mask", [0.0, 1.0, 0.0])])
def test_ratios_of_0_at_the_bound_and_of_infinity(mode: str, expected: list[float]) -> None:
    n = Importance(mode=mode, floor=0.5, cap=1.0)
    weight_S, metrics = importance_weights(columns([[-800.0, 0.0, 800.0]]), n)
    assert weight_S.tolist() == expected
    assert float(metrics["importance/bounded_mean"].value) == 2


def test_veto_takes_out_the_whole_sequence_whatever_the_mode_made_of_it() -> None:
    rows = [[0.1, -9.5], [0.2, -9.0], [NAN]]
    n = Importance(mode="token_truncate", cap=2.0, veto=1e-4)
    weight_S, metrics = importance_weights(columns(rows), n)
    assert weight_S.tolist() == pytest.approx([0.0, 0.0, math.exp(0.2), math.exp(-9.0), 1.0], rel=1e-12)
    assert float(metrics["importance/vetoed_mean"].value) == 1
    assert metrics["importance/vetoed_mean"].normaliser is Normaliser.SEQUENCES


def test_log_clamp_comes_before_the_level() -> None:
    rows = [[30.0, -25.0, 1.0]]
    n = Importance(mode="sequence_truncate", cap=None, floor=1e-9, log_clamp=20.0)
    weight_S, _ = importance_weights(columns(rows), n)
    assert weight_S.tolist() == pytest.approx([math.exp(20 - 20 + 1)] * 3, rel=1e-12)


def test_only_the_samplers_nan_is_forgiven() -> None:
    inputs = columns([[0.1, NAN], [0.2]])
    assert inputs.old_logp_S is not None
    inputs.old_logp_S[2] = NAN
    for mode in IMPORTANCE_MODES:
        weight_S, _ = importance_weights(inputs, Importance(mode=mode, floor=0.5))
        assert weight_S.isnan().tolist() == [False, False, True], mode


def test_mismatch_by_hand() -> None:
    trainer = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    sampler = torch.tensor([-3.0, -1.5, -0.3, NAN], dtype=torch.float64)
    inputs = LossInputs(
        trainer, None, sampler, torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), 1
    )
    metrics = build_loss("dapo")(inputs).metrics
    k3 = sum(math.exp(d) - d - 1 for d in (2.0, 0.5, -0.7))
    assert float(metrics["mismatch_kl/mean"].value) == pytest.approx(k3, rel=1e-12)
    assert float(metrics["mismatch/abs_mean"].value) == pytest.approx(2.0 + 0.5 + 0.7, rel=1e-14)
    assert float(metrics["mismatch/ratio_max"].value) == pytest.approx(math.exp(2.0), rel=1e-12)
    assert float(metrics["mismatch/abs_max"].value) == 2.0
    assert float(metrics["mismatch/unknown_tokens"].value) == 1.0


@pytest.mark.parametrize("mode", sorted(IMPORTANCE_MODES))
def test_weights_are_detached_factors_of_the_surrogate_alone(mode: str) -> None:
    """With the weight the gradient is the plain one times the weight; the KL term's is untouched."""
    batch = random_batch(3, old=False)
    numbers: dict[str, Any] = {"importance_mode": mode, "importance_cap": 1.6, "importance_floor": 0.5}
    weight_S, _ = importance_weights(batch.pack(), Importance.from_values(numbers))
    _, grad_BT, _ = value_and_grad(batch, build_loss("dapo", kl_coef=0.1, **numbers), [range(7)])
    _, plain_BT, _ = value_and_grad(batch, build_loss("dapo", importance_cap=None), [range(7)])
    _, kl_BT, _ = value_and_grad(
        batch.with_advantages(0 * batch.advantage_B), build_loss("dapo", kl_coef=0.1), [range(7)]
    )
    mask = batch.mask_BT
    torch.testing.assert_close(grad_BT[mask], plain_BT[mask] * weight_S + kl_BT[mask], rtol=1e-12, atol=1e-15)
    assert weight_S.unique().numel() > 2 and not weight_S.requires_grad


def opsm(rows: list[list[float]], advantages: list[float], threshold: float) -> tuple[Tensor, float]:
    """`rows`: sampler - logp."""
    inputs = columns([[-x for x in row] for row in rows])
    advantage_S = torch.tensor([a for a, row in zip(advantages, rows, strict=True) for _ in row], dtype=torch.float64)
    keep_S, metrics = off_policy_keep(replace(inputs, advantage_S=advantage_S), threshold)
    return keep_S, float(metrics["opsm/dropped_mean"].value)


def test_opsm_drops_bad_sequences_that_the_policy_has_left() -> None:
    rows = [[1.0, 0.5], [1.0, 0.5], [1.0, 0.5], [0.5, 0.5], [2.0, NAN, NAN, NAN], []]
    keep_S, dropped = opsm(rows, [-1.0, 1.0, 0.0, -1.0, -1.0, -1.0], threshold=0.5)
    # 1: mean 0.75, A < 0, dropped. 2, 3: A >= 0. 4: exactly the threshold. 5: unknown tokens count as 0 in a mean of 4.
    assert keep_S.tolist() == [False] * 2 + [True] * 10
    assert dropped == 1


def test_opsm_leaves_kl_and_denominators_alone() -> None:
    batch = random_batch(6, shift=0.8)
    all_dropped = build_loss("grpo", importance_cap=None, kl_coef=0.1, off_policy_mask_threshold=1e-9)
    value, grad_BT, metrics = value_and_grad(
        batch.with_advantages(-batch.advantage_B.abs() - 0.1), all_dropped, [range(7)]
    )
    assert metrics["opsm/dropped_mean"] > 0
    keep_S, _ = off_policy_keep(batch.with_advantages(-batch.advantage_B.abs() - 0.1).pack(), 1e-9)
    silent = batch.mask_BT.clone()
    silent[batch.mask_BT] = ~keep_S
    _, kl_BT, _ = value_and_grad(
        batch.with_advantages(0 * batch.advantage_B), build_loss("grpo", kl_coef=0.1), [range(7)]
    )
    torch.testing.assert_close(grad_BT[silent], kl_BT[silent], rtol=1e-12, atol=1e-15)
    assert silent.any() and torch.isfinite(value)
