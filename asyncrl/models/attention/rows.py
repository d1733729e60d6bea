"""Attention over packed trees by batched matrix products. A padded row holds the context of a node and the node's own tokens.

The scores of a short row (hundreds of tokens, as in most training) fit a CPU's cache. Then two products and one softmax are faster
than torch's flash kernel on a CPU, most of all in bfloat16. Rows of similar lengths share a bin if the bin's scores fit the cache.

Scores (q k') and softmax are computed in float32, or float64 for float64 inputs. The other products have the dtype of the inputs.

Shape legend: T packed tokens, H query heads, K key/value heads, G = H/K, D head size. A bin has R rows of L own tokens
after P context tokens, and C = P + L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.types import Int64Array

from ..native import library as native
from .bins import RowBin, index_tensor

# Limit of the float32 scores of a bin of several rows: about the size of the cores' caches.
_BIN_BYTES = 4 << 20
_MAX_PADDED_PER_REAL = 1.25  # scores of a bin with padding / scores without padding
# Limit of the mean number of keys per query, as a multiple of the length of the longest row that fits without a context. Only a
# tree of more than two levels can exceed the limit, with many short rows that have long contexts.
_MAX_MEAN_KEYS = 1.62


class NodeRow(NamedTuple):
    """The path from a root to one node of a packed tree: a context (the tokens of the ancestors) and the node's own tokens."""

    # Packed indices of the ancestors' tokens, in order; may be empty. Rows of siblings share one array.
    context: Int64Array
    start: int  # packed index of the first own token; the others follow
    length: int  # number of own tokens

    @property
    def own(self) -> slice:
        """The packed indices of the own tokens."""
        return slice(self.start, self.start + self.length)

    @property
    def total(self) -> int:
        """The number of context tokens and own tokens."""
        return self.context.size + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoreBin(RowBin):
    mask: Tensor  # [R, 1, L, 1, C]: 0, or -inf where a key is not seen
    contexts: Tensor  # [R] number of context tokens of each row
    lengths: Tensor  # [R] number of own tokens of each row


def row_bytes(itemsize: int) -> int:
    """Limit of the float32 scores of a row for `RowAttention`, in bytes. `itemsize`: bytes of an element of the queries.

    Longer rows are faster with torch's flash kernel, which stores no scores. For 16-bit types the backward of the flash kernel is
    slow, so the limit is higher."""
    return (32 if itemsize < 4 else 4) << 20


def fits(rows: list[NodeRow], heads: int, itemsize: int) -> bool:
    """Whether `RowAttention` can compute these rows. Each row must be short enough. Queries must see few keys on average, because
    all attention weights are kept for backward. `itemsize`: bytes of an element of the queries."""
    scores, limit = [row.length * row.total for row in rows], row_bytes(itemsize) / (4 * heads)
    return max(scores) <= limit and sum(scores) <= _MAX_MEAN_KEYS * limit**0.5 * sum(row.length for row in rows)


class RowAttention:
    """Attention for short rows. In `rows` each packed token must be an own token of exactly one row."""

    def __init__(self, rows: list[NodeRow], heads: int, dtype: torch.dtype) -> None:
        """`dtype`: of the scores."""
        # Rows with and without a context share no bin: a row without a context would be padded by the whole context.
        roots = [row for row in rows if not row.context.size]
        groups = group_into_bins(roots, heads) + group_into_bins([row for row in rows if row.context.size], heads)
        self._bins = [_make_bin(members, dtype) for members in groups]
        self._scores = sum(row_bin.scores for row_bin in self._bins)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D], and all attention weights, which backward needs."""
        out = torch.empty(query.shape, dtype=query.dtype)
        kv_heads = key.shape[1]
        kept = torch.empty(self._scores * query.shape[1], dtype=query.dtype)
        for row_bin, weights in zip(self._bins, self._weights_of(kept, kv_heads), strict=True):
            _weights(row_bin.queries_of(query, kv_heads), row_bin.keys_of(key), row_bin, scaling, weights)
            row_bin.put(out, torch.bmm(weights, row_bin.keys_of(value)), kv_heads)
        return out, kept

    def _weights_of(self, kept: Tensor, kv_heads: int) -> list[Tensor]:
        """The view [R K, L G, C] of each bin in `kept`, the weights of all bins."""
        heads = kept.numel() // self._scores
        parts = zip(self._bins, kept.split([row_bin.scores * heads for row_bin in self._bins]), strict=True)
        return [part.view(row_bin.rows * kv_heads, -1, row_bin.width) for row_bin, part in parts]

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Writes the gradients of query, key and value into `gradients`. `saved`: (query, key, value, output, weights)."""
        query, key, value, _, kept = saved
        kv_heads, dtype = key.shape[1], query.dtype
        query_gradient, key_gradient, value_gradient = gradients
        sums = [torch.zeros(key.shape, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
        for row_bin, kept_weights in zip(self._bins, self._weights_of(kept, kv_heads), strict=True):
            q, k, v = row_bin.queries_of(query, kv_heads), row_bin.keys_of(key), row_bin.keys_of(value)
            g = row_bin.queries_of(grad, kv_heads, zero_padding=True)
            scores_gradient = torch.bmm(g, v.transpose(1, 2))
            if native.takes(kept_weights, scores_gradient):
                native.row_softmax_backward_(kept_weights, scores_gradient, scaling)
            else:
                weights = kept_weights.to(row_bin.mask.dtype)
                wide = torch._softmax_backward_data(scores_gradient.to(weights.dtype), weights, -1, weights.dtype)
                scores_gradient = wide.mul_(scaling).to(dtype)
            row_bin.put(query_gradient, torch.bmm(scores_gradient, k), kv_heads)
            row_bin.add(sums[0], torch.bmm(scores_gradient.transpose(1, 2), q))
            row_bin.add(sums[1], torch.bmm(kept_weights.transpose(1, 2), g))
        key_gradient.copy_(sums[0])
        value_gradient.copy_(sums[1])


def _weights(q: Tensor, k: Tensor, row_bin: _ScoreBin, scaling: float, out: Tensor) -> None:
    """`out` = softmax(q k' scaling + mask): [R K, L G, D] and [R K, C, D] -> [R K, L G, C]. Computed in the mask's dtype."""
    rows, length, wide = row_bin.rows, row_bin.length, row_bin.mask.dtype
    scores = torch.bmm(q.to(wide).mul(scaling), k.to(wide).transpose(1, 2))
    if native.takes(scores) and native.takes(out):
        native.row_softmax(scores, out, row_bin.contexts, row_bin.lengths, scores.shape[0] // rows, length)
        return
    scores.view(rows, -1, length, scores.shape[1] // length, scores.shape[2]).add_(row_bin.mask)
    out.copy_(torch.softmax(scores, -1))


def group_into_bins(rows: list[NodeRow], heads: int) -> list[list[NodeRow]]:
    """Sorts rows by length. A row starts a new bin if the last bin would exceed `_MAX_PADDED_PER_REAL` or `_BIN_BYTES`."""
    bins: list[list[NodeRow]] = []
    bin_scores = context = 0
    for row in sorted(rows, key=lambda row: (-row.length, -row.context.size)):
        scores = row.length * row.total
        if bins:
            longest, new_context = bins[-1][0].length, max(context, row.context.size)
            padded = (len(bins[-1]) + 1) * longest * (new_context + longest)
            if padded <= _MAX_PADDED_PER_REAL * (bin_scores + scores) and padded * heads * 4 <= _BIN_BYTES:
                bins[-1].append(row)
                bin_scores, context = bin_scores + scores, new_context
                continue
        bins.append([row])
        bin_scores, context = scores, row.context.size
    return bins


def _make_bin(rows: list[NodeRow], dtype: torch.dtype) -> _ScoreBin:
    contexts, start, lengths = (np.array([(r.context.size, r.start, r.length) for r in rows]).T)[:, :, None]
    length, context = int(lengths.max()), int(contexts.max())
    offset, before = np.arange(length)[None], np.arange(context)[None]
    queries = start + np.minimum(offset, lengths - 1)  # [R, L]
    seen = np.zeros((len(rows), length, context + length), np.bool_)
    seen[:, :, :context] = (before < contexts)[:, None]
    seen[:, :, context:] = np.tril(np.ones((length, length), np.bool_)) & (offset < lengths)[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    real = (offset < lengths).reshape(-1)
    # [R, C]. Either all rows of a bin have a context, or P is 0.
    keys = np.concatenate([[row.context[np.minimum(before[0], row.context.size - 1)] for row in rows], queries], 1)
    return _ScoreBin(
        rows=len(rows), length=length, width=context + length, queries=index_tensor(queries),
        keys=index_tensor(keys), mask=mask[:, None, :, None], contexts=index_tensor(contexts),
        lengths=index_tensor(lengths), padding=index_tensor(np.flatnonzero(~real)), real=index_tensor(np.flatnonzero(real)),
        real_tokens=index_tensor(queries.reshape(-1)[real]),
    )  # fmt: skip
