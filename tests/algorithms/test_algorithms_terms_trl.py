"""TRL 1.16 as the oracle for what every loss may have besides its surrogate: importance modes, OPSM, the top-entropy mask,
the entropy bonus, delta and the bias-corrected KL; and where our convention differs from TRL's on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithms_batches import PaddedBatch, random_batch, value_and_grads
from test_algorithms_trl_oracle import CISPO_HIGH, GROUP, TRL_SPELLING, random_rewards, stand_in, trl_step_with_entropy
from torch import Tensor

from asyncrl.algorithms.registry import build_loss

LOSSES = sorted(TRL_SPELLING)
SIZE = 3 * GROUP


def float32_entropies(batch: PaddedBatch) -> PaddedBatch:
    """TRL takes the quantile in float32: with entropies of that precision both choose the same tokens."""
    return replace(batch, entropy_BT=batch.entropy_BT.float().double())


def compare(
    trainer: Any, batch: PaddedBatch, loss: str, stub_changes: dict[str, Any], beta: float = 0.0, **numbers: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Value and both gradients equal to 1e-9; `(our metrics, TRL's)`."""
    stub = stand_in(
        batch, random_rewards(1, SIZE), loss=loss, scale_rewards="group", cap=numbers.get("importance_cap"), beta=beta,
        epsilon_high=0.28,
    )  # fmt: skip
    if "importance_floor" in numbers:
        stub.use_vllm = stub.vllm_importance_sampling_correction = True
    for name, value in stub_changes.items():
        setattr(stub.args if hasattr(stub.args, name) else stub, name, value)
    value, grad_BT, entropy_grad_BT, metrics, advantage_B = trl_step_with_entropy(trainer, batch, stub)
    bound = build_loss(
        loss, **{"epsilon_high": 0.28, "cispo_high": CISPO_HIGH, "importance_cap": None, "kl_coef": beta, **numbers}
    )
    batch = batch.with_advantages(advantage_B)
    if "top_entropy_quantile" in numbers:
        batch = batch.with_top_entropy(numbers["top_entropy_quantile"])
    parts: list[range] = [range(SIZE)] if loss == "bnpo" else [range(4), range(4, 5), range(5, SIZE)]
    ours, our_grad_BT, our_entropy_grad_BT, our_metrics = value_and_grads_kept(batch, bound, parts)
    torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(our_grad_BT, grad_BT, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(our_entropy_grad_BT, entropy_grad_BT, rtol=1e-9, atol=1e-15)
    assert grad_BT.abs().max() > 1e-4
    return our_metrics, metrics


def value_and_grads_kept(
    batch: PaddedBatch, loss: Any, parts: list[range]
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """As the trainer does after a survey: the bonus is a mean over the tokens that the top-entropy mask keeps."""
    if batch.keep_BT is not None:
        kept = float((batch.keep_BT & batch.mask_BT).sum())
        loss = loss.with_bonus_scale(batch.count(loss.normaliser, len(parts)) / kept)
    return value_and_grads(batch, loss, parts)


@pytest.mark.parametrize(("floor", "cap"), [(None, 1.3), (0.8, 1.3), (0.8, None)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss", LOSSES)
def test_importance_modes_equal_trl(
    grpo_trainer: Any, loss: str, mode: str, floor: float | None, cap: float | None
) -> None:
    if loss == "vespo" and mode.startswith("sequence"):
        pytest.skip("both refuse it: vespo multiplies the weights of a sequence's tokens itself")
    changes = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": floor,
        "vllm_importance_sampling_clip_max": cap,
    }
    batch = random_batch(5, sequences=SIZE, nan_share=0.1)
    ours, theirs = compare(
        grpo_trainer, batch, loss, changes, beta=0.05, importance_mode=mode, importance_floor=floor, importance_cap=cap
    )
    mean = theirs["sampling/importance_sampling_ratio/mean"]
    if mode.startswith("sequence"):  # on purpose: TRL counts a fully masked sequence as ratio 1, we as 0
        mean -= float((batch.mask_BT.sum(1) == 0).sum()) / SIZE
    assert ours["importance/ratio_mean"] == pytest.approx(mean, rel=1e-9)
    assert ours["importance/ratio_max"] == pytest.approx(theirs["sampling/importance_sampling_ratio/max"], rel=1e-9)
    assert 0 < ours["importance/bounded_mean"] < 1


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_opsm_equals_trl(grpo_trainer: Any, loss: str, old: bool) -> None:
    batch = random_batch(7, sequences=SIZE, old=old, nan_share=0.1, shift=0.6)
    changes = {"off_policy_mask_threshold": 0.05}
    ours, _ = compare(grpo_trainer, batch, loss, changes, beta=0.05, off_policy_mask_threshold=0.05)
    assert 0 < ours["opsm/dropped_mean"] < 1


@pytest.mark.parametrize("loss", LOSSES)
def test_bias_corrected_kl_equals_trl(grpo_trainer: Any, loss: str) -> None:
    batch = random_batch(9, sequences=SIZE)
    ours, theirs = compare(
        grpo_trainer, batch, loss, {"use_bias_correction_kl": True}, beta=0.3, use_bias_correction_kl=True
    )
    assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-9)


@pytest.mark.parametrize("delta", [1.4, 4.0])
@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo"])
def test_two_sided_clip_equals_trl_and_dual_clip(grpo_trainer: Any, loss: str, delta: float) -> None:
    batch = random_batch(4, sequences=SIZE, shift=1.2)
    compare(grpo_trainer, batch, loss, {"delta": delta}, delta=delta)
    compare(grpo_trainer, batch, loss, {"delta": delta}, dual_clip=delta)


@pytest.mark.parametrize("top", [0.2, 0.55])
@pytest.mark.parametrize("loss", LOSSES)
def test_top_entropy_mask_equals_trl(grpo_trainer: Any, loss: str, top: float) -> None:
    batch = float32_entropies(random_batch(12, sequences=SIZE))
    compare(grpo_trainer, batch, loss, {"top_entropy_quantile": top}, beta=0.05, top_entropy_quantile=top)


@pytest.mark.parametrize("top", [0.3, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_entropy_bonus_equals_trl(grpo_trainer: Any, loss: str, top: float) -> None:
    """A mean over (kept) tokens whatever the loss is divided by; TRL here sees the whole step as one microbatch."""
    batch = float32_entropies(random_batch(13, sequences=SIZE))
    changes = {"_entropy_bonus_enabled": True, "entropy_coef": 0.02, "top_entropy_quantile": top}
    numbers = {"entropy_coef": 0.02} | ({"top_entropy_quantile": top} if top < 1 else {})
    compare(grpo_trainer, batch, loss, changes, **numbers)


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_controlled_entropy_coefficient_equals_trls(grpo_trainer: Any, loss: str) -> None:
    """Six steps through both sides of the target, both ends of the range included."""
    begin, target, delta = 0.006, 1.0, 0.005
    bound = build_loss(
        loss, epsilon_high=0.28, importance_cap=None, entropy_coef=begin, entropy_target=target, entropy_coef_delta=delta,
    )  # fmt: skip
    control, applied = bound.control, []
    assert control is not None
    limits = {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": delta, "entropy_target": target}
    state = {"entropy_coef": begin, "_last_world_entropy": float("inf"), "_entropy_window_stats": None}
    for step, mean in enumerate((1.2, 1.5, 0.4, 0.6, 0.9, 1.1)):
        batch = random_batch(40 + step, sequences=SIZE)
        share = mean / float(batch.entropy_BT[batch.mask_BT].mean())
        batch = replace(batch, entropy_BT=batch.entropy_BT * share)
        stub = stand_in(
            batch, random_rewards(1, SIZE), loss=loss, scale_rewards="group", cap=None, beta=0.0, epsilon_high=0.28
        )
        vars(stub).update(state, use_adaptive_entropy=True, _entropy_bonus_enabled=True)
        vars(stub.args).update(limits)
        value, _, entropy_grad_BT, _, advantage_B = trl_step_with_entropy(grpo_trainer, batch, stub)
        applied.append(control.next_coefficient)
        ours, _, our_grad_BT, metrics = value_and_grads(
            batch.with_advantages(advantage_B), bound.with_control(control), [range(4), range(4, SIZE)]
        )
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(our_grad_BT, entropy_grad_BT, rtol=1e-9, atol=1e-15)
        control = control.after(metrics["entropy"])
        state = {name: getattr(stub, name) for name in state}
        assert control.coefficient == pytest.approx(state["entropy_coef"], abs=1e-15)
        assert control.entropy == pytest.approx(state["_last_world_entropy"], rel=1e-9)
    # nothing while the entropy is above the target; 0.006 fell to 0.001 and to the floor of 0 meanwhile
    assert applied == pytest.approx([0, 0, 0, 0.005, 0.01, 0.015], abs=1e-15)


def test_a_trainers_nan_ends_a_run_where_trl_forgives_it(grpo_trainer: Any) -> None:
    """On purpose: TRL's importance ratio is 1 where *either* log-prob is NaN; ours forgives the sampler's alone."""
    batch = random_batch(2, sequences=SIZE)
    assert batch.old_BT is not None
    row, column = batch.mask_BT.nonzero()[0].tolist()
    batch.old_BT[row, column] = float("nan")
    loss = build_loss("dapo", force_on_policy=False)
    assert value_and_grads(batch, loss, [range(SIZE)])[0].isnan()
