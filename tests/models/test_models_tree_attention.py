"""Packed trees: equal to one dense masked attention, in value and gradient, through every path of the code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ragged_reference import ReferenceKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.models.attention.general import GeneralAttention
from asyncrl.models.attention.interface import AttentionTerms
from asyncrl.models.attention.ragged import RaggedTree, RaggedWindow, largest_error
from asyncrl.models.attention.rows import NodeRow, fits, group_into_bins, row_bytes
from asyncrl.models.attention.tree import PaddedRows, TreePlan

PLAIN = AttentionTerms()
# (length, parent) of each node.
Nodes = list[tuple[int, int]]


def two_levels(trees: list[tuple[int, list[int]]]) -> Nodes:
    """Prompts with the completions of each."""
    nodes: Nodes = []
    for prefix, suffixes in trees:
        root = len(nodes)
        nodes += [(prefix, -1), *((length, root) for length in suffixes)]
    return nodes


TREES = {
    "ragged with an empty suffix": two_levels([(6, [5, 0, 7, 3, 9, 1]), (11, [4, 4, 2])]),
    "prompts alone": two_levels([(3, []), (8, []), (1, [])]),
    "one long tree": two_levels([(20, [64, 50, 33])]),
    "empty prefix": two_levels([(0, [0, 0]), (4, [3, 2])]),
    "four levels": [(7, -1), (3, 0), (9, 1), (1, 1), (12, 3), (5, 3), (6, 0), (4, -1), (1, 7), (1, 8), (30, 8), (2, 7)],
    "empty inner nodes": [(0, -1), (5, 0), (0, 1), (8, 2), (4, 2), (0, 1), (3, 0), (0, 6), (0, 7), (2, 8), (40, 6)],
    "a line of nodes": [(4, -1), (1, 0), (25, 1), (1, 2), (6, 3)],
}


def build(nodes: Nodes) -> tuple[TreePlan, Tensor]:
    """The plan, and the dense mask [T, T] that it stands for."""
    ends = np.cumsum([length for length, _ in nodes])
    mask = torch.zeros(int(ends[-1]), int(ends[-1]), dtype=torch.bool)
    for node, (length, _) in enumerate(nodes):
        seen = node
        while seen >= 0:
            mask[ends[node] - length : ends[node], ends[seen] - nodes[seen][0] : ends[seen]] = True
            seen = nodes[seen][1]
    return TreePlan(*zip(*nodes, strict=True)), mask.tril()


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
@pytest.mark.parametrize("path", ["products", "products in many bins", "calls", "padded", "ragged"])
@pytest.mark.parametrize("trees", TREES.values(), ids=TREES.keys())
def test_equals_dense_masked_attention(
    trees: Nodes, path: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "calls":
        monkeypatch.setattr("asyncrl.models.attention.tree.fits", lambda *case: False)
    if path.endswith("bins"):
        monkeypatch.setattr("asyncrl.models.attention.rows._BIN_BYTES", 1)
    kernel = ReferenceKernel()
    if path == "ragged":
        monkeypatch.setattr("asyncrl.models.attention.tree.kernel_for", lambda *case: kernel)
    plan, mask = build(trees)
    qkv = inputs(mask.shape[0], heads, torch.float64)
    out = plan.attend(0, *qkv, 0.3) if path != "padded" else padded(plan).attend(*qkv, 0.3)
    expected = dense(*qkv, mask, 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(out, qkv, weights), torch.autograd.grad(expected, qkv, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    # Forward and backward: all nodes at once, and once for each level with inner nodes.
    assert kernel.calls == (2 + 2 * inner_levels(trees) if path == "ragged" else 0)


def padded(plan: TreePlan) -> PaddedRows:
    return PaddedRows(plan.rows, torch.device("cpu"))


def inner_levels(nodes: Nodes) -> int:
    """The largest number of ancestors with tokens that a node with tokens has."""
    above: list[int] = []
    for _, parent in nodes:
        above.append(above[parent] + (nodes[parent][0] > 0) if parent >= 0 else 0)
    return max(count for count, (length, _) in zip(above, nodes, strict=True) if length)


def random_forest(seed: int) -> Nodes:
    """Several roots, and `1 + seed % 8` levels. Some nodes are empty, some have one token."""
    draw = np.random.default_rng(seed)
    nodes: Nodes = []

    def grow(parent: int, levels: int) -> None:
        for child in range(int(draw.integers(1, 4))):
            nodes.append((int(draw.choice([0, 1, 1, 2, 3, 5, 8, 13])), parent))
            if levels > 1 and (child == 0 or draw.random() < 0.2):
                grow(len(nodes) - 1, levels - 1)

    grow(-1, 1 + seed % 8)
    return [*nodes, (3, -1)]


WAYS: dict[str, list[AttentionTerms]] = {
    "calls": [PLAIN],
    "products": [PLAIN],
    "padded": [PLAIN],
    "ragged": [PLAIN, AttentionTerms(1), AttentionTerms(4), AttentionTerms(11)],
    "general": [AttentionTerms(1), AttentionTerms(4), AttentionTerms(11, 0.7), AttentionTerms(None, 2.0)],
    "sinks": [AttentionTerms(), AttentionTerms(6), AttentionTerms(6, 0.7)],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(24))
def test_a_forest_equals_its_rows_alone(seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node with its ancestors as a sequence of its own, in value and summed gradient."""
    kernel = ReferenceKernel()
    if way == "calls":
        monkeypatch.setattr("asyncrl.models.attention.tree.fits", lambda *case: False)
    if way == "ragged":
        monkeypatch.setattr("asyncrl.models.attention.tree.kernel_for", lambda *case: kernel)
    nodes = random_forest(seed)
    plan, mask = build(nodes)
    *leaves, sinks = [*inputs(plan.tokens, (6, 2, 8), torch.float64), torch.randn(6, dtype=torch.float64)]
    weights = torch.randn(plan.tokens, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ends = np.cumsum([length for length, _ in nodes])
    for terms in WAYS[way]:
        if way == "sinks":
            terms = AttentionTerms(terms.window, terms.softcap, sinks.requires_grad_())
            leaves = [*leaves[:3], sinks]
        kernel.calls = 0
        out = padded(plan).attend(*leaves, 0.3) if way == "padded" else plan.attend(0, *leaves[:3], 0.3, terms)
        found = torch.autograd.grad(out, leaves, weights)
        right = [torch.zeros_like(leaf) for leaf in leaves]
        for (length, _), end in zip(nodes, ends, strict=True):
            if length:
                row = mask[end - 1].nonzero().flatten()
                alone = dense(
                    *(part[row] for part in leaves[:3]), torch.ones(len(row), len(row)).tril().bool(), 0.3, terms
                )
                torch.testing.assert_close(out[end - length : end], alone[-length:], rtol=0, atol=1e-10)
                parts = torch.autograd.grad(alone[-length:], leaves, weights[end - length : end])
                for total, part in zip(right, parts, strict=True):
                    total += part
        for ours, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        # A window that no row leaves is none.
        empty = terms.simplified_for(plan.longest).empty
        assert kernel.calls == (0 if way != "ragged" else 2 + 2 * inner_levels(nodes) if empty else 2)


def test_without_a_kernel_a_gpu_pads_no_rows_of_deep_trees() -> None:
    """Padded rows of many turns would outgrow the memory. The device "meta" takes a GPU's branch."""
    for name, kind in (("one long tree", PaddedRows), ("four levels", GeneralAttention)):
        plan, _ = build(TREES[name])
        parts = [torch.empty(plan.tokens, heads, 8, device="meta", requires_grad=True) for heads in (4, 2, 2)]
        out = plan.attend(0, *parts, 0.3)
        assert out.shape == parts[0].shape
        torch.autograd.grad(out.sum(), parts)
        assert [type(chosen) for chosen in plan._implementations.values()] == [kind]


def test_padded_rows_compute_their_forward_again() -> None:
    """What a fused layer calls, beside what autograd finds."""
    plan, _ = build(TREES["one long tree"])
    qkv = inputs(plan.tokens, (4, 2, 8), torch.float64)
    rows = padded(plan)
    out = rows.attend(*qkv, 0.3)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = [part.detach() for part in qkv]
    alone, nothing = rows.forward(*values, 0.3)
    gradients = tuple(torch.empty_like(part) for part in values)
    rows.backward(grad, (*values, alone, nothing), 0.3, gradients)  # type: ignore[arg-type]  # three of them
    for ours, theirs in zip((alone, *gradients), (out, *torch.autograd.grad(out, qkv, grad)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_deep_result_in_bfloat16_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight levels: the error against float64 is not larger than that of two levels."""
    monkeypatch.setattr("asyncrl.models.attention.tree.kernel_for", lambda *case: ReferenceKernel())
    errors = []
    for pieces in (2, 16):
        plan, mask = build([(64 // pieces, node - 1) for node in range(pieces)])
        qkv = inputs(plan.tokens, (4, 2, 16), torch.bfloat16)
        truth = dense(*(x.double() for x in qkv), mask, 0.25)
        weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        out = plan.attend(0, *qkv, 0.25)
        found = [out, torch.autograd.grad(out, qkv, weights.bfloat16())[0]]
        right = [truth, torch.autograd.grad(truth, qkv, weights)[0]]
        errors.append(
            [float((a.double() - b).detach().square().mean().sqrt()) for a, b in zip(found, right, strict=True)]
        )
    for deep, shallow in zip(errors[1], errors[0], strict=True):
        assert deep <= 1.2 * shallow, errors


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("trees", TREES.values(), ids=TREES.keys())
def test_bfloat16_is_as_close_to_the_truth_as_torchs_own(trees: Nodes) -> None:
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

    for ours, theirs in zip(errors(plan.attend(0, *qkv, 0.25)), errors(padded(plan).attend(*qkv, 0.25)), strict=True):
        assert ours <= 1.5 * theirs + 1e-4


def test_bfloat16_rows_too_long_for_products_go_through_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.models.attention.rows.row_bytes", lambda itemsize: 1)
    plan, mask = build(TREES["one long tree"])
    qkv = inputs(mask.shape[0], (4, 2, 16), torch.bfloat16)
    out = plan.attend(0, *qkv, 0.25)
    expected = plan.attend(0, *(x.float() for x in qkv), 0.25).to(torch.bfloat16)
    assert [type(chosen) for chosen in plan._implementations.values()] == [RaggedTree, RaggedTree]
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(out.sum(), qkv))


def test_padding_of_rows_is_bounded() -> None:
    rows = [NodeRow(np.arange(6), 6 + 40 * i, 1 + (7 * i) % 40) for i in range(40)]
    bins = group_into_bins(rows, heads=4)
    assert sorted(row[1:] for members in bins for row in members) == [row[1:] for row in rows]
    assert len(bins) < 16
    for members in bins:
        area = max(r.length for r in members) * (max(r.length for r in members) + max(r.context.size for r in members))
        assert len(members) * area <= 1.25 * sum(r.length * r.total for r in members)


def test_scores_that_backward_keeps_are_bounded() -> None:
    heads, most = 8, 1024  # own tokens of the longest row without a context
    assert fits(TreePlan([most, 632, 632], [-1, 0, 0]).rows, heads, 2), (
        "the most keys that a tree of two levels can have"
    )
    line = [100] * 40
    deep = TreePlan([*line, 20], [*range(-1, 39), 0])
    assert all(row.length * row.total * heads * 4 <= row_bytes(2) for row in deep.rows)
    assert not fits(deep.rows, heads, 2) and fits(TreePlan(line[:20], [*range(-1, 19)]).rows, heads, 2)


@pytest.mark.parametrize("parents", [[-1, 0, -1, 0], [-1, 0, 0, 1], [-1, 1, 0, 0], [-1, 0, -2, 2], [3, 0, 0, -1]])
def test_nodes_must_be_in_preorder(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="depth-first preorder"):
        TreePlan([2, 0, 3, 1], parents)


def test_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="describes 3 tokens"):
        TreePlan([3]).attend(0, *inputs(4, (2, 1, 8), torch.float64), 1.0)


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
    plan = TreePlan([3, 2, 3, 1], [-1, 0, 0, 0])
    qkv = [part.detach().bfloat16().requires_grad_() for part in inputs(plan.tokens, (4, 2, 16), torch.float32)]
    sums = Sums()
    with sums:
        if way == "padded":
            padded(plan).attend(*qkv, 0.3).sum().backward()
        else:
            window = RaggedWindow(ReferenceKernel(), plan.rows, 2, torch.device("cpu"))
            values = [part.detach() for part in qkv]
            out, lse = window.forward(*values, 0.3)
            gradients = tuple(torch.empty_like(part) for part in values)
            window.backward(out, (*values, out, lse), 0.3, gradients)  # type: ignore[arg-type]  # three of them
    assert sums.dtypes.count(torch.float32) == 2 and len(sums.dtypes) <= 3, sums.dtypes


@pytest.mark.parametrize("broken", ["forward", "cached", "backward"])
def test_the_error_of_a_kernel_that_makes_nan_is_nan(broken: str) -> None:
    class Kernel(ReferenceKernel):
        pass

    def spoil(kernel: Kernel, *arguments: Any) -> Any:
        parts = getattr(ReferenceKernel, broken)(kernel, *arguments)
        (parts if broken == "cached" else parts[0])[3] = torch.nan
        return parts

    where = torch.device("cpu"), torch.float32, 16
    assert largest_error(Kernel(), *where) < 1e-5
    setattr(Kernel, broken, spoil)
    assert np.isnan(largest_error(Kernel(), *where))
