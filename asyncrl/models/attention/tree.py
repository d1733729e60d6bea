"""Attention over packed trees of any depth. Tokens that several sequences share are stored once, in an inner node.

A token attends to the tokens of its node up to itself, and to all tokens of the node's ancestors. A layer without terms (below):
* CPU, short rows: `RowAttention` (rows.py).
* CPU, longer rows: `RaggedTree` (ragged.py), with one call of torch's flash kernel per node, and a second call per inner node.
* GPU with a flash kernel: `RaggedTree`, with one call for all nodes and one call for each level of inner nodes.
* GPU without a flash kernel (float32, for example): `PaddedRows`, one masked `scaled_dot_product_attention`. For trees of more than
  two levels: `GeneralAttention` (general.py), because padded rows could need too much memory.

A layer with terms (a window shorter than some row, capped scores, sinks) uses `GeneralAttention`. On a GPU with a flash kernel, a
layer with a window as its only term uses `RaggedWindow`. Indices are computed once per microbatch.

Shape legend: T packed tokens, H query heads, K key/value heads (H a multiple of K), D head size, R rows, Q and C padded
query and key lengths.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.types import Int64Array, Microbatch

from ..copying import to_device
from .general import GeneralAttention
from .interface import NO_TERMS, AttentionPlan, AttentionTerms
from .ragged import CpuKernel, RaggedTree, RaggedWindow, kernel_for
from .rows import NodeRow, RowAttention, fits


class PaddedRows:
    """One masked `scaled_dot_product_attention`, for a layer without terms. A padded row holds a node and its context."""

    def __init__(self, rows: list[NodeRow], device: torch.device) -> None:
        longest, context = max(row.length for row in rows), max(row.context.size for row in rows)
        mask = np.zeros((len(rows), longest, context + longest), np.bool_)
        causal = np.tril(np.ones((longest, longest), np.bool_))
        query_target = np.zeros(sum(row.length for row in rows), np.int64)
        source, target = [], []
        for number, row in enumerate(rows):
            query_target[row.own] = number * longest + np.arange(row.length)
            first = number * (context + longest)
            source += [row.context, np.r_[row.own]]
            target += [first + np.arange(row.context.size), first + context + np.arange(row.length)]
            mask[number, :, : row.context.size] = True
            # Padded queries see padded keys: a softmax over scores that are all -inf would give NaN.
            mask[number, :, context:] = causal
        self._query_target = to_device(query_target, device)  # [T] index of each token in [R * Q]
        self._key_source = to_device(np.concatenate(source), device)  # packed index of each key of each row
        self._key_target = to_device(np.concatenate(target), device)  # index of the same keys in [R * C]
        self._mask = to_device(mask[:, None], device)  # [R, 1, Q, C], true: attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D]. Differentiable."""
        rows, _, longest, _ = self._mask.shape
        # Queries are copied into zeros. Padding gathered from real tokens would add its gradients to those of the real tokens.
        zeros = query.new_zeros(rows * longest, *query.shape[1:])
        queries = zeros.index_copy(0, self._query_target, query).view(rows, longest, *query.shape[1:]).transpose(1, 2)
        # Keys are repeated for each query head: torch's masked kernels for grouped heads write all scores to memory.
        group = query.shape[1] // key.shape[1]
        keys, values = (self._keys_of(part).repeat_interleave(group, 1) for part in (key, value))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self._query_target)

    def _keys_of(self, key: Tensor) -> Tensor:
        """[T, K, D] -> [R, K, C, D]."""
        rows, _, _, width = self._mask.shape
        # Rows share keys. The cast makes backward sum the gradients of a shared key in float32 or wider.
        wide = key.to(torch.promote_types(key.dtype, torch.float32))
        selected = wide.index_select(0, self._key_source).to(key.dtype)
        padded = key.new_zeros(rows * width, *key.shape[1:]).index_copy(0, self._key_target, selected)
        return padded.view(rows, width, *key.shape[1:]).transpose(1, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """The result of `attend`, and an empty tensor, because backward computes the forward again."""
        return self.attend(query, key, value, scaling), query.new_empty(0)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Writes the gradients of query, key and value, the first three of `saved`, into `gradients`."""
        with torch.enable_grad():
            query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in saved[:3]]
            out = self.attend(query, key, value, scaling)
        for target, part in zip(gradients, torch.autograd.grad(out, leaves, grad), strict=True):
            target.copy_(part)


_Implementation: TypeAlias = RowAttention | RaggedTree | RaggedWindow | PaddedRows | GeneralAttention


class TreePlan(AttentionPlan):
    """The nodes of one packed microbatch, in depth-first preorder. The tokens of a node directly follow those of the previous node,
    so a node and its descendants are one slice. `node_parent`: index of the parent, -1 for a root; None: all nodes are roots.

    Errors: ValueError if a parent is neither -1, nor the previous node, nor an ancestor of the previous node.
    """

    def __init__(self, node_length: npt.ArrayLike, node_parent: npt.ArrayLike | None = None) -> None:
        lengths = np.ravel(node_length).tolist()
        parents = [-1] * len(lengths) if node_parent is None else np.ravel(node_parent).tolist()
        starts = [0, *itertools.accumulate(lengths)]
        self.tokens: int = starts[-1]
        self.rows: list[NodeRow] = []  # of each node with tokens
        contexts = {-1: np.zeros(0, np.int64)}  # node -> the context of its children
        depths: list[int] = []  # for each node: how many of its ancestors have tokens
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
        # For each level, roots first: (packed indices of the descendants, packed indices of the node's tokens) of each inner node.
        self.levels = [levels[depth] for depth in sorted(levels)]
        self.longest = max((row.total for row in self.rows), default=0)
        # Key: window, whether there are other terms, (heads, head size), dtype, device.
        self._implementations: dict[tuple[Any, ...], _Implementation] = {}

    @classmethod
    def of(cls, batch: Microbatch) -> TreePlan:
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
        result: Tensor = TreeAttention.apply(query, key, value, terms.sinks, self, scaling, terms)
        return result

    def _check_count(self, query: Tensor, ranks: int = 1) -> None:
        if query.shape[0] * ranks != self.tokens:
            shares = f"{self.tokens} tokens" + (f" of {ranks} ranks" if ranks > 1 else "")
            raise ValueError(f"the plan describes {shares}, but the model passed {query.shape[0]} queries")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> tuple[Tensor, Tensor]:
        """(output, kept): the output of `attend` without an autograd graph, and one tensor that `backward` needs. `kept` is
        the log-sum-exp, the attention weights of short rows, or an empty tensor if `backward` computes the forward again."""
        self._check_count(query)
        terms = terms.simplified_for(self.longest)
        attention = self._implementation(query, terms)
        if isinstance(attention, GeneralAttention):
            return attention.forward(query, key, value, scaling, terms.softcap, terms.sinks), query.new_empty(0)
        return attention.forward(query, key, value, scaling)

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
        query, key, value, *_ = saved
        terms = terms.simplified_for(self.longest)
        attention = self._implementation(query, terms)
        if isinstance(attention, GeneralAttention):
            inputs = query, key, value
            attention.backward(grad, inputs, scaling, terms.softcap, terms.sinks, gradients, sinks_gradient)
        else:
            attention.backward(grad, saved, scaling, gradients)

    def _implementation(self, query: Tensor, terms: AttentionTerms) -> _Implementation:
        has_other_terms = terms.softcap is not None or terms.sinks is not None
        case = terms.window, has_other_terms, query.shape[1:], query.dtype, query.device
        if case not in self._implementations:
            self._implementations[case] = self._choose(query, terms, has_other_terms)
        return self._implementations[case]

    def _choose(self, query: Tensor, terms: AttentionTerms, has_other_terms: bool) -> _Implementation:
        (heads, size), dtype, device = query.shape[1:], query.dtype, query.device
        kernel = None if has_other_terms else kernel_for(device, dtype, size)
        if kernel is not None and terms.window is None:
            return RaggedTree(kernel, self.rows, self.levels, device)
        if kernel is not None and terms.window is not None:
            return RaggedWindow(kernel, self.rows, terms.window, device)
        if terms.empty and device.type == "cpu":
            if fits(self.rows, heads, dtype.itemsize):
                return RowAttention(self.rows, heads, torch.promote_types(dtype, torch.float32))
            # One kernel call for each inner node. The descendants of one node are one slice, so nothing is gathered.
            return RaggedTree(CpuKernel(), self.rows, [[pair] for level in self.levels for pair in level], device)
        if terms.empty and len(self.levels) < 2:
            return PaddedRows(self.rows, device)
        return GeneralAttention(self.rows, terms.window, heads, device)


class TreeAttention(torch.autograd.Function):
    """`TreePlan.forward` and `TreePlan.backward` as one node of the autograd graph."""

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
        out, kept = plan.forward(query, key, value, scaling, terms)
        ctx.save_for_backward(query, key, value, out, kept, sinks)
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
