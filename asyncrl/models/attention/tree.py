"""Attention over packed trees of any depth. A token attends to its node up to itself, and to all ancestors of the node.

Attention is computed in blocks. In a causal block, a node attends to itself. In one more block for each inner node, all
descendants of the node, which are adjacent, attend to the whole node. So no block needs a mask tensor or padding. The partial
results of a token are merged by their log-sum-exp. Backward gives the *merged* output and log-sum-exp to each block, so the
gradient of every block is exact. Ring attention uses the same identity (Liu et al., arXiv:2310.01889).

Attention without terms (see below) has four implementations:
* CPU, short rows: `RowAttention` (rows.py).
* CPU, longer rows: torch's flash kernel on views of the packed tensors. Its bfloat16 backward has a fifth of the float32 rate,
  so bfloat16 is computed in float32.
* GPU: a kernel for ragged rows (ragged.py), with one call for all causal blocks and one for the other blocks of each level.
* GPU, a dtype without such a kernel (float32): one masked `scaled_dot_product_attention` over padded rows. With more than two
  levels the padded rows would outgrow the memory, and `GeneralAttention` takes their place.

A layer with terms (a window shorter than some row, capped scores, sinks) uses `GeneralAttention`. If a window is its only term, and
there is a ragged kernel, the layer uses that kernel. Indices are computed once per microbatch.

Shape legend: T packed tokens, H query heads, K key/value heads (H a multiple of K), D head size, R rows, Q and C padded
query and key lengths.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.types import Int64Array, Microbatch

from ..copying import to_device
from ..native import library as native
from .bins import index_tensor
from .general import GeneralAttention
from .interface import NO_TERMS, AttentionTerms, PlanWithRoutes
from .ragged import RaggedTree, RaggedWindow, kernel_for
from .rows import NodeRow, RowAttention, fits

# CPU kernels. The arguments after the tensors are dropout and causal.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# dtypes for which row attention is faster than the flash kernel on two cores. In bfloat16 row attention takes half the time. In
# float32 row attention takes a third less, but only with the native one-pass softmax.
_ROW_ATTENTION_DTYPES = {torch.bfloat16} | ({torch.float32} if native.available() else set())
# A kernel call of fewer operations costs more than its arithmetic, so nodes are padded and share one call.
_SMALL_SPAN_FLOP = 1.5e6
_MAX_PADDED_PER_REAL = 1.25  # tokens of a bin, with and without padding


@dataclass(frozen=True, slots=True)
class _SpanBin:
    """`count` nodes, padded to `length` tokens each. Padding repeats a real token, and must get a gradient of zero."""

    count: int
    length: int
    gather: Tensor  # [count * length] packed index of each padded position
    padding: Tensor  # positions in `gather` with padding
    real: Tensor  # positions in `gather` without padding
    real_tokens: Tensor  # packed index of each position in `real`


class TreePlan(PlanWithRoutes):
    """The nodes of one packed microbatch, in depth-first preorder. The tokens of a node are adjacent and follow those of the node
    before it, so the tokens of its descendants come right behind its own. `node_parent`: -1 for a root; None: all nodes are roots.

    Errors: ValueError if a parent is neither the node before nor an ancestor of that node.
    """

    def __init__(self, node_length: npt.ArrayLike, node_parent: npt.ArrayLike | None = None) -> None:
        lengths = _ints(node_length).tolist()
        parents = [-1] * len(lengths) if node_parent is None else _ints(node_parent).tolist()
        starts = [0, *itertools.accumulate(lengths)]
        self.tokens: int = starts[-1]
        self.rows: list[NodeRow] = []  # of each node with tokens
        contexts = {-1: np.zeros(0, np.int64)}  # of the children of a node
        depths: list[int] = []  # of a node: how many ancestors have tokens
        levels = defaultdict[int, list[tuple[slice, slice]]](list)
        for node, parent in enumerate([*parents, -1]):
            # The subtrees of the previous node and of its ancestors below `parent` end here.
            ended = node - 1
            while ended not in (parent, -1):
                if starts[ended] < starts[ended + 1] < starts[node]:
                    own = slice(starts[ended], starts[ended + 1])
                    levels[depths[ended]].append((slice(own.stop, starts[node]), own))
                ended = parents[ended]
            if ended != parent:
                raise ValueError(f"nodes must be in depth-first preorder, but node {node} has parent {parent}")
            if node == len(parents):
                break
            if parent not in contexts:
                contexts[parent] = np.r_[contexts[parents[parent]], starts[parent] : starts[parent + 1]]
            depths.append(depths[parent] + (lengths[parent] > 0) if parent >= 0 else 0)
            if lengths[node]:
                self.rows.append(NodeRow(contexts[parent], starts[node], lengths[node]))
        # By level, from the roots on: packed indices of (descendants, own tokens) of each inner node.
        self.levels = [levels[depth] for depth in sorted(levels)]
        self.longest = max((row.total for row in self.rows), default=0)
        self._general: dict[tuple[int | None, int, torch.device], GeneralAttention] = {}
        self._short: dict[tuple[int, torch.dtype], RowAttention | None] = {}
        self._bins: dict[torch.device, list[_SpanBin]] = {}
        self._rows: dict[torch.device, _PaddedRows] = {}
        self._ragged: dict[tuple[int | None, torch.dtype, torch.device], RaggedTree | RaggedWindow | None] = {}

    @classmethod
    def of(cls, batch: Microbatch) -> TreePlan:
        """The plan for the nodes of `batch`."""
        return cls(batch.node_length, batch.node_parent)

    def sequences(self) -> list[Int64Array]:
        """The packed indices of the tokens from a root to each leaf."""
        inner = {node.start for level in self.levels for _, node in level}
        return [np.concatenate([row.context, np.r_[row.own]]) for row in self.rows if row.start not in inner]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D] in the dtype of `query`. Differentiable in query, key,
        value and sinks."""
        terms = terms.simplified_for(self.longest)
        if self._pads(query, terms) and self._ragged_plan(query, terms) is None:
            self._check_count(query)
            return self.attend_masked(query, key, value, scaling)
        result: Tensor = TreeAttention.apply(query, key, value, terms.sinks, self, scaling, terms)
        return result

    def _pads(self, query: Tensor, terms: AttentionTerms) -> bool:
        """Whether, without a ragged kernel, `attend_masked` computes this layer."""
        return query.device.type != "cpu" and terms.empty and len(self.levels) < 2

    def _check_count(self, query: Tensor, ranks: int = 1) -> None:
        if query.shape[0] * ranks != self.tokens:
            shares = f"{self.tokens} tokens" + (f" of {ranks} ranks" if ranks > 1 else "")
            raise ValueError(f"the plan describes {shares}, but the model passed {query.shape[0]} queries")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> tuple[Tensor, Tensor]:
        """(output, saved): the output of `attend` without an autograd graph, and one tensor that `backward` needs. `saved` is
        the log-sum-exp, the attention weights of short rows, or an empty tensor if `backward` computes the forward again."""
        self._check_count(query)
        terms = terms.simplified_for(self.longest)
        ragged = self._ragged_plan(query, terms)
        if ragged is not None:
            return ragged.forward(query, key, value, scaling)
        if self._pads(query, terms):
            return self.attend_masked(query, key, value, scaling), query.new_empty(0)
        if not terms.empty or query.device.type != "cpu":
            general = self._general_plan(query, terms)
            return general.forward(query, key, value, scaling, terms.softcap, terms.sinks), query.new_empty(0)
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
        for below, node in itertools.chain(*self.levels):
            part, part_lse = _flash(
                _take(query, below), _take(key, node), _take(value, node), 0.0, False, scale=scaling
            )
            _merge(out[below], lse[below], part[0].transpose(0, 1), part_lse[0].t())
        return out.to(dtype), lse

    def backward(
        self,
        grad: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        scaling: float,
        gradients: tuple[Tensor, Tensor, Tensor],
        terms: AttentionTerms = NO_TERMS,
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
        if self._pads(query, terms):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
                recomputed = self.attend_masked(leaves[0], leaves[1], leaves[2], scaling)
            for target, part in zip(gradients, torch.autograd.grad(recomputed, leaves, grad), strict=True):
                target.copy_(part)
            return
        if not terms.empty or query.device.type != "cpu":
            general = self._general_plan(query, terms)
            inputs = query, key, value
            general.backward(grad, inputs, scaling, terms.softcap, terms.sinks, gradients, sinks_gradient)
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
        for below, node in itertools.chain(*self.levels):
            parts = _flash_backward(
                _take(grad, below), _take(query, below), _take(key, node), _take(value, node),
                _take(out, below), _take(lse, below).squeeze(-1).contiguous(), 0.0, False, scale=scaling,
            )  # fmt: skip
            for target, tokens, part in zip(sums, (below, node, node), parts, strict=True):
                target[tokens].add_(part[0].transpose(0, 1))
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
                self._ragged[case] = RaggedTree(kernel, self.rows, self.levels, query.device)
            else:
                self._ragged[case] = RaggedWindow(kernel, self.rows, terms.window, query.device)
        return self._ragged[case]

    def _short_row_plan(self, query: Tensor) -> RowAttention | None:
        """The cached row attention. None if the flash kernel is faster, such as for long rows."""
        if query.dtype not in _ROW_ATTENTION_DTYPES:
            return None
        case = heads, dtype = query.shape[1], query.dtype
        if case not in self._short:
            scores_dtype = torch.promote_types(dtype, torch.float32)
            short = fits(self.rows, heads, dtype.itemsize)
            self._short[case] = RowAttention(self.rows, heads, scores_dtype) if short else None
        return self._short[case]

    def _general_plan(self, query: Tensor, terms: AttentionTerms) -> GeneralAttention:
        geometry = terms.window, query.shape[1], query.device
        if geometry not in self._general:
            self._general[geometry] = GeneralAttention(self.rows, *geometry)
        return self._general[geometry]

    def self_blocks(self, query: Tensor) -> list[slice] | list[_SpanBin]:
        """The causal blocks: each node alone if nodes are large, else bins of padded nodes."""
        width = query.shape[1] * query.shape[2]
        flop = 4.0 * width * sum(row.length**2 for row in self.rows) / max(len(self.rows), 1)
        if flop > _SMALL_SPAN_FLOP or len(self.rows) < 4:
            return [row.own for row in self.rows]
        if query.device not in self._bins:
            self._bins[query.device] = _make_bins(self.rows, query.device)
        return self._bins[query.device]

    def attend_masked(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Equal to `attend`, by one masked `scaled_dot_product_attention`. A padded row holds a node and its context."""
        if query.device not in self._rows:
            self._rows[query.device] = self._make_rows(query.device)
        rows = self._rows[query.device]
        # Keys are repeated for each query head: torch's masked kernels for grouped heads write all scores to memory.
        group = query.shape[1] // key.shape[1]
        keys, values = (rows.keys_of(part).repeat_interleave(group, 1) for part in (key, value))
        out = F.scaled_dot_product_attention(rows.queries_of(query), keys, values, attn_mask=rows.mask, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows.query_target)

    def _make_rows(self, device: torch.device) -> _PaddedRows:
        rows = self.rows
        longest, context = max(row.length for row in rows), max(row.context.size for row in rows)
        mask = np.zeros((len(rows), longest, context + longest), np.bool_)
        causal = np.tril(np.ones((longest, longest), np.bool_))
        query_target = np.zeros(self.tokens, np.int64)
        source, target = [], []
        for number, row in enumerate(rows):
            query_target[row.own] = number * longest + np.arange(row.length)
            first = number * (context + longest)
            source += [row.context, np.r_[row.own]]
            target += [first + np.arange(row.context.size), first + context + np.arange(row.length)]
            mask[number, :, : row.context.size] = True
            # Padded queries see padded keys: a softmax over scores that are all -inf would give NaN.
            mask[number, :, context:] = causal
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


class TreeAttention(torch.autograd.Function):
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
        """`sinks` is `terms.sinks`: autograd tracks a tensor only if it is an argument itself."""
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


def _take(tensor: Tensor, block: slice | _SpanBin, zero_padding: bool = False) -> Tensor:
    """[T, X, Y] -> [rows, X, length, Y] of one block. The result is a view if the block is a slice."""
    if isinstance(block, slice):
        return tensor[block].transpose(0, 1).unsqueeze(0)
    rows = tensor.index_select(0, block.gather)
    if zero_padding and block.padding.numel():
        rows.index_fill_(0, block.padding, 0.0)
    return rows.view(block.count, block.length, *tensor.shape[1:]).transpose(1, 2)


def _put(tensor: Tensor, block: slice | _SpanBin, part: Tensor) -> None:
    """The inverse of `_take`: overwrites the block's tokens in `tensor`."""
    if isinstance(block, slice):
        tensor[block].copy_(part[0].transpose(0, 1))
        return
    rows = part.transpose(1, 2).reshape(block.count * block.length, *tensor.shape[1:])
    tensor.index_copy_(0, block.real_tokens, rows.index_select(0, block.real) if block.padding.numel() else rows)


def _make_bins(rows: list[NodeRow], device: torch.device) -> list[_SpanBin]:
    """Sorts nodes by length. A node starts a new bin if the old one would exceed `_MAX_PADDED_PER_REAL`."""
    bins: list[_SpanBin] = []
    members: list[NodeRow] = []
    real_tokens = 0
    for row in sorted(rows, key=lambda row: -row.length):
        if members and members[0].length * (len(members) + 1) > _MAX_PADDED_PER_REAL * (real_tokens + row.length):
            bins.append(_make_bin(members, device))
            members, real_tokens = [], 0
        members.append(row)
        real_tokens += row.length
    if members:
        bins.append(_make_bin(members, device))
    return bins


def _make_bin(members: list[NodeRow], device: torch.device) -> _SpanBin:
    length = max(row.length for row in members)
    offset = np.arange(length)[None]
    lengths = np.array([row.length for row in members])[:, None]
    gather = np.array([row.start for row in members])[:, None] + np.minimum(offset, lengths - 1)
    real = offset < lengths
    indices = (gather, np.flatnonzero(~real), np.flatnonzero(real), gather[real])
    return _SpanBin(len(members), length, *(index_tensor(index, device) for index in indices))


def _ints(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64).reshape(-1)
