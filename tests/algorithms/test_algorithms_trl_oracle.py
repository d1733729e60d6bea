"""TRL 1.16 as the oracle: its own code, driven with stubs in float64, from rewards to gradients.

`GRPOTrainer._generate_and_score_completions` makes advantages and importance ratios out of given completions,
log-probs and rewards; `GRPOTrainer._compute_loss` makes loss and metrics. Both run unbound on a stand-in that holds
only what they read; the model's log-probs come from a leaf tensor, so gradients compare too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms_batches import MAX_LENGTH, PaddedBatch, random_batch, value_and_grad
from torch import Tensor

from asyncrl.algorithms.registry import build_loss

GROUP = 4
WEIGHTS = (1.0, 0.5, 2.0)
TRL_SPELLING = {
    "grpo": ("grpo", "token"), "dapo": ("dapo", "token"), "dr_grpo": ("dr_grpo", "token"), "gspo": ("grpo", "sequence"),
    "bnpo": ("bnpo", "token"), "cispo": ("cispo", "token"), "sapo": ("sapo", "token"), "luspo": ("luspo", "sequence"),
    "vespo": ("vespo", "token"),
}  # fmt: skip
CISPO_HIGH = 1.2  # TRL calls it epsilon_high, and takes it as an absolute bound


def padded_to_list(value_BT: Tensor, batch: PaddedBatch) -> list[list[Any]]:
    lengths = batch.completion_mask_BT.sum(1).tolist()
    return [row[:n] for row, n in zip(value_BT.tolist(), lengths, strict=True)]


def stand_in(
    batch: PaddedBatch,
    rewards_BF: Tensor,
    *,
    loss: str,
    scale_rewards: str,
    cap: float | None,
    beta: float,
    epsilon_high: float | None,
) -> SimpleNamespace:
    """What the two methods read of a GRPOTrainer: one process, one accumulation step, everything optional off."""
    loss_type, level = TRL_SPELLING[loss]
    width = int(batch.completion_mask_BT.sum(1).max())
    sampler = [
        [None if x != x else x for x in row]  # NaN travels as None, as from vLLM
        for row in padded_to_list(batch.sampler_BT, batch)
    ]
    ids = [[5] * len(row) for row in sampler]
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False, column=batch.old_BT)
    reference = SimpleNamespace(column=batch.reference_BT)

    def logps_of(model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        entropy_BT = getattr(model, "entropy", batch.entropy_BT)
        return model.column[:, :width], entropy_BT[:, :width], None

    return SimpleNamespace(
        accelerator=SimpleNamespace(
            device="cpu",
            num_processes=1,
            process_index=0,
            gather=lambda x: x,
            pad_across_processes=lambda x, dim, pad_index: x,
            sync_gradients=True,
            reduce=lambda x, reduction: x,
        ),
        args=SimpleNamespace(
            per_device_train_batch_size=len(ids),
            gradient_checkpointing_kwargs=None,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            use_bias_correction_kl=False,
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        num_iterations=1 if batch.old_BT is None else 2,  # 2: TRL takes old log-probs
        environment_factories=None,
        environments=None,
        tools=None,
        model=model,
        ref_model=reference,
        _generate=lambda prompts: (
            [[1, 2]] * len(prompts),
            ids,
            padded_to_list(batch.tool_mask_BT, batch),
            ["text"] * len(prompts),
            sampler,
            {},
            None,
            None,
        ),
        _calculate_rewards=lambda *args: rewards_BF,
        _get_per_token_logps_and_entropies=logps_of,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=cap is not None,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=cap,
        beta=beta,
        num_generations=GROUP,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
        reward_funcs=[None] * len(WEIGHTS),
        reward_func_names=["a", "b", "c"],
        scale_rewards=scale_rewards,
        _metrics={"train": defaultdict(list)},
        _logs={
            "prompt": [],
            "completion": [],
            "advantages": [],
            "rewards": defaultdict(list),
            "extra": defaultdict(list),
        },
        _pending_extra_logs={},
        _pending_metrics={},
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=CISPO_HIGH if loss == "cispo" else 0.2 if epsilon_high is None else epsilon_high,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
    )


def trl_step(
    trainer: Any, batch: PaddedBatch, stub: SimpleNamespace
) -> tuple[Tensor, Tensor, dict[str, float], Tensor]:
    """`(value, grad_BT, metrics, advantage_B)` of TRL."""
    value, grad_BT, _, metrics, advantage_B = trl_step_with_entropy(trainer, batch, stub)
    return value, grad_BT, metrics, advantage_B


def trl_step_with_entropy(
    trainer: Any, batch: PaddedBatch, stub: SimpleNamespace
) -> tuple[Tensor, Tensor, Tensor, dict[str, float], Tensor]:
    """The same with the gradient of the entropies [B, T] in third place."""
    leaf_BT = batch.logp_BT.clone().requires_grad_()
    entropy_BT = stub.model.entropy = batch.entropy_BT.clone().requires_grad_()
    for name in ("get_off_policy_mask", "get_gamma_weights"):  # static methods
        setattr(stub, name, getattr(trainer, name))
    stub.get_high_entropy_mask = partial(trainer.get_high_entropy_mask, stub)
    if stub.model.column is None:
        stub.model.column = batch.logp_BT  # on-policy: where TRL asks (with importance sampling), the same numbers
    inputs = trainer._generate_and_score_completions(stub, [{"prompt": "p"}] * len(batch.advantage_B))
    stub.model.column = leaf_BT
    value = trainer._compute_loss(stub, stub.model, inputs)
    value.backward()
    metrics = {key: values[-1] for key, values in stub._metrics["train"].items()}
    assert leaf_BT.grad is not None
    entropy_grad_BT = torch.zeros_like(entropy_BT) if entropy_BT.grad is None else entropy_BT.grad
    return value.detach(), leaf_BT.grad, entropy_grad_BT, metrics, inputs["advantages"]


def random_rewards(seed: int, sequences: int) -> Tensor:
    """[B, F] with entries that do not apply (NaN), and row 2 without any: unscorable."""
    generator = torch.Generator().manual_seed(seed)
    rewards_BF = torch.randn(sequences, len(WEIGHTS), generator=generator, dtype=torch.float64)
    rewards_BF[torch.rand(rewards_BF.shape, generator=generator) < 0.2] = float("nan")
    rewards_BF[2] = float("nan")
    return rewards_BF


CASES = list(product(TRL_SPELLING, (0.0, 0.07), (None, 1.3), (None, 0.28), (False, True)))


@pytest.mark.parametrize(("loss", "kl", "cap", "high", "old"), CASES)
def test_value_gradient_and_metrics_equal_trl(
    grpo_trainer: Any, loss: str, kl: float, cap: float | None, high: float | None, old: bool
) -> None:
    seed = CASES.index((loss, kl, cap, high, old))
    batch = random_batch(seed, sequences=3 * GROUP, old=old, nan_share=0.1)
    rewards_BF = random_rewards(seed, 3 * GROUP)
    scale = "none" if loss == "dr_grpo" else "group"
    stub = stand_in(batch, rewards_BF, loss=loss, scale_rewards=scale, cap=cap, beta=kl, epsilon_high=high)
    value, grad_BT, metrics, advantage_B = trl_step(grpo_trainer, batch, stub)
    bound = build_loss(loss, epsilon=0.2, epsilon_high=high, cispo_high=CISPO_HIGH, importance_cap=cap, kl_coef=kl)
    rows = list(range(3 * GROUP))
    ours, our_grad_BT, our_metrics = value_and_grad(
        batch.with_advantages(advantage_B), bound, [rows] if loss == "bnpo" else [rows[:5], rows[5:6], rows[6:]]
    )
    torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(our_grad_BT, grad_BT, rtol=1e-9, atol=1e-15)
    assert grad_BT.abs().max() > 1e-4

    assert our_metrics["loss"] == pytest.approx(float(value), rel=1e-9)
    for key in ["entropy"] + (["kl"] if kl else []):
        assert our_metrics[key] == pytest.approx(metrics[key], rel=1e-9), key
    if loss == "cispo":
        assert our_metrics["clip_ratio/high_mean"] == pytest.approx(metrics["cispo_clip_ratio"], rel=1e-6)
    elif loss not in ("sapo", "vespo"):
        for key in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            assert our_metrics[key] == pytest.approx(metrics[key], rel=1e-6), key  # TRL averages these in float32
        assert (our_metrics["clip_ratio/region_mean"] > 0) == old or loss in ("gspo", "luspo")
    if cap is not None:
        assert our_metrics["importance/ratio_mean"] == pytest.approx(
            metrics["sampling/importance_sampling_ratio/mean"], rel=1e-9
        )
        assert our_metrics["importance/ratio_max"] == cap == metrics["sampling/importance_sampling_ratio/max"]
        assert our_metrics["mismatch/abs_max"] == pytest.approx(
            metrics["sampling/sampling_logp_difference/max"], rel=1e-9
        )
        known = 1 - our_metrics["mismatch/unknown_tokens"] / float(batch.mask_BT.sum())
        assert known < 1
        assert our_metrics["mismatch/abs_mean"] / known == pytest.approx(
            metrics["sampling/sampling_logp_difference/mean"], rel=1e-9
        )
    else:
        assert "importance/ratio_mean" not in our_metrics


def test_clip_metrics_of_gspo_are_exercised(grpo_trainer: Any) -> None:
    """The case table's ratios are too mild for a sequence ratio to leave the clip: here they are not."""
    batch = random_batch(3, sequences=8 * GROUP, shift=2.0)
    rewards_BF = random_rewards(3, 8 * GROUP)
    stub = stand_in(batch, rewards_BF, loss="gspo", scale_rewards="group", cap=None, beta=0.0, epsilon_high=0.1)
    value, grad_BT, metrics, advantage_B = trl_step(grpo_trainer, batch, stub)
    bound = build_loss("gspo", epsilon_high=0.1, importance_cap=None)
    ours, our_grad_BT, our_metrics = value_and_grad(batch.with_advantages(advantage_B), bound, [range(8 * GROUP)])
    torch.testing.assert_close(ours, value, rtol=1e-9, atol=0)
    torch.testing.assert_close(our_grad_BT, grad_BT, rtol=1e-9, atol=1e-15)
    for side in ("low", "high", "region"):
        assert our_metrics[f"clip_ratio/{side}_mean"] == pytest.approx(metrics[f"clip_ratio/{side}_mean"], rel=1e-6)
        assert our_metrics[f"clip_ratio/{side}_mean"] > 0


def test_the_oracle_is_the_pinned_one(grpo_trainer: Any) -> None:
    assert sys.modules["trl"].__version__.startswith("1.16.")
