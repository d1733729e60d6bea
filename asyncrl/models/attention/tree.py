"""Attention over packed prefix trees. A tree is a prompt (prefix) with its completions (suffixes). Prefill has no suffixes.

Attention is computed in blocks. In a causal block, a prefix or a suffix attends to itself. In one more block for each tree, all
suffix tokens, which are adjacent, attend to the whole prefix. So no block needs a mask tensor or padding. The two partial results
of a suffix token are merged by their log-sum-exp. Backward gives the *merged* output and log-sum-exp to each block, so the gradient
of every block is exact. Ring attention uses the same identity (Liu et al., arXiv:2310.01889).

Plain attention has four implementations:
* CPU, short rows: `RowAttention` (rows.py).
* CPU, longer rows: torch's flash kernel on views of the packed tensors. Its bfloat16 backward has a fifth of the float32 rate,
  so bfloat16 is computed in float32.
* GPU: a kernel for ragged rows (ragged.py), with one call for all blocks of a kind.
* GPU, a dtype without such a kernel (float32): one masked `scaled_dot_product_attention` over padded rows.

A layer with terms (a window shorter than some row, capped scores, sinks) uses `GeneralAttention`. If a window is its only term, and
there is a ragged kernel, the layer uses that kernel. Indices are computed once per microbatch.

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
from .bins import index_tensor
from .general import GeneralAttention
from .interface import PLAIN, AttentionTerms, PlanWithRoutes
from .ragged import RaggedTree, RaggedWindow, kernel_for
from .rows import Row, RowAttention, fits

# CPU kernels. The arguments after the tensors are dropout and causal.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# dtypes for which row attention is faster than the flash kernel on two cores. In bfloat16 row attention takes half the time. In
# float32 row attention takes a third less, but only with the native one-pass softmax.
_ROW_ATTENTION_DTYPES = {torch.bfloat16} | ({torch.float32} if native.available() else set())
# A kernel call of fewer operations costs more than its arithmetic, so spans are padded and share one call.
_SMALL_SPAN_FLOP = 1.5e6
_MAX_PADDED_PER_REAL = 1.25  # tokens of a bin, with and without padding


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _SpanBin:
    """`count` spans, padded to `length` tokens each. Padding repeats a real token, and must get a gradient of zero."""

    count: int
    length: int
    gather: Tensor  # [count * length] packed index of each padded position
    padding: Tensor  # positions in `gather` with padding
    real: Tensor  # positions in `gather` without padding
    real_tokens: Tensor  # packed index of each position in `real`


class TreePlan(PlanWithRoutes):
    """The prefixes and suffixes of one packed microbatch. All arguments are integer arrays, as in `types.Microbatch`.

    Every packed token must belong to exactly one prefix or suffix. The suffixes of a tree must be adjacent, except suffixes of
    length zero. Errors: ValueError if the suffixes of a tree are not adjacent.
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
        # Pairs of spans: all suffix tokens of a tree, and the prefix of the tree.
        self.cross = self._cross_blocks()
        self.longest = max((prefix.length + span.length for prefix, span in self.rows()), default=0)
        self._general: dict[tuple[int | None, int, torch.device], GeneralAttention] = {}
        self._short: dict[tuple[int, torch.dtype], RowAttention | None] = {}
        self._bins: dict[torch.device, list[_SpanBin]] = {}
        self._rows: dict[torch.device, _PaddedRows] = {}
        self._ragged: dict[tuple[int | None, torch.dtype, torch.device], RaggedTree | RaggedWindow | None] = {}

    @classmethod
    def of(cls, batch: Microbatch) -> TreePlan:
        """The plan for the prefixes and suffixes of `batch`."""
        return cls(batch.prefix_start, batch.prefix_length, batch.suffix_start, batch.suffix_length, batch.suffix_tree)

    def rows(self) -> list[tuple[_Span, _Span]]:
        """(prefix, own tokens) of each sequence. A prefix without suffixes is a sequence whose first span is empty."""
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
                    f"suffixes of tree {tree} must be adjacent: one ends at token {end}, the next starts at {span.start}"
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
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D] in the dtype of `query`. Differentiable in query, key,
        value and sinks."""
        terms = terms.simplified_for(self.longest)
        if terms.plain and query.device.type != "cpu" and self._ragged_plan(query, terms) is None:
            self._check_count(query)
            return self.attend_masked(query, key, value, scaling)
        result: Tensor = _TreeAttention.apply(query, key, value, terms.sinks, self, scaling, terms)
        return result

    def _check_count(self, query: Tensor) -> None:
        if query.shape[0] != self.tokens:
            raise ValueError(f"the plan describes {self.tokens} tokens, but the model passed {query.shape[0]} queries")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """(output, saved): the output of `attend` without an autograd graph, and one tensor that `backward` needs. `saved` is
        the log-sum-exp, the attention weights of short rows, or an empty tensor if `backward` computes the forward again."""
        self._check_count(query)
        terms = terms.simplified_for(self.longest)
        ragged = self._ragged_plan(query, terms)
        if ragged is not None:
            return ragged.forward(query, key, value, scaling)
        if not terms.plain:
            general = self._general_plan(query, terms)
            return general.forward(query, key, value, scaling, terms.softcap, terms.sinks), query.new_empty(0)
        if query.device.type != "cpu":
            return self.attend_masked(query, key, value, scaling), query.new_empty(0)
        short = self._short_row_plan(query)
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
        """Writes the gradients of query, key and value into `gradients`. `saved`: query, key, value and the two results of
        `forward` for the same `terms`. `sinks_gradient`: [H], float32 or wider, to which the gradient of the sinks is added."""
        query, key, value, out, lse = saved
        terms = terms.simplified_for(self.longest)
        ragged = self._ragged_plan(query, terms)
        if ragged is not None:
            ragged.backward(grad, saved, scaling, gradients)
            return
        if not terms.plain:
            general = self._general_plan(query, terms)
            inputs = query, key, value
            general.backward(grad, inputs, scaling, terms.softcap, terms.sinks, gradients, sinks_gradient)
            return
        if query.device.type != "cpu":
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
                recomputed = self.attend_masked(leaves[0], leaves[1], leaves[2], scaling)
            for target, part in zip(gradients, torch.autograd.grad(recomputed, leaves, grad), strict=True):
                target.copy_(part)
            return
        short = self._short_row_plan(query)
        if short is not None:
            short.backward(grad, query, key, value, lse, scaling, gradients)
            return
        query, key, value, out, grad = (_wider(tensor) for tensor in (query, key, value, out, grad))
        lse = lse.unsqueeze(-1)
        sums_are_wider = gradients[0].dtype != query.dtype
        sums = tuple(torch.empty(t.shape, dtype=query.dtype) for t in gradients) if sums_are_wider else gradients
        for block in self.self_blocks(query):
            parts = _flash_backward(
                _take(grad, block, zero_padding=True), _take(query, block), _take(key, block), _take(value, block),
                _take(out, block), _take(lse, block).squeeze(-1).contiguous(), 0.0, True, scale=scaling,
            )  # fmt: skip
            for target, part in zip(sums, parts, strict=True):
                _put(target, block, part)
        for rows, prefix in self.cross:
            parts = _flash_backward(
                _take(grad, rows), _take(query, rows), _take(key, prefix), _take(value, prefix),
                _take(out, rows), _take(lse, rows).squeeze(-1).contiguous(), 0.0, False, scale=scaling,
            )  # fmt: skip
            for target, span, part in zip(sums, (rows, prefix, prefix), parts, strict=True):
                _slice(target, span).add_(part[0].transpose(0, 1))
        if sums_are_wider:
            for target, part in zip(gradients, sums, strict=True):
                target.copy_(part)

    def _ragged_plan(self, query: Tensor, terms: AttentionTerms) -> RaggedTree | RaggedWindow | None:
        """The cached plan for a ragged kernel; None if no kernel supports the device, the dtype, the head size or the terms."""
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

    def _short_row_plan(self, query: Tensor) -> RowAttention | None:
        """The cached row attention. None if the flash kernel is faster, such as for long rows."""
        if query.dtype not in _ROW_ATTENTION_DTYPES:
            return None
        heads = query.shape[1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        if (heads, dtype) not in self._short:
            rows = self._own_rows()
            self._short[heads, dtype] = RowAttention(rows, heads, dtype) if fits(rows, heads) else None
        return self._short[heads, dtype]

    def _general_plan(self, query: Tensor, terms: AttentionTerms) -> GeneralAttention:
        geometry = terms.window, query.shape[1], query.device
        if geometry not in self._general:
            self._general[geometry] = GeneralAttention(self._own_rows(), *geometry)
        return self._general[geometry]

    def _own_rows(self) -> list[Row]:
        """(prefix start, prefix length, start, length) of each span. The prefix length of a prefix itself is 0."""
        rows = [(0, 0, span.start, span.length) for span in self._prefixes if span.length]
        for span, tree in zip(self._suffixes, self._tree_of, strict=True):
            prefix = self._prefixes[tree]
            rows.append((prefix.start, prefix.length, span.start, span.length))
        return rows

    def self_blocks(self, query: Tensor) -> list[_Span] | list[_SpanBin]:
        """The causal blocks: each span alone if spans are large, else bins of padded spans."""
        width = query.shape[1] * query.shape[2]
        flop = 4.0 * width * sum(span.length**2 for span in self.spans) / max(len(self.spans), 1)
        if flop > _SMALL_SPAN_FLOP or len(self.spans) < 4:
            return self.spans
        if query.device not in self._bins:
            self._bins[query.device] = _make_bins(self.spans, query.device)
        return self._bins[query.device]

    def attend_masked(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Equal to `attend`, by one masked `scaled_dot_product_attention`. A padded row holds a span and its prefix."""
        if query.device not in self._rows:
            self._rows[query.device] = self._make_rows(query.device)
        rows = self._rows[query.device]
        # Keys are repeated for each query head: torch's masked kernels for grouped heads write all scores to memory.
        group = query.shape[1] // key.shape[1]
        keys, values = (rows.keys_of(part).repeat_interleave(group, 1) for part in (key, value))
        out = F.scaled_dot_product_attention(rows.queries_of(query), keys, values, attn_mask=rows.mask, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows.query_target)

    def _make_rows(self, device: torch.device) -> _PaddedRows:
        rows = self._own_rows()
        longest, context = max(row[3] for row in rows), max(row[1] for row in rows)
        mask = np.zeros((len(rows), longest, context + longest), np.bool_)
        causal = np.tril(np.ones((longest, longest), np.bool_))
        query_target = np.zeros(self.tokens, np.int64)
        source, target = [], []
        for row, (prefix_start, prefix, start, length) in enumerate(rows):
            query_target[start : start + length] = row * longest + np.arange(length)
            first = row * (context + longest)
            source += [np.arange(prefix_start, prefix_start + prefix), np.arange(start, start + length)]
            target += [first + np.arange(prefix), first + context + np.arange(length)]
            mask[row, :, :prefix] = True
            # Padded queries see padded keys: a softmax over scores that are all -inf would give NaN.
            mask[row, :, context:] = causal
        arrays = (query_target, np.concatenate(source), np.concatenate(target), mask[:, None])
        return _PaddedRows(len(rows), longest, *(to_device(array, device) for array in arrays))


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Indices that copy tokens into zero-filled rows. With a gather, backward would also add up the gradients of padding."""

    count: int  # R
    longest: int  # Q
    query_target: Tensor  # [T] index of each token in [R * Q]
    key_source: Tensor  # packed index of each key of each row
    key_target: Tensor  # index of the same keys in [R * C]
    mask: Tensor  # bool [R, 1, Q, C], true: attend

    def queries_of(self, query: Tensor) -> Tensor:
        """[T, H, D] -> [R, H, Q, D]."""
        zeros = query.new_zeros(self.count * self.longest, *query.shape[1:])
        rows = zeros.index_copy(0, self.query_target, query)
        return rows.view(self.count, self.longest, *query.shape[1:]).transpose(1, 2)

    def keys_of(self, key: Tensor) -> Tensor:
        """[T, K, D] -> [R, K, C, D]."""
        # Rows share keys. The cast to float32 or wider makes backward sum their gradients in that dtype.
        wide = key.to(torch.promote_types(key.dtype, torch.float32))
        selected = wide.index_select(0, self.key_source).to(key.dtype)
        width = self.mask.shape[3]
        rows = key.new_zeros(self.count * width, *key.shape[1:]).index_copy(0, self.key_target, selected)
        return rows.view(self.count, width, *key.shape[1:]).transpose(1, 2)


class _TreeAttention(torch.autograd.Function):
    """`TreePlan.forward` and `TreePlan.backward` as one autograd node."""

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
        """`sinks` is `terms.sinks`: autograd tracks tensors only if they are arguments of their own."""
        out, lse = plan.forward(query, key, value, scaling, terms)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.plan, ctx.scaling, ctx.window, ctx.softcap = plan, scaling, terms.window, terms.softcap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        terms = AttentionTerms(ctx.window, ctx.softcap, sinks)
        gradients = torch.empty_like(saved[0]), torch.empty_like(saved[1]), torch.empty_like(saved[2])
        sinks_gradient = None
        if ctx.needs_input_grad[3]:
            sinks_gradient = torch.zeros_like(sinks, dtype=torch.promote_types(sinks.dtype, torch.float32))
        ctx.plan.backward(grad.contiguous(), saved, ctx.scaling, gradients, terms, sinks_gradient)
        return (*gradients, None if sinks_gradient is None else sinks_gradient.to(sinks.dtype), None, None, None)


def _wider(tensor: Tensor) -> Tensor:
    """16-bit tensors as float32: the CPU kernel's bfloat16 backward has a fifth of the float32 rate."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges a second partial result into `out` [N, H, D] and `lse` [N, H], in place, as one softmax over all keys."""
    joint = torch.logaddexp(lse, part_lse)
    out.mul_((lse - joint).exp_().unsqueeze(-1))
    out.addcmul_(part, (part_lse - joint).exp_().unsqueeze(-1))
    lse.copy_(joint)


def _slice(tensor: Tensor, span: _Span) -> Tensor:
    return tensor[span.start : span.start + span.length]


def _take(tensor: Tensor, block: _Span | _SpanBin, zero_padding: bool = False) -> Tensor:
    """[T, X, Y] -> [rows, X, length, Y] of one block. The result is a view if the block is a single span."""
    if isinstance(block, _Span):
        return _slice(tensor, block).transpose(0, 1).unsqueeze(0)
    rows = tensor.index_select(0, block.gather)
    if zero_padding and block.padding.numel():
        rows.index_fill_(0, block.padding, 0.0)
    return rows.view(block.count, block.length, *tensor.shape[1:]).transpose(1, 2)


def _put(tensor: Tensor, block: _Span | _SpanBin, part: Tensor) -> None:
    """The inverse of `_take`: overwrites the block's tokens in `tensor`."""
    if isinstance(block, _Span):
        _slice(tensor, block).copy_(part[0].transpose(0, 1))
        return
    rows = part.transpose(1, 2).reshape(block.count * block.length, *tensor.shape[1:])
    tensor.index_copy_(0, block.real_tokens, rows.index_select(0, block.real) if block.padding.numel() else rows)


def _make_bins(spans: list[_Span], device: torch.device) -> list[_SpanBin]:
    """Sorts spans by length. A span starts a new bin if the old one would exceed `_MAX_PADDED_PER_REAL`."""
    bins: list[_SpanBin] = []
    members: list[_Span] = []
    real_tokens = 0
    for span in sorted(spans, key=lambda span: -span.length):
        if members and members[0].length * (len(members) + 1) > _MAX_PADDED_PER_REAL * (real_tokens + span.length):
            bins.append(_make_bin(members, device))
            members, real_tokens = [], 0
        members.append(span)
        real_tokens += span.length
    if members:
        bins.append(_make_bin(members, device))
    return bins


def _make_bin(members: list[_Span], device: torch.device) -> _SpanBin:
    length = max(span.length for span in members)
    offset = np.arange(length)[None]
    lengths = np.array([span.length for span in members])[:, None]
    gather = np.array([span.start for span in members])[:, None] + np.minimum(offset, lengths - 1)
    real = offset < lengths
    indices = (gather, np.flatnonzero(~real), np.flatnonzero(real), gather[real])
    return _SpanBin(len(members), length, *(index_tensor(index, device) for index in indices))


def _ints(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64).reshape(-1)
