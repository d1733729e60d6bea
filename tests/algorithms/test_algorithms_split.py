"""A step cut anywhere, in any order, is the same step; and autograd agrees with finite differences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from algorithms_batches import PaddedBatch, random_batch, value_and_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.registry import LOSSES, build_loss


def everything_on(name: str) -> Loss:
    return build_loss(name, epsilon=0.2, epsilon_high=0.28, importance_cap=1.2, kl_coef=0.05)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """(sequences, microbatches): a shuffled order cut at random places, empty microbatches included."""
    sequences = draw(st.integers(1, 9))
    order = draw(st.permutations(range(sequences)))
    cuts = sorted(draw(st.lists(st.integers(0, sequences), max_size=6)))
    edges = [0, *cuts, sequences]
    return sequences, [list(order[a:b]) for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cut=partitions(), seed=st.integers(0, 2**20), old=st.booleans())
def test_any_partition_gives_the_value_gradient_and_metrics_of_one_batch(
    name: str, cut: tuple[int, list[list[int]]], seed: int, old: bool
) -> None:
    sequences, parts = cut
    batch = random_batch(seed, sequences=sequences, old=old, nan_share=0.1)
    loss = everything_on(name)
    value, grad_BT, metrics = value_and_grad(batch, loss, parts)
    whole, whole_grad_BT, whole_metrics = value_and_grad(batch, loss, [range(sequences)])
    torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_BT, whole_grad_BT, rtol=1e-12, atol=1e-14)
    assert metrics.keys() == whole_metrics.keys()
    assert metrics == pytest.approx(whole_metrics, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_a_mean_of_means_would_be_noticed(name: str) -> None:
    """The property above has teeth: dividing each microbatch by its own count gives another gradient."""
    batch = random_batch(0)
    loss = everything_on(name)
    whole = value_and_grad(batch, loss, [range(7)])[0]
    own = []
    for rows in ([0, 1, 2], [3], [4, 5, 6]):
        inputs = batch.pack(rows)
        own.append(loss(inputs).total / max(len(inputs.logp_S) if name == "dapo" else inputs.sequences, 1))
    assert abs(float(torch.stack(own).mean() - whole)) > 1e-3


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_fully_masked_sequences_count_and_contribute_nothing(name: str) -> None:
    batch = random_batch(8, empty_rows=False)
    emptied = random_batch(8, empty_rows=False)
    emptied.tool_mask_BT[2] = 0
    loss = everything_on(name)
    grad_BT = value_and_grad(emptied, loss, [range(7)])[1]
    assert grad_BT[2].count_nonzero() == 0
    others = [b for b in range(7) if b != 2]
    kept = loss(batch.pack(others)).total / emptied.count(loss.normaliser)
    torch.testing.assert_close(value_and_grad(emptied, loss, [range(7)])[0], kept, rtol=1e-12, atol=0)
    assert emptied.pack().sequences == 7


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("rows", [[], [1]])
def test_a_microbatch_without_tokens_is_finite_and_has_a_gradient(name: str, rows: list[int]) -> None:
    """Idle ranks run one: backward must work, and every metric must be there to be reduced."""
    batch = random_batch(2)
    leaf_BT = batch.logp_BT.clone().requires_grad_()
    sums = everything_on(name)(batch.pack(rows, leaf_BT))
    sums.total.backward()
    assert float(sums.total.detach()) == 0.0
    assert leaf_BT.grad is not None and leaf_BT.grad.count_nonzero() == 0
    assert all(float(metric.value) == 0.0 for metric in sums.metrics.values())
    assert sums.metrics.keys() == everything_on(name)(batch.pack()).metrics.keys()


def away_from_kinks(batch: PaddedBatch) -> PaddedBatch:
    """Old log-probs for which no ratio, token or sequence, lies within 1e-3 of a clip bound."""
    assert batch.old_BT is not None
    log_ratio_BT = (batch.logp_BT - batch.old_BT) * batch.mask_BT
    mean_B = log_ratio_BT.sum(1) / batch.mask_BT.sum(1).clamp(min=1)
    for ratio in (log_ratio_BT.exp(), mean_B.exp()):
        for bound in (0.8, 1.28):
            assert float((ratio - bound).abs().min()) > 1e-3
    return batch


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradcheck(name: str, old: bool) -> None:
    """Finite differences. Without old log-probs the loss has detached parts: the centre and the weight are held fixed,
    as columns, while the leaf moves, and the gradient there must equal that of the on-policy form."""
    batch = random_batch(16, sequences=4, width=5)
    batch = away_from_kinks(batch) if old else batch.replace_old(batch.logp_BT.clone())
    loss = everything_on(name)

    def total(leaf_BT: Tensor) -> Tensor:
        return loss(batch.pack(logp_BT=leaf_BT)).total

    leaf_BT = batch.logp_BT.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (leaf_BT,), eps=1e-6, atol=1e-8, rtol=1e-6)
    if not old:
        rows = [range(4)]
        with_column = value_and_grad(batch, loss, rows)[1]
        on_policy = value_and_grad(batch.replace_old(None), loss, rows)[1]
        torch.testing.assert_close(on_policy, with_column, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_float32_is_close_to_float64(name: str) -> None:
    batch = random_batch(30, nan_share=0.1)
    single = batch.to(torch.float32)
    loss = everything_on(name)
    value, grad_BT, _ = value_and_grad(batch, loss, [range(7)])
    value32, grad32_BT, _ = value_and_grad(single, loss, [range(7)])
    assert value32.dtype == grad32_BT.dtype == torch.float32
    torch.testing.assert_close(value32.double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad32_BT.double(), grad_BT, rtol=1e-5, atol=1e-6)
