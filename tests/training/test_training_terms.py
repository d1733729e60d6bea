"""Losses with every term on, through the split step: the survey, and losses that need the whole step. The oracle is the one-shot
gradient of plain transformers over padded rows (float64)."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import (
    HEADS,
    MAX_LENGTH,
    STREAMED,
    everything,
    make_group,
    oracle_gradient,
    tiny_module,
    tiny_policy,
    train_step,
    with_columns,
)

from asyncrl.algorithms.base import Loss, MetricSum, Normaliser
from asyncrl.algorithms.registry import LOSSES, build_loss
from asyncrl.checkpoint.state import check_plain
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.distributed.collectives import Collectives
from asyncrl.errors import TrainStepError
from asyncrl.models.head.logprobs import token_logprobs
from asyncrl.models.head.output import NO_TRANSFORM
from asyncrl.training.accumulators import Metrics
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Microbatch, StepResult


def batch(seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [make_group(rng, i, masked=(1,) if i == 2 else (), holes=i in (1, 3)) for i in range(5)]


def cut(groups: list, budget: int, seed: int, columns: bool = True) -> list[Microbatch]:
    """In another order of groups and microbatches; a long sequence has a microbatch of its own."""
    rng = np.random.default_rng(seed)
    found = pack_groups([groups[i] for i in rng.permutation(len(groups))], budget)
    rng.shuffle(found)
    return [with_columns(microbatch) for microbatch in found] if columns else found


def run(
    microbatches: list[Microbatch], loss: Loss, *, policy: object = None, **config: object
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    trainer = TorchTrainer(
        policy or tiny_policy(), TrainConfig(lr=0.1, grad_clip=None, **config), max_completion_length=MAX_LENGTH
    )
    result = train_step(trainer, microbatches, loss)
    return result, {name: grad.clone() for name, grad in trainer.policy.flat.named_grads()}


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-11) -> None:
    assert sum(float(g.abs().sum()) for g in expected.values()) > 1e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("name", STREAMED)
def test_a_split_step_equals_one_shot(name: str, terms: bool, exact_norms: None) -> None:
    """Every loss by itself, on-policy, and with every term."""
    groups, loss = batch(), everything(name) if terms else build_loss(name)
    expected, gradients = oracle_gradient(tiny_module(), groups, loss, columns_too=terms)
    for budget in (400, 60, 25):
        pieces = cut(groups, budget, budget, terms)
        result, found = run(pieces, loss)
        assert result.microbatches == len(pieces) and (len(pieces) == 1) == (budget == 400)
        assert result.sequences == 20 and result.loss == pytest.approx(expected, abs=1e-11)
        close(found, gradients)
        if terms:
            assert {"kl", "opsm/dropped_mean", "importance/vetoed_mean", "entropy"} <= set(result.metrics)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", *HEADS])
def test_models_and_what_they_do_around_their_heads(kind: str, tied: bool, exact_norms: None) -> None:
    groups, loss = batch(), everything("grpo")
    expected, gradients = oracle_gradient(tiny_module(kind, tied), groups, loss, columns_too=True)
    policy = tiny_policy(kind=kind, tied=tied)
    assert (policy.transform != NO_TRANSFORM) == (kind in ("capped", "scaled"))
    assert (policy.head.bias is not None) == (kind == "biased")
    result, found = run(cut(groups, 25, 25), loss, policy=policy)
    assert set(found) == set(gradients) and ("lm_head.weight" in found) == (not tied)
    assert result.loss == pytest.approx(expected, abs=1e-11)
    close(found, gradients)


@pytest.mark.parametrize("keep_logits", [0, 1 << 30])
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_off_policy_masking_at_mixed_temperatures_through_a_chunked_head(
    name: str, keep_logits: int, exact_norms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end inside sequences, logits computed again or kept: the oracle has all logits of the batch at once."""
    head = partial(token_logprobs, chunk=7, keep_logits=keep_logits)
    monkeypatch.setattr("asyncrl.training.passes.token_logprobs", head)
    rng = np.random.default_rng(3)
    groups = [make_group(rng, i, holes=i == 1, temperature=0.5 + 0.4 * i) for i in range(4)]
    loss = everything(name)
    expected, gradients = oracle_gradient(tiny_module(), groups, loss, columns_too=True)
    result, found = run(cut(groups, 400, 0), loss)
    assert result.microbatches == 1 and result.tokens > 50
    assert 0 < result.metrics["opsm/dropped_mean"] < 1
    assert result.loss == pytest.approx(expected, abs=1e-11)
    close(found, gradients)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_term_surveyed_equals_one_shot(name: str, exact_norms: None) -> None:
    """The step is counted first; with the top-entropy mask its entropies are sorted first."""
    groups, loss = batch(1), everything(name, top=0.4)
    expected, gradients = oracle_gradient(tiny_module(), groups, loss, columns_too=True, top=0.4)
    for budget in (400,) if name == "bnpo" else (400, 25):
        result, found = run(cut(groups, budget, budget), loss)
        assert result.loss == pytest.approx(expected, abs=1e-11)
        close(found, gradients)


def test_a_wrong_denominator_of_the_bonus_changes_loss_and_gradient() -> None:
    groups, loss = batch(2), everything("grpo")
    pieces = cut(groups, 30, 0)
    surveyed, gradients = run(pieces, loss)
    wrong, spoilt = run(pieces, loss.with_bonus_scale(1.0))
    assert abs(wrong.loss - surveyed.loss) > 1e-2
    assert any((spoilt[name] - gradient).abs().max() > 1e-3 for name, gradient in gradients.items())


def test_gradient_checkpointing_of_a_surveyed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, loss = batch(3), build_loss("grpo", entropy_coef=0.5)
    pieces, policy, calls = cut(groups, 60, 0), tiny_policy(), Counter[int]()
    assert policy.fused is not None
    forward = policy.fused.forward

    def counted(layer: Any, *rest: Any, **options: Any) -> Any:
        calls[layer.number] += 1
        return forward(layer, *rest, **options)

    monkeypatch.setattr(policy.fused, "forward", counted)
    plain, gradients = run(pieces, loss)
    checkpointed, found = run(pieces, loss, policy=policy, gradient_checkpointing=True)
    assert calls[0] >= 2 * len(pieces)  # each microbatch runs the layer again in backward
    assert checkpointed.loss == pytest.approx(plain.loss, rel=1e-12)
    close(found, gradients)


def test_a_surveyed_step_in_bfloat16_is_near_float32() -> None:
    groups, loss = batch(3), build_loss("grpo", entropy_coef=0.5)
    pieces = cut(groups, 60, 0, columns=False)
    found = []
    for dtype in ("bfloat16", "float32"):
        result, gradients = run(pieces, loss, policy=tiny_policy(dtype))
        assert {g.dtype for g in gradients.values()} == {torch.float32}
        found.append((result, torch.cat([g.flatten().double() for g in gradients.values()])))
    (narrow, first), (exact, wide) = found
    assert narrow.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)
    assert torch.cosine_similarity(first, wide, dim=0) > 0.98


def test_bnpo_is_the_mean_over_microbatches_of_their_token_means() -> None:
    groups = batch(4)
    pieces = cut(groups, 40, 0)
    assert len(pieces) > 2
    result, found = run(pieces, build_loss("bnpo"))
    sums = {name: torch.zeros_like(gradient) for name, gradient in found.items()}
    for piece in pieces:
        _, gradients = run([piece], build_loss("dapo"))
        for name, gradient in gradients.items():
            sums[name] += gradient / len(pieces)
    close(found, sums)
    assert result.metrics["loss"] == pytest.approx(result.loss)


def test_two_normalisers_without_a_survey_are_refused_before_anything_is_opened() -> None:
    trainer = TorchTrainer(tiny_policy(), TrainConfig(), max_completion_length=MAX_LENGTH)
    with pytest.raises(TrainStepError, match="divided by different numbers: survey the whole step first"):
        trainer.begin_train_step(build_loss("grpo", entropy_coef=0.1))
    assert trainer._step is None


def test_the_controller_moves_at_finish_alone_and_goes_on_from_a_saved_state() -> None:
    groups = batch(6)
    pieces = cut(groups, 60, 0)
    loss = build_loss("dapo", entropy_coef=0.2, entropy_target=50.0, entropy_coef_delta=0.1)

    def make() -> TorchTrainer:
        return TorchTrainer(tiny_policy(), TrainConfig(lr=0.01, grad_clip=None), max_completion_length=MAX_LENGTH)

    trainer = make()
    first, second = (train_step(trainer, pieces, loss).metrics["entropy_coef"] for _ in range(2))
    assert (first, second) == (0.0, pytest.approx(0.3))  # in the first step nothing is known of the entropy
    state = copy.deepcopy(trainer.state_dict())
    assert state["entropy_control"]["coefficient"] == pytest.approx(0.4)
    check_plain(state["entropy_control"], "entropy_control")
    trainer.begin_train_step(loss)
    trainer.train_microbatch(pieces[0])
    trainer.abort_train_step()
    third = train_step(trainer, pieces, loss)
    assert third.metrics["entropy_coef"] == pytest.approx(0.4)

    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict()["entropy_control"] == state["entropy_control"]
    assert train_step(resumed, pieces, loss).metrics == third.metrics
    fixed = make()  # the bonus itself is that of a fixed coefficient
    fixed.load_state_dict(state)
    same = train_step(fixed, pieces, build_loss("dapo", entropy_coef=third.metrics["entropy_coef"]))
    assert same.loss == third.loss and torch.equal(fixed.policy.flat.master, resumed.policy.flat.master)


def test_the_controller_of_a_bonus_with_another_normaliser() -> None:
    pieces = cut(batch(3), 60, 0)
    controlled = build_loss("grpo", entropy_coef=0.5, entropy_target=50.0, entropy_coef_delta=0.1)
    silent, gradients = run(pieces, controlled)
    plain, expected = run(pieces, build_loss("grpo"))
    assert silent.loss == pytest.approx(plain.loss, rel=1e-12) and silent.metrics["entropy_coef"] == 0
    close(gradients, expected)


def test_reference_and_old_columns_reach_the_loss() -> None:
    groups = batch()
    loss = build_loss("grpo", kl_coef=0.5)
    policy = tiny_policy()
    trainer = TorchTrainer(policy, TrainConfig(lr=0.05), max_completion_length=MAX_LENGTH, needs_reference=True)
    for expected_zero in (True, False):
        trainer.begin_train_step(loss)
        for microbatch in cut(groups, 100, 0, columns=False):
            reference = trainer.compute_logprobs(microbatch, "reference")
            trainer.train_microbatch(replace(microbatch, reference_logprobs=reference))
        kl = trainer.finish_train_step().metrics["kl"]
        assert (abs(kl) < 1e-10) == expected_zero and kl >= 0


def test_an_infinite_maximum_is_a_value_and_a_maximum_of_nothing_is_none() -> None:
    metrics = Metrics(dict.fromkeys(("ratio_max", "ratio_min", "other_max"), Normaliser.NONE))
    metrics.add({"ratio_max": MetricSum(torch.tensor(torch.inf), Normaliser.NONE)})
    found, _ = metrics.reduce(
        Collectives(), torch.device("cpu"), {Normaliser.NONE: 1.0}, torch.zeros(1, dtype=torch.float64)
    )
    assert found == {"ratio_max": torch.inf}


def test_bfloat16_accumulates_in_float32() -> None:
    """Many equal microbatches: a bfloat16 sum of 100 terms would be off by percents."""
    groups, loss = batch()[:1], build_loss("dapo")
    (microbatch,) = cut(groups, 400, 0, columns=False)
    _, once = run([microbatch], loss, policy=tiny_policy("bfloat16"))
    policy = tiny_policy("bfloat16")
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16} and policy.flat.grad.dtype == torch.float32
    _, many = run([microbatch] * 100, loss, policy=policy)
    for name, gradient in once.items():  # N grows with the sum, so the mean must stay
        torch.testing.assert_close(many[name], gradient, rtol=1e-4, atol=1e-6)
