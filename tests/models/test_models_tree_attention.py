"""Packed prefix trees: equal to one dense masked attention, in value and gradient, through every path of the code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ragged_reference import ReferenceKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.models.attention.interface import AttentionTerms
from asyncrl.models.attention.ragged import RaggedWindow
from asyncrl.models.attention.rows import share_out
from asyncrl.models.attention.tree import TreePlan

PLAIN = AttentionTerms()
TREES = {
    "ragged with an empty suffix": [(6, [5, 0, 7, 3, 9, 1]), (11, [4, 4, 2])],
    "prompts alone": [(3, []), (8, []), (1, [])],
    "one long tree": [(20, [64, 50, 33])],
    "empty prefix": [(0, [0, 0]), (4, [3, 2])],
}


def build(trees: list[tuple[int, list[int]]]) -> tuple[TreePlan, Tensor]:
    """The plan, and the dense mask [T, T] that it stands for."""
    starts, lengths, suffixes, cursor = [], [], [], 0
    for index, (prefix, members) in enumerate(trees):
        starts.append(cursor)
        lengths.append(prefix)
        cursor += prefix
        for length in members:
            suffixes.append((cursor, length, index))
            cursor += length
    mask = torch.zeros(cursor, cursor, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=True):
        mask[start : start + length, start : start + length] = True
    for start, length, tree in suffixes:
        mask[start : start + length, starts[tree] : starts[tree] + lengths[tree]] = True
        mask[start : start + length, start : start + length] = True
    mask &= torch.ones(cursor, cursor).tril().bool()
    table = np.array(suffixes, np.int64).reshape(-1, 3)
    return TreePlan(starts, lengths, table[:, 0], table[:, 1], table[:, 2]), mask


def inputs(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    query, kv, size = heads
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, count, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for count in (query, kv, kv)
    ]


def dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, terms: AttentionTerms = PLAIN
) -> Tensor:
    """All scores at once. `mask` [T, T]: of the tree; a token's position is the number of tokens that it sees, less one."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", query, key) * scale
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.window is not None:
        position = mask.sum(1) - 1
        mask = mask & (position[:, None] - position[None] < terms.window)
    exponents = scores.masked_fill(~mask, float("-inf")).exp()
    total = exponents.sum(-1, keepdim=True)
    if terms.sinks is not None:
        total = total + terms.sinks.exp()[:, None, None]
    return torch.einsum("hts,shd->thd", exponents / total, value)


@pytest.mark.parametrize("heads", [(4, 2, 8), (9, 3, 64), (2, 2, 16)], ids=str)
@pytest.mark.parametrize("path", ["attend", "views", "products", "products in many bins", "attend_masked", "ragged"])
@pytest.mark.parametrize("trees", TREES.values(), ids=TREES.keys())
def test_equals_dense_masked_attention(
    trees: list, path: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.startswith("products"):
        monkeypatch.setattr("asyncrl.models.attention.tree._ROW_ATTENTION_DTYPES", {torch.float64})
    if path == "views":
        monkeypatch.setattr("asyncrl.models.attention.tree._SMALL_SPAN_FLOP", 0.0)
    if path.endswith("bins"):
        monkeypatch.setattr("asyncrl.models.attention.rows._BIN_BYTES", 1)
    kernel = ReferenceKernel()
    if path == "ragged":
        monkeypatch.setattr("asyncrl.models.attention.tree.kernel_for", lambda *case: kernel)
    plan, mask = build(trees)
    qkv = inputs(mask.shape[0], heads, torch.float64)
    out = plan.attend(0, *qkv, 0.3) if path != "attend_masked" else plan.attend_masked(*qkv, 0.3)
    expected = dense(*qkv, mask, 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(out, qkv, weights), torch.autograd.grad(expected, qkv, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    # forward and backward, of all spans at once, and of all suffixes against their prefixes
    assert kernel.calls == (0 if path != "ragged" else 4 if plan.cross else 2)


def test_small_segments_share_a_call_and_large_ones_do_not() -> None:
    plan, mask = build(TREES["ragged with an empty suffix"])
    small = inputs(mask.shape[0], (4, 2, 8), torch.float64)[0]
    assert len(plan.self_blocks(small)) < len(plan.spans)
    plan, mask = build([(100, [128, 120, 90])])
    assert plan.self_blocks(inputs(mask.shape[0], (9, 3, 64), torch.float64)[0]) == plan.spans


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("trees", TREES.values(), ids=TREES.keys())
def test_bfloat16_is_as_close_to_the_truth_as_torchs_own(trees: list) -> None:
    """Root mean square error against float64 of the same inputs, beside that of torch's masked attention in bfloat16."""
    plan, mask = build(trees)
    qkv = inputs(mask.shape[0], (4, 2, 16), torch.bfloat16)
    truth = dense(*(x.double() for x in qkv), mask, 0.25)
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def errors(out: Tensor) -> list[float]:
        assert out.dtype == torch.bfloat16
        found = [out, *torch.autograd.grad(out, qkv, weights.bfloat16())]
        right = [truth, *torch.autograd.grad(truth, qkv, weights, retain_graph=True)]
        return [
            float((a.detach().double() - b.detach()).square().mean().sqrt()) for a, b in zip(found, right, strict=True)
        ]

    for ours, theirs in zip(errors(plan.attend(0, *qkv, 0.25)), errors(plan.attend_masked(*qkv, 0.25)), strict=True):
        assert ours <= 1.5 * theirs + 1e-4


def test_bfloat16_rows_too_long_for_products_go_through_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.models.attention.rows.ROW_BYTES", 1)
    plan, mask = build(TREES["one long tree"])
    qkv = inputs(mask.shape[0], (4, 2, 16), torch.bfloat16)
    out = plan.attend(0, *qkv, 0.25)
    expected = plan.attend(0, *(x.float() for x in qkv), 0.25).to(torch.bfloat16)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(out.sum(), qkv))


def test_padding_of_rows_is_bounded() -> None:
    rows = [(0, 6, 6 + 40 * i, 1 + (7 * i) % 40) for i in range(40)]
    bins = share_out(rows, heads=4)
    assert sorted(row for members in bins for row in members) == rows
    assert len(bins) < 16
    for members in bins:
        area = max(r[3] for r in members) * (max(r[3] for r in members) + max(r[1] for r in members))
        assert len(members) * area <= 1.25 * sum(r[3] * (r[1] + r[3]) for r in members)


def test_suffixes_of_a_tree_must_be_adjacent() -> None:
    with pytest.raises(ValueError, match="must be adjacent"):
        TreePlan([0], [2], [2, 6], [3, 1], [0, 0])


def test_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="describes 3 tokens"):
        TreePlan([0], [3]).attend(0, *inputs(4, (2, 1, 8), torch.float64), 1.0)


def test_no_token_of_another_tree_or_suffix_leaks() -> None:
    plan, mask = build(TREES["ragged with an empty suffix"])
    query, key, value = inputs(mask.shape[0], (4, 2, 8), torch.float64)
    out = plan.attend(0, query, key, value, 0.3)
    row = 14  # inside a suffix of the first tree
    (grad,) = torch.autograd.grad(out[row].sum(), value)
    seen = grad.abs().sum((1, 2)) > 0
    assert torch.equal(seen, mask[row])


class Sums(TorchDispatchMode):
    """The dtypes in which rows are added. On a CPU torch adds bfloat16 in float32, on a GPU by atomics of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("index_add", "index_add_"):
            self.dtypes.append(arguments[0].dtype)
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("way", ["padded", "window"])
def test_gradients_of_keys_that_many_rows_share_are_summed_in_float32(way: str) -> None:
    plan = TreePlan([0], [3], [3, 5, 8], [2, 3, 1], [0, 0, 0])
    qkv = [part.detach().bfloat16().requires_grad_() for part in inputs(plan.tokens, (4, 2, 16), torch.float32)]
    sums = Sums()
    with sums:
        if way == "padded":
            plan.attend_masked(*qkv, 0.3).sum().backward()
        else:
            window = RaggedWindow(ReferenceKernel(), plan._own_rows(), 2, torch.device("cpu"))
            values = [part.detach() for part in qkv]
            out, lse = window.forward(*values, 0.3)
            gradients = tuple(torch.empty_like(part) for part in values)
            window.backward(out, (*values, out, lse), 0.3, gradients)  # type: ignore[arg-type]  # three of them
    assert sums.dtypes.count(torch.float32) == 2 and len(sums.dtypes) <= 3, sums.dtypes
