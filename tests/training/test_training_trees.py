"""A packed group of trees has the gradient of its rows apart, each sampled token once: the real trainer, float64, and transformers'
own forward over each row as the other side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.trees import rows_of
from training_helpers import (
    MAX_LENGTH,
    STREAMED,
    everything,
    make_trees,
    oracle_gradient,
    tiny_module,
    tiny_policy,
    train_step,
    with_columns,
)

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Group, Microbatch


def gradient(batches: list[Microbatch], loss: Loss, kind: str = "llama") -> tuple[float, dict[str, torch.Tensor]]:
    policy = tiny_policy(kind=kind)
    trainer = TorchTrainer(policy, TrainConfig(lr=0.0, grad_clip=None), max_completion_length=MAX_LENGTH)
    result = train_step(trainer, batches, loss)
    return result.loss, {name: grad.clone() for name, grad in trainer.policy.flat.named_grads()}


@pytest.mark.parametrize("name", STREAMED)
def test_a_packed_group_of_trees_has_the_gradient_of_its_rows(name: str, exact_norms: None) -> None:
    """Every loss that can be streamed, with old log-probs, KL to a reference and the corrections, as far as the loss takes them."""
    loss = everything(name)
    for seed in range(2):
        groups = [make_trees(np.random.default_rng([seed, i]), i) for i in range(2)]
        assert any(t.branches is not None for group, _ in groups for t in group.trajectories)
        expected, wanted = oracle_gradient(tiny_module(), groups, loss, columns_too=True)
        assert max(grad.abs().max() for grad in wanted.values()) > 1e-4
        for budget in (1, 40, 10_000):
            found, gradients = gradient([with_columns(batch) for batch in pack_groups(groups, budget)], loss)
            assert found == pytest.approx(expected, abs=1e-11)
            for parameter, grad in wanted.items():
                torch.testing.assert_close(gradients[parameter], grad, rtol=0, atol=1e-10)


def test_rows_that_are_trained_apart_give_the_same_gradient() -> None:
    """Each row as a trajectory in a microbatch of its own, for a loss that divides by tokens."""
    group, advantages = make_trees(np.random.default_rng(5), 0)
    loss = build_loss("dapo")
    pieces = [
        (Group(group.ticket, group.prompt, (row,)), [advantage])
        for t, advantage in zip(group.trajectories, advantages, strict=True)
        for row in rows_of(t)
    ]
    apart = [batch for piece in pieces for batch in pack_groups([piece], 10_000)]
    [packed] = pack_groups([(group, advantages)], 10_000)
    assert packed.scored == sum(batch.scored for batch in apart)
    assert packed.tokens.size < sum(batch.tokens.size for batch in apart)
    _, found = gradient([packed], loss)
    _, wanted = gradient(apart, loss)
    for parameter, grad in wanted.items():
        torch.testing.assert_close(found[parameter], grad, rtol=0, atol=1e-10)


def test_the_comparison_has_teeth(exact_norms: None) -> None:
    """A branch that sees a token of its sibling, or a position too many, is seen."""
    groups, loss = [make_trees(np.random.default_rng(5), 0)], build_loss("dapo")
    [packed] = pack_groups(groups, 10_000)
    _, wanted = oracle_gradient(tiny_module(), groups, loss)
    parents = np.where(packed.node_parent > 0, packed.node_parent - 1, packed.node_parent)
    for spoiled in (
        replace(packed, node_parent=parents),
        replace(packed, positions=packed.positions + 1 * (packed.positions > 4)),
    ):
        _, found = gradient([spoiled], loss)
        assert max((found[name] - grad).abs().max() for name, grad in wanted.items()) > 1e-5


def test_the_balance_of_experts_of_a_tree_counts_each_of_its_tokens_once() -> None:
    """The first segment of `cut` ends with the token that the second one follows, so the tree is the line."""
    group, _ = make_trees(np.random.default_rng(8), 0)
    line = group.trajectories[-1]
    half = (line.prompt_length + line.tokens.size) // 2
    cut = replace(line, branches=np.array([[half, half - 1]], np.int32))
    found = [
        gradient(pack_groups([(Group(group.ticket, group.prompt, (t,)), [1.0])], 1000), build_loss("grpo"), kind="moe")
        for t in (line, cut)
    ]
    for parameter, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][parameter], grad, rtol=0, atol=1e-10)
