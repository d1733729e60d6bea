"""Attention over packed prefix trees: training microbatches, and the prefill of prompts (trees without suffixes).

A prefix token sees its prefix up to itself; a suffix token sees its whole prefix and its own suffix up to itself. That
is three kinds of block, none of which needs a mask or padding: prefix and suffix each causal on themselves, and all
suffix tokens of a tree (they are adjacent) against their prefix, unmasked. The two partial results of a suffix token are
merged by their log-sum-exp, and backward hands the *merged* output and log-sum-exp to each block, which makes every
block's gradient exact (the identity behind ring attention: Liu et al., arXiv:2310.01889).

On a CPU short rows go through `row_attention`, longer ones through torch's flash kernel on views of the packed tensors. That
has no fast bfloat16 backward (a fifth of its float32 rate), so bfloat16 goes through float32 there. On a GPU all blocks of one
kind are one call of a kernel for ragged rows (ragged.py); where that does not take the dtype (float32), `attend` falls back to
one masked `scaled_dot_product_attention` over padded rows.

All of that is for plain attention. A layer with terms (a window that some row leaves, capped scores, sinks) goes through
`general_attention`, on every device, but for a window alone where there is a kernel for ragged rows; positions within a row
count through the shared prefix.

All index work is done once per microbatch, in the constructor or at the first layer.

Shape legend: T packed tokens, H query heads, K key/value heads (H a multiple of K), D head size, R rows, Q and C padded
query and key lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.types import Microbatch

from ..copying import to_device
from ..native import library as native
from .general import GeneralAttention
from .interface import PLAIN, AttentionTerms, Routed
from .ragged import RaggedTree, RaggedWindow, kernel_for
from .rows import Row, RowAttention, fits

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Measured on two cores: in bfloat16 half the kernel's time. In float32 a third less, if the softmax takes one pass; else no less
_BY_PRODUCTS = {torch.bfloat16} | ({torch.float32} if native.available() else set())
# Below this a kernel call costs more than the arithmetic: spans are padded together.
_SMALL_SPAN_FLOP = 1.5e6
_PADDING = 1.25  # most padded tokens per real token in such a bin


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _SpanBin:
    """Spans of tokens padded to one length. Rows of padding repeat a real token and get a zero gradient."""

    count: int
    length: int
    gather: Tensor  # [count * length] packed index
    padding: Tensor  # positions in `gather` that are padding
    real: Tensor  # positions in `gather` that are not
    target: Tensor  # packed index of `real`


class TreePlan(Routed):
    """The geometry of one packed sequence, as `types.Microbatch` describes it. Arrays of ints; suffixes may be absent.

    Requires that the packed tokens are exactly the prefixes and suffixes, and that the suffixes of a tree are adjacent
    (zero-length ones anywhere). Errors: ValueError where they are not.
    """

    def __init__(
        self,
        prefix_start: npt.ArrayLike,
        prefix_length: npt.ArrayLike,
        suffix_start: npt.ArrayLike = (),
        suffix_length: npt.ArrayLike = (),
        suffix_tree: npt.ArrayLike = (),
    ) -> None:
        starts, lengths = _ints(prefix_start), _ints(prefix_length)
        self._prefixes = [_Span(int(s), int(n)) for s, n in zip(starts, lengths, strict=True)]
        self._suffixes: list[_Span] = []
        self._tree_of: list[int] = []
        for start, length, tree in zip(_ints(suffix_start), _ints(suffix_length), _ints(suffix_tree), strict=True):
            if length:
                self._suffixes.append(_Span(int(start), int(length)))
                self._tree_of.append(int(tree))
        self.spans = [span for span in (*self._prefixes, *self._suffixes) if span.length]
        self.tokens = sum(span.length for span in self.spans)
        self.cross = self._cross_blocks()  # (suffix tokens of a tree, its prefix)
        self.longest = max((before.length + own.length for before, own in self.rows()), default=0)
        self._general: dict[tuple[int | None, int, torch.device], GeneralAttention] = {}
        self._short: dict[tuple[int, torch.dtype], RowAttention | None] = {}
        self._bins: dict[torch.device, list[_SpanBin]] = {}
        self._rows: dict[torch.device, _PaddedRows] = {}
        self._ragged: dict[tuple[int | None, torch.dtype, torch.device], RaggedTree | RaggedWindow | None] = {}

    @classmethod
    def of(cls, batch: Microbatch) -> TreePlan:
        """The plan of a microbatch."""
        return cls(batch.prefix_start, batch.prefix_length, batch.suffix_start, batch.suffix_length, batch.suffix_tree)

    def rows(self) -> list[tuple[_Span, _Span]]:
        """(prefix, own tokens) of each sequence: a suffix behind its prefix; a prefix that has none, behind nothing."""
        empty, extended = _Span(0, 0), set(self._tree_of)
        rows = [(empty, span) for tree, span in enumerate(self._prefixes) if span.length and tree not in extended]
        rows += [(self._prefixes[tree], span) for span, tree in zip(self._suffixes, self._tree_of, strict=True)]
        return rows

    def _cross_blocks(self) -> list[tuple[_Span, _Span]]:
        ends: dict[int, tuple[int, int]] = {}
        for span, tree in zip(self._suffixes, self._tree_of, strict=True):
            first, end = ends.get(tree, (span.start, span.start))
            if span.start != end:
                raise ValueError(
                    f"the suffixes of tree {tree} are not adjacent: one ends at {end}, next at {span.start}"
                )
            ends[tree] = (first, span.start + span.length)
        return [
            (_Span(first, end - first), self._prefixes[tree])
            for tree, (first, end) in ends.items()
            if self._prefixes[tree].length
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = PLAIN
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D] in the dtype of `query`. Differentiable, also in the
        sinks."""
        terms = terms.within(self.longest)
        if terms.plain and query.device.type != "cpu" and self._by_kernel(query, terms) is None:
            self._check(query)
            return self.attend_masked(query, key, value, scaling)
        result: Tensor = _TreeAttention.apply(query, key, value, terms.sinks, self, scaling, terms)
        return result

    def _check(self, query: Tensor) -> None:
        if query.shape[0] != self.tokens:
            raise ValueError(f"the plan describes {self.tokens} tokens, the model handed over {query.shape[0]}")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """What `attend` gives, and what `backward` asks for beside it: the log-sum-exp, the weights of short rows, or,
        where it computes all of it again, nothing. Without a graph."""
        self._check(query)
        terms = terms.within(self.longest)
        ragged = self._by_kernel(query, terms)
        if ragged is not None:
            return ragged.forward(query, key, value, scaling)
        if not terms.plain:
            general = self._with_terms(query, terms)
            return general.forward(query, key, value, scaling, terms.softcap, terms.sinks), query.new_empty(0)
        if query.device.type != "cpu":
            return self.attend_masked(query, key, value, scaling), query.new_empty(0)
        short = self._by_products(query)
        if short is not None:
            return short.forward(query, key, value, scaling)
        dtype = query.dtype
        query, key, value = _wider(query), _wider(key), _wider(value)
        out = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[:2], dtype=query.dtype)  # [T, H]
        for block in self.self_blocks(query):
            q, k, v = _take(query, block), _take(key, block), _take(value, block)
            part, part_lse = _flash(q, k, v, 0.0, True, scale=scaling)
            _put(out, block, part)
            _put(lse.unsqueeze(-1), block, part_lse.unsqueeze(-1))
        for rows, prefix in self.cross:
            part, part_lse = _flash(
                _take(query, rows), _take(key, prefix), _take(value, prefix), 0.0, False, scale=scaling
            )
            _merge(_slice(out, rows), _slice(lse, rows), part[0].transpose(0, 1), part_lse[0].t())
        return out.to(dtype), lse

    def backward(
        self,
        grad: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        scaling: float,
        gradients: tuple[Tensor, Tensor, Tensor],
        terms: AttentionTerms = PLAIN,
        sinks_gradient: Tensor | None = None,
    ) -> None:
        """`gradients` become those of query, key and value. `saved`: query, key, value and what `forward` gave for the same
        `terms`. `sinks_gradient` [H], float32 or wider: that of the sinks is added to it; None: nobody wants it."""
        query, key, value, out, lse = saved
        terms = terms.within(self.longest)
        ragged = self._by_kernel(query, terms)
        if ragged is not None:
            ragged.backward(grad, saved, scaling, gradients)
            return
        if not terms.plain:
            general = self._with_terms(query, terms)
            inputs = query, key, value
            general.backward(grad, inputs, scaling, terms.softcap, terms.sinks, gradients, sinks_gradient)
            return
        if query.device.type != "cpu":
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
                again = self.attend_masked(leaves[0], leaves[1], leaves[2], scaling)
            for target, part in zip(gradients, torch.autograd.grad(again, leaves, grad), strict=True):
                target.copy_(part)
            return
        short = self._by_products(query)
        if short is not None:
            short.backward(grad, query, key, value, lse, scaling, gradients)
            return
        query, key, value, out, grad = (_wider(tensor) for tensor in (query, key, value, out, grad))
        lse3 = lse.unsqueeze(-1)
        narrow = gradients[0].dtype != query.dtype
        sums = tuple(torch.empty(t.shape, dtype=query.dtype) for t in gradients) if narrow else gradients
        for block in self.self_blocks(query):
            parts = _flash_backward(
                _take(grad, block, zero_padding=True), _take(query, block), _take(key, block), _take(value, block),
                _take(out, block), _take(lse3, block).squeeze(-1).contiguous(), 0.0, True, scale=scaling,
            )  # fmt: skip
            for target, part in zip(sums, parts, strict=True):
                _put(target, block, part)
        for rows, prefix in self.cross:
            parts = _flash_backward(
                _take(grad, rows), _take(query, rows), _take(key, prefix), _take(value, prefix),
                _take(out, rows), _take(lse3, rows).squeeze(-1).contiguous(), 0.0, False, scale=scaling,
            )  # fmt: skip
            for target, span, part in zip(sums, (rows, prefix, prefix), parts, strict=True):
                _slice(target, span).add_(part[0].transpose(0, 1))
        if narrow:
            for target, part in zip(gradients, sums, strict=True):
                target.copy_(part)

    def _by_kernel(self, query: Tensor, terms: AttentionTerms) -> RaggedTree | RaggedWindow | None:
        """The plan for a kernel of ragged rows, where there is one that takes these queries and computes these terms."""
        if terms.softcap is not None or terms.sinks is not None:
            return None
        case = terms.window, query.dtype, query.device
        if case not in self._ragged:
            kernel = kernel_for(query.device, query.dtype, query.shape[2])
            if kernel is None:
                self._ragged[case] = None
            elif terms.window is None:
                self._ragged[case] = RaggedTree(kernel, self._own_rows(), query.device)
            else:
                self._ragged[case] = RaggedWindow(kernel, self._own_rows(), terms.window, query.device)
        return self._ragged[case]

    def _by_products(self, query: Tensor) -> RowAttention | None:
        """The plan by products where it is the faster one, which needs every row to be short."""
        if query.dtype not in _BY_PRODUCTS:
            return None
        heads = query.shape[1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        if (heads, dtype) not in self._short:
            rows = self._own_rows()
            self._short[heads, dtype] = RowAttention(rows, heads, dtype) if fits(rows, heads) else None
        return self._short[heads, dtype]

    def _with_terms(self, query: Tensor, terms: AttentionTerms) -> GeneralAttention:
        geometry = terms.window, query.shape[1], query.device
        if geometry not in self._general:
            self._general[geometry] = GeneralAttention(self._own_rows(), *geometry)
        return self._general[geometry]

    def _own_rows(self) -> list[Row]:
        """Every packed token once as an own token: prefixes behind nothing, suffixes behind their prefix."""
        rows = [(0, 0, span.start, span.length) for span in self._prefixes if span.length]
        for span, tree in zip(self._suffixes, self._tree_of, strict=True):
            before = self._prefixes[tree]
            rows.append((before.start, before.length, span.start, span.length))
        return rows

    def self_blocks(self, query: Tensor) -> list[_Span] | list[_SpanBin]:
        """The causal blocks: single spans as views where they are large, padded bins where they are small."""
        width = query.shape[1] * query.shape[2]
        flop = 4.0 * width * sum(span.length**2 for span in self.spans) / max(len(self.spans), 1)
        if flop > _SMALL_SPAN_FLOP or len(self.spans) < 4:
            return self.spans
        if query.device not in self._bins:
            self._bins[query.device] = _make_bins(self.spans, query.device)
        return self._bins[query.device]

    # -- any device: one masked call over padded rows ---------------------------------------------------------------

    def attend_masked(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """The same through `scaled_dot_product_attention` with a mask: one row per span, its prefix in front."""
        if query.device not in self._rows:
            self._rows[query.device] = self._make_rows(query.device)
        rows = self._rows[query.device]
        # Under a mask torch has no kernel for grouped heads but the one that writes all scores to memory.
        group = query.shape[1] // key.shape[1]
        keys, values = (rows.keys_of(part).repeat_interleave(group, 1) for part in (key, value))
        out = F.scaled_dot_product_attention(rows.queries_of(query), keys, values, attn_mask=rows.mask, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows.place)

    def _make_rows(self, device: torch.device) -> _PaddedRows:
        rows = self._own_rows()
        longest, context = max(row[3] for row in rows), max(row[1] for row in rows)
        mask = np.zeros((len(rows), longest, context + longest), np.bool_)
        causal = np.tril(np.ones((longest, longest), np.bool_))
        place = np.zeros(self.tokens, np.int64)
        source, target = [], []
        for row, (prefix_start, prefix, start, length) in enumerate(rows):
            place[start : start + length] = row * longest + np.arange(length)
            first = row * (context + longest)
            source += [np.arange(prefix_start, prefix_start + prefix), np.arange(start, start + length)]
            target += [first + np.arange(prefix), first + context + np.arange(length)]
            mask[row, :, :prefix] = True
            # A padded query sees its own padding: a row of -inf would give NaN.
            mask[row, :, context:] = causal
        found = (place, np.concatenate(source), np.concatenate(target), mask[:, None])
        return _PaddedRows(len(rows), longest, *(to_device(array, device) for array in found))


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Each token is written to its place among zeros: backward of an index that pads would add up the padding one by one."""

    count: int  # R
    longest: int  # Q
    place: Tensor  # [T] where a token is among the queries [R * Q]
    source: Tensor  # the keys that rows have, and where among [R * C]
    target: Tensor
    mask: Tensor  # bool [R, 1, Q, C], true: attend

    def queries_of(self, query: Tensor) -> Tensor:
        """[T, H, D] -> [R, H, Q, D]."""
        zeros = query.new_zeros(self.count * self.longest, *query.shape[1:])
        rows = zeros.index_copy(0, self.place, query)
        return rows.view(self.count, self.longest, *query.shape[1:]).transpose(1, 2)

    def keys_of(self, key: Tensor) -> Tensor:
        """[T, K, D] -> [R, K, C, D]. Gradients of keys that rows share are summed in float32 or wider."""
        wide = key.to(torch.promote_types(key.dtype, torch.float32))
        seen = wide.index_select(0, self.source).to(key.dtype)
        width = self.mask.shape[3]
        rows = key.new_zeros(self.count * width, *key.shape[1:]).index_copy(0, self.target, seen)
        return rows.view(self.count, width, *key.shape[1:]).transpose(1, 2)


class _TreeAttention(torch.autograd.Function):
    """Forward and backward of a plan as one node: on a CPU, and of what has terms anywhere."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: TreePlan,
        scaling: float,
        terms: AttentionTerms,
    ) -> Tensor:
        """`sinks`: those of `terms`, where autograd sees them."""
        out, lse = plan.forward(query, key, value, scaling, terms)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.plan, ctx.scaling, ctx.window, ctx.softcap = plan, scaling, terms.window, terms.softcap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        terms = AttentionTerms(ctx.window, ctx.softcap, sinks)
        gradients = torch.empty_like(saved[0]), torch.empty_like(saved[1]), torch.empty_like(saved[2])
        of_sinks = None
        if ctx.needs_input_grad[3]:
            of_sinks = torch.zeros_like(sinks, dtype=torch.promote_types(sinks.dtype, torch.float32))
        ctx.plan.backward(grad.contiguous(), saved, ctx.scaling, gradients, terms, of_sinks)
        return (*gradients, None if of_sinks is None else of_sinks.to(sinks.dtype), None, None, None)


def _wider(tensor: Tensor) -> Tensor:
    """The CPU kernel's bfloat16 backward runs at a fifth of its float32 rate."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """In place: (`out` [N, H, D], `lse` [N, H]) and a second partial result become their joint softmax average."""
    joint = torch.logaddexp(lse, part_lse)
    out.mul_((lse - joint).exp_().unsqueeze(-1))
    out.addcmul_(part, (part_lse - joint).exp_().unsqueeze(-1))
    lse.copy_(joint)


def _slice(tensor: Tensor, span: _Span) -> Tensor:
    return tensor[span.start : span.start + span.length]


def _take(tensor: Tensor, block: _Span | _SpanBin, zero_padding: bool = False) -> Tensor:
    """[T, X, Y] -> [rows, X, length, Y] of one block; a view where the block is a single span."""
    if isinstance(block, _Span):
        return _slice(tensor, block).transpose(0, 1).unsqueeze(0)
    rows = tensor.index_select(0, block.gather)
    if zero_padding and block.padding.numel():
        rows.index_fill_(0, block.padding, 0.0)
    return rows.view(block.count, block.length, *tensor.shape[1:]).transpose(1, 2)


def _put(tensor: Tensor, block: _Span | _SpanBin, part: Tensor) -> None:
    """The inverse of `_take`: overwrite the block's tokens."""
    if isinstance(block, _Span):
        _slice(tensor, block).copy_(part[0].transpose(0, 1))
        return
    rows = part.transpose(1, 2).reshape(block.count * block.length, *tensor.shape[1:])
    tensor.index_copy_(0, block.target, rows.index_select(0, block.real) if block.padding.numel() else rows)


def _make_bins(spans: list[_Span], device: torch.device) -> list[_SpanBin]:
    """Sort by length, then cut where padding would pass `_PADDING`."""
    bins: list[_SpanBin] = []
    members: list[_Span] = []
    real = 0
    for span in sorted(spans, key=lambda span: -span.length):
        if members and members[0].length * (len(members) + 1) > _PADDING * (real + span.length):
            bins.append(_make_bin(members, device))
            members, real = [], 0
        members.append(span)
        real += span.length
    if members:
        bins.append(_make_bin(members, device))
    return bins


def _make_bin(members: list[_Span], device: torch.device) -> _SpanBin:
    length = max(span.length for span in members)
    offset = np.arange(length)[None]
    lengths = np.array([span.length for span in members])[:, None]
    gather = np.array([span.start for span in members])[:, None] + np.minimum(offset, lengths - 1)
    valid = (offset < lengths).reshape(-1)
    gather = gather.reshape(-1)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return to_device(np.ascontiguousarray(array.astype(np.int64)), device)

    return _SpanBin(
        len(members), length, tensor(gather), tensor(np.flatnonzero(~valid)), tensor(np.flatnonzero(valid)),
        tensor(gather[valid]),
    )  # fmt: skip


def _ints(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64).reshape(-1)
