"""The gradient test: streamed, split, shuffled, prefix-shared == one shot, plain transformers, padded (float64, 1e-10)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_helpers import MAX_LENGTH, STREAMED, make_group, oracle_gradient, tiny_module, tiny_policy

from asyncrl.algorithms.base import Loss, LossInputs, LossSums, MetricSum
from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Microbatch, Normaliser, StepResult

LOSSES = STREAMED


def batch(seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [make_group(rng, i, masked=(1,) if i == 2 else (), holes=i in (1, 3)) for i in range(5)]


def cut(groups: list, pieces: int, seed: int = 0) -> list[Microbatch]:
    """The same trajectories in `pieces` microbatches, in another order of groups and microbatches."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(groups))
    for budget in range(400, 4, -1):
        found = pack_groups([groups[i] for i in order], budget)
        if len(found) == pieces:
            rng.shuffle(found)
            return found
    raise AssertionError(f"no budget cuts the batch into {pieces}")


def run(
    policy, microbatches: list[Microbatch], loss: Loss, **config: object
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    trainer = TorchTrainer(
        policy, TrainConfig(lr=0.1, **{"grad_clip": None, **config}), max_completion_length=MAX_LENGTH
    )
    trainer.begin_train_step(loss)
    for microbatch in microbatches:
        trainer.train_microbatch(microbatch)
    result = trainer.finish_train_step()
    return result, {name: grad.clone() for name, grad in policy.flat.named_grads()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", LOSSES)
def test_split_step_equals_one_shot_batch_gradient(name: str, kind: str, exact_norms: None) -> None:
    groups = batch()
    loss = build_loss(name)
    expected, gradients = oracle_gradient(tiny_module(kind), groups, loss)
    for pieces in (1, 2, 7):
        result, found = run(tiny_policy(kind=kind), cut(groups, pieces, seed=pieces), loss)
        assert result.microbatches == pieces and result.sequences == 20
        assert result.loss == pytest.approx(expected, abs=1e-12)
        assert sum(float(g.abs().sum()) for g in gradients.values()) > 1e-2
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-12)


def test_untied_head(exact_norms: None) -> None:
    groups, loss = batch(), build_loss("grpo")
    _, gradients = oracle_gradient(tiny_module(tied=False), groups, loss)
    _, found = run(tiny_policy(tied=False), cut(groups, 2), loss)
    assert set(found) == set(gradients) and "lm_head.weight" in found
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_number_and_order_of_microbatches_change_nothing(name: str) -> None:
    groups, loss = batch(3), build_loss(name)
    whole, gradients = run(tiny_policy(), cut(groups, 1), loss)
    for pieces in (2, 7):
        result, found = run(tiny_policy(), cut(groups, pieces, seed=pieces), loss)
        assert result.loss == pytest.approx(whole.loss, abs=1e-12)
        assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-12)
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-12)


def test_gradient_checkpointing_is_equal() -> None:
    groups, loss = batch(), build_loss("grpo")
    _, plain = run(tiny_policy(), cut(groups, 2), loss)
    policy = tiny_policy()
    calls: list[int] = []
    assert policy.fused is not None
    real = policy.fused.forward

    def spy(layer, *rest, **options):  # type: ignore[no-untyped-def]
        calls.append(layer.number)
        return real(layer, *rest, **options)

    policy.fused.forward = spy  # type: ignore[method-assign]
    _, checkpointed = run(policy, cut(groups, 2), loss, gradient_checkpointing=True)
    assert calls.count(0) == 4  # each of two microbatches ran the layer again in backward
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-14)


def test_entropy_term_with_gradient(exact_norms: None) -> None:
    """An entropy bonus reaches the weights: compared with central differences of the loss."""

    def bonus(inputs: LossInputs) -> LossSums:
        assert inputs.entropy_S is not None
        total = -inputs.entropy_S.sum()
        return LossSums(total, {"loss": MetricSum(total.detach(), Normaliser.TOKENS)})

    loss = Loss("entropy", bonus, Normaliser.TOKENS, needs_entropy_grad=True)
    groups = batch()
    _, gradients = run(tiny_policy(), cut(groups, 2), loss)
    name = "model.layers.1.mlp.up_proj.weight"
    values = []
    for step in (1e-5, -1e-5):
        policy = tiny_policy()
        dict(policy.flat.named_masters())[name][3, 2] += step
        values.append(run(policy, cut(groups, 2), loss)[0].loss)
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(gradients[name][3, 2]), rel=1e-6)


def test_reference_and_old_columns_reach_the_loss() -> None:
    groups = batch()
    loss = build_loss("grpo", kl_coef=0.5)
    policy = tiny_policy()
    trainer = TorchTrainer(policy, TrainConfig(lr=0.05), max_completion_length=MAX_LENGTH, needs_reference=True)
    for expected_zero in (True, False):
        trainer.begin_train_step(loss)
        for microbatch in cut(groups, 2):
            reference = trainer.compute_logprobs(microbatch, "reference")
            trainer.train_microbatch(replace(microbatch, reference_logprobs=reference))
        kl = trainer.finish_train_step().metrics["kl"]
        assert (abs(kl) < 1e-10) == expected_zero and kl >= 0


def test_bfloat16_accumulates_in_float32() -> None:
    """Many equal microbatches: a bfloat16 sum of 300 terms would be off by percents."""
    groups, loss = batch()[:1], build_loss("dapo")
    (microbatch,) = cut(groups, 1)
    _, once = run(tiny_policy("bfloat16"), [microbatch], loss)
    policy = tiny_policy("bfloat16")
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16} and policy.flat.grad.dtype == torch.float32
    _, many = run(policy, [microbatch] * 300, loss)
    for name, gradient in once.items():  # N grows with the sum, so the mean must stay
        torch.testing.assert_close(many[name], gradient, rtol=1e-4, atol=1e-6)


def test_bfloat16_is_near_float32() -> None:
    groups, loss = batch(), build_loss("grpo")
    exact, gradients = run(tiny_policy("float32"), cut(groups, 1), loss)
    rounded, found = run(tiny_policy("bfloat16"), cut(groups, 1), loss)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)
    ours, theirs = (torch.cat([g.flatten() for g in gs.values()]) for gs in (found, gradients))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98
