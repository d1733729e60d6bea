"""Attention over packed prefix trees by batched matrix products: one padded row per span, its prefix in front.

The scores of a short row (hundreds of tokens, as in most training) fit the cache. Then plain products, one softmax and its
backward beat torch's flash kernel on a CPU, above all in bfloat16, whose flash backward runs at a fifth of the float32 rate.
Rows of similar lengths share a bin; a bin is cut so that its scores stay in the cache.

Products take the dtype of the inputs; scores and softmax are float32 (float64 for float64 inputs). The query heads of one
key/value head are stacked as rows of one product, so keys and values are never expanded.

Shape legend: T packed tokens, H query heads, K key/value heads, G = H/K, D head size; a bin has R rows of L own tokens
behind P prefix tokens, C = P + L.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..native import library as native
from .bins import RowBin, index_tensor

# Most float32 scores of one bin: about the size of the cores' caches.
_BIN_BYTES = 4 << 20
# A row with more scores is faster with a kernel that never stores them.
ROW_BYTES = 32 << 20
_PADDING = 1.25  # most padded scores per real score in a bin

# Start and length of the prefix, start and length of the own tokens (at least one).
Row = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoreBin(RowBin):
    context: int  # P
    mask: Tensor  # [R, 1, L, 1, C] 0 or -inf
    prefixes: Tensor  # [R] length of each row's prefix
    lengths: Tensor  # [R] own tokens of each row


def fits(rows: list[Row], heads: int) -> bool:
    """Whether all rows are short enough for plain products."""
    return max(length * (prefix + length) for _, prefix, _, length in rows) * heads * 4 <= ROW_BYTES


class RowAttention:
    """`rows` cover every packed token as an own token exactly once."""

    def __init__(self, rows: list[Row], heads: int, dtype: torch.dtype) -> None:
        """`dtype`: of the scores."""
        bare, prefixed = ([row for row in rows if bool(row[1]) is has] for has in (False, True))
        self._bins = [_make_bin(members, dtype) for part in (bare, prefixed) for members in share_out(part, heads)]
        self._scores = sum(own.scores for own in self._bins)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D], and the weights of all rows, which backward needs."""
        out = torch.empty(query.shape, dtype=query.dtype)
        kv_heads = key.shape[1]
        kept = torch.empty(self._scores * query.shape[1], dtype=query.dtype)
        for own, weights in zip(self._bins, self._weights_of(kept, kv_heads), strict=True):
            _weights(own.queries_of(query, kv_heads), own.keys_of(key), own, scaling, weights)
            own.put(out, torch.bmm(weights, own.keys_of(value)), kv_heads)
        return out, kept

    def _weights_of(self, kept: Tensor, kv_heads: int) -> list[Tensor]:
        """Views [R K, L G, C] of each bin."""
        heads = kept.numel() // self._scores
        sizes = [own.scores * heads for own in self._bins]
        parts = kept.split(sizes)
        return [part.view(own.rows * kv_heads, -1, own.width) for part, own in zip(parts, self._bins, strict=True)]

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: Tensor,
        scaling: float,
        gradients: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Writes the gradients of query, key and value into `gradients`. `kept`: the weights that forward returned."""
        kv_heads, dtype = key.shape[1], query.dtype
        for_query, for_key, for_value = gradients
        sums = [torch.zeros(key.shape, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
        for own, narrow in zip(self._bins, self._weights_of(kept, kv_heads), strict=True):
            q, k, v = own.queries_of(query, kv_heads), own.keys_of(key), own.keys_of(value)
            g = own.queries_of(grad, kv_heads, zero_padding=True)
            of_scores = torch.bmm(g, v.transpose(1, 2))
            if native.takes(narrow, of_scores):
                native.row_softmax_backward_(narrow, of_scores, scaling)
            else:
                weights = narrow.to(own.mask.dtype)
                wide = torch._softmax_backward_data(of_scores.to(weights.dtype), weights, -1, weights.dtype)
                of_scores = wide.mul_(scaling).to(dtype)
            own.put(for_query, torch.bmm(of_scores, k), kv_heads)
            own.add(sums[0], torch.bmm(of_scores.transpose(1, 2), q))
            own.add(sums[1], torch.bmm(narrow.transpose(1, 2), g))
        for_key.copy_(sums[0])
        for_value.copy_(sums[1])


def _weights(q: Tensor, k: Tensor, own: _ScoreBin, scaling: float, out: Tensor) -> None:
    """`out` = softmax(q k' scaling + mask): [R K, L G, D] and [R K, C, D] -> [R K, L G, C]; computed in the mask's dtype."""
    wide = own.mask.dtype
    scores = torch.bmm(q.to(wide).mul(scaling), k.to(wide).transpose(1, 2))
    if native.takes(scores) and native.takes(out):
        native.row_softmax(scores, out, own.prefixes, own.lengths, scores.shape[0] // own.rows, own.length)
        return
    scores.view(own.rows, -1, own.length, scores.shape[1] // own.length, scores.shape[2]).add_(own.mask)
    out.copy_(torch.softmax(scores, -1))


def share_out(rows: list[Row], heads: int) -> list[list[Row]]:
    """Sort rows by length, then start a new bin where padding would exceed `_PADDING` or scores `_BIN_BYTES`."""
    bins: list[list[Row]] = []
    real = context = 0
    for row in sorted(rows, key=lambda row: (-row[3], -row[1])):
        _, prefix, _, length = row
        if bins:
            widest = max(context, prefix)
            padded = (len(bins[-1]) + 1) * bins[-1][0][3] * (widest + bins[-1][0][3])
            if padded <= _PADDING * (real + length * (prefix + length)) and padded * heads * 4 <= _BIN_BYTES:
                bins[-1].append(row)
                real, context = real + length * (prefix + length), widest
                continue
        bins.append([row])
        real, context = length * (prefix + length), prefix
    return bins


def _make_bin(rows: list[Row], dtype: torch.dtype) -> _ScoreBin:
    prefix_start, prefix_length, start, lengths = (np.array(column)[:, None] for column in zip(*rows, strict=True))
    length, context = int(lengths.max()), int(prefix_length.max())
    offset, before = np.arange(length)[None], np.arange(context)[None]
    queries = start + np.minimum(offset, lengths - 1)  # [R, L]
    prefix = prefix_start + np.minimum(before, np.maximum(prefix_length - 1, 0))  # [R, P]
    seen = np.zeros((len(rows), length, context + length), np.bool_)
    seen[:, :, :context] = (before < prefix_length)[:, None]
    seen[:, :, context:] = np.tril(np.ones((length, length), np.bool_)) & (offset < lengths)[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    real = (offset < lengths).reshape(-1)
    keys = np.concatenate([prefix, queries], 1)
    return _ScoreBin(
        rows=len(rows), length=length, width=context + length, context=context, queries=index_tensor(queries),
        keys=index_tensor(keys), mask=mask[:, None, :, None], prefixes=index_tensor(prefix_length),
        lengths=index_tensor(lengths), padding=index_tensor(np.flatnonzero(~real)), real=index_tensor(np.flatnonzero(real)),
        target=index_tensor(queries.reshape(-1)[real]),
    )  # fmt: skip
