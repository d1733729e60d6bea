"""A step cut anywhere, in any order, is the same step; and autograd agrees with finite differences."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from algorithms_batches import PaddedBatch, random_batch, value_and_grad, value_and_grads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.importance import Importance, importance_weights
from asyncrl.algorithms.losses import Cispo, Vespo
from asyncrl.algorithms.registry import LOSSES, build_loss
from asyncrl.types import Normaliser

STREAMED = sorted(set(LOSSES) - {"bnpo"})


def everything_on(name: str) -> Loss:
    """Every term that a loss may have, but for the choice between exclusive ones."""
    own = {"dual_clip": 1.5} if name in ("ppo_clip", "gspo", "luspo") else {}
    return build_loss(
        name, epsilon=0.2, epsilon_high=0.28, cispo_high=1.3,
        importance_mode="token_mask" if name == "vespo" else "sequence_mask_tis", importance_cap=1.4, importance_floor=0.7,
        importance_veto=0.4, importance_log_clamp=5.0, off_policy_mask_threshold=0.1, kl_coef=0.05,
        use_bias_correction_kl=True, entropy_coef=0.03, top_entropy_quantile=0.6, **own,
    )  # fmt: skip


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """(sequences, microbatches): a shuffled order cut at random places, empty microbatches included."""
    sequences = draw(st.integers(1, 9))
    order = draw(st.permutations(range(sequences)))
    cuts = sorted(draw(st.lists(st.integers(0, sequences), max_size=6)))
    edges = [0, *cuts, sequences]
    return sequences, [list(order[a:b]) for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", STREAMED)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cut=partitions(), seed=st.integers(0, 2**20), old=st.booleans())
def test_any_partition_gives_the_value_gradient_and_metrics_of_one_batch(
    name: str, cut: tuple[int, list[list[int]]], seed: int, old: bool
) -> None:
    sequences, parts = cut
    batch = random_batch(seed, sequences=sequences, old=old, nan_share=0.1).with_top_entropy(0.6)
    loss = everything_on(name)
    value, grad_BT, entropy_grad_BT, metrics = value_and_grads(batch, loss, parts)
    whole, whole_grad_BT, whole_entropy_grad_BT, whole_metrics = value_and_grads(batch, loss, [range(sequences)])
    torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_BT, whole_grad_BT, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(entropy_grad_BT, whole_entropy_grad_BT, rtol=1e-12, atol=1e-14)
    assert metrics.keys() == whole_metrics.keys()
    assert metrics == pytest.approx(whole_metrics, rel=1e-12, abs=1e-14)


def test_bnpo_depends_on_the_split_which_is_why_it_is_refused() -> None:
    batch, loss = random_batch(0), build_loss("bnpo")
    whole = value_and_grad(batch, loss, [range(7)])[0]
    split = value_and_grad(batch, loss, [[0, 1, 2], [3], [4, 5, 6]])[0]
    assert abs(float(whole - split)) > 1e-3
    torch.testing.assert_close(whole, value_and_grad(batch, build_loss("dapo"), [range(7)])[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_a_mean_of_means_would_be_noticed(name: str) -> None:
    """The property above has teeth: dividing each microbatch by its own count gives another gradient."""
    batch = random_batch(0).with_top_entropy(0.6)
    loss = everything_on(name).with_bonus_scale(0.0)
    whole = value_and_grad(batch, loss, [range(7)])[0]
    own = []
    for rows in ([0, 1, 2], [3], [4, 5, 6]):
        inputs = batch.pack(rows)
        own.append(loss(inputs).total / max(len(inputs.logp_S) if name == "dapo" else inputs.sequences, 1))
    assert abs(float(torch.stack(own).mean() - whole)) > 1e-3


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_fully_masked_sequences_count_and_contribute_nothing(name: str) -> None:
    emptied = random_batch(8, empty_rows=False)
    emptied.tool_mask_BT[2] = 0
    emptied = emptied.with_top_entropy(0.6)
    loss = everything_on(name)
    loss = loss.with_bonus_scale(emptied.count(loss.normaliser) / emptied.count(Normaliser.TOKENS))
    value, grad_BT, _ = value_and_grad(emptied, loss, [range(7)])
    assert grad_BT[2].count_nonzero() == 0
    kept = loss(emptied.pack([b for b in range(7) if b != 2])).total / emptied.count(loss.normaliser)
    torch.testing.assert_close(value, kept, rtol=1e-12, atol=0)
    assert emptied.pack().sequences == 7


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("rows", [[], [1]])
def test_a_microbatch_without_tokens_is_finite_and_has_a_gradient(name: str, rows: list[int]) -> None:
    """Idle ranks run one: backward must work, and every metric must be there to be reduced."""
    batch = random_batch(2).with_top_entropy(0.6)
    leaf_BT = batch.logp_BT.clone().requires_grad_()
    sums = everything_on(name)(batch.pack(rows, leaf_BT))
    sums.total.backward()
    assert float(sums.total.detach()) == 0.0
    assert leaf_BT.grad is not None and leaf_BT.grad.count_nonzero() == 0
    assert all(float(metric.value) == 0.0 for metric in sums.metrics.values())
    assert sums.metrics.keys() == everything_on(name)(batch.pack()).metrics.keys()


def everything_smooth(name: str) -> Loss:
    """Without the terms whose detached parts (weights by the moving log-probs) finite differences would see."""
    return build_loss(name, epsilon=0.2, epsilon_high=0.28, kl_coef=0.05, use_bias_correction_kl=True, entropy_coef=0.1)


def away_from_kinks(batch: PaddedBatch) -> PaddedBatch:
    """Old log-probs for which no ratio, token or sequence, lies within 1e-3 of a clip bound."""
    assert batch.old_BT is not None
    log_ratio_BT = (batch.logp_BT - batch.old_BT) * batch.mask_BT
    mean_B = log_ratio_BT.sum(1) / batch.mask_BT.sum(1).clamp(min=1)
    for ratio in (log_ratio_BT.exp(), mean_B.exp()):
        for bound in (0.8, 1.28):
            assert float((ratio - bound).abs().min()) > 1e-3
    return batch


DETACHED = ("cispo", "vespo")  # their coefficient moves with the log-prob, and has no gradient


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", sorted(set(LOSSES) - set(DETACHED)))
def test_gradcheck(name: str, old: bool) -> None:
    """Finite differences. Without old log-probs the loss has detached parts: the centre and the weight are held fixed,
    as columns, while the leaf moves, and the gradient there must equal that of the on-policy form."""
    batch = random_batch(16, sequences=4, width=5)
    batch = away_from_kinks(batch) if old else batch.replace_old(batch.logp_BT.clone())
    loss = everything_smooth(name)

    def total(leaf_BT: Tensor, entropy_BT: Tensor) -> Tensor:
        return loss(batch.pack(logp_BT=leaf_BT, entropy_BT=entropy_BT)).total

    leaves = [column.clone().requires_grad_() for column in (batch.logp_BT, batch.entropy_BT)]
    assert torch.autograd.gradcheck(total, tuple(leaves), eps=1e-6, atol=1e-8, rtol=1e-6)
    if not old:
        rows = [range(4)]
        with_column = value_and_grad(batch, loss, rows)[1]
        on_policy = value_and_grad(batch.replace_old(None), loss, rows)[1]
        torch.testing.assert_close(on_policy, with_column, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", DETACHED)
def test_a_detached_coefficient_is_a_constant_of_the_gradient(name: str) -> None:
    """The gradient is coefficient x that of logp: the loss per token divided by its logp, token by token."""
    batch = random_batch(16)
    _, grad_BT, _ = value_and_grad(batch, build_loss(name, cispo_high=1.1), [range(7)])
    inputs = batch.pack()
    weight_S = importance_weights(inputs, Importance())[0]
    if name == "cispo":
        loss_S = Cispo(high=1.1).surrogate(inputs).loss_S * weight_S
    else:
        loss_S = Vespo().surrogate(replace(inputs, importance_S=weight_S)).loss_S
    expected_S = loss_S / inputs.logp_S / batch.count(Normaliser.TOKENS)
    torch.testing.assert_close(grad_BT[batch.mask_BT], expected_S, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_float32_is_close_to_float64(name: str) -> None:
    batch = random_batch(30, nan_share=0.1).with_top_entropy(0.6)
    single = batch.to(torch.float32)
    loss = everything_on(name)
    value, grad_BT, _ = value_and_grad(batch, loss, [range(7)])
    value32, grad32_BT, _ = value_and_grad(single, loss, [range(7)])
    assert value32.dtype == grad32_BT.dtype == torch.float32
    torch.testing.assert_close(value32.double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad32_BT.double(), grad_BT, rtol=1e-5, atol=1e-6)
