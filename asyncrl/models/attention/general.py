"""Attention with sliding windows, capped scores and sinks, over packed trees.

    s = scaling q k'      with a cap: s = cap tanh(s / cap)      w = softmax([s of visible keys; sink])      out = w v

A sink is a further column of scores. No row of v belongs to the column. The gradient of the sink is the gradient of the column.

A row consists of a context, which several rows may share, and of the row's own tokens. The queries of the own tokens are cut into
blocks. A block reads only the keys that its queries can see, so the time is linear in the window. Backward computes the scores
again. Scores and their softmax are computed in float32, or in float64 for float64 inputs. All other matrix products have the
dtype of the inputs.

Shape legend: T packed tokens, H query heads, K key/value heads, G = H/K, D head size. A bin has R blocks of L queries and C
keys each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..copying import to_device
from .bins import RowBin, index_tensor
from .rows import NodeRow

# Bounds for the number of queries in a block. The last block of a row may have fewer queries. The larger the block, the more scores
# are of keys that the query cannot see.
_MAX_QUERIES = 128
_MIN_QUERIES = 16
# Byte limits (CPU cache sizes) of float32 scores: in a block of more than `_MIN_QUERIES` queries, and in a bin of several blocks.
_BLOCK_BYTES = 16 << 20
_BIN_BYTES = 4 << 20
_MAX_PADDED_PER_REAL = 1.25  # scores of a bin with padding / scores without padding
# `_BIN_BYTES` and `_MAX_PADDED_PER_REAL` on a GPU, where the fifty launches of a bin cost more than its padding.
_GPU_BIN_LIMITS = 128 << 20, 2.0


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries at positions [first, end) of a row, and keys at positions [low, end) of the same row."""

    row: int  # index of the row
    low: int
    first: int
    end: int

    @property
    def length(self) -> int:
        """The number of queries."""
        return self.end - self.first

    @property
    def width(self) -> int:
        """The number of keys."""
        return self.end - self.low


@dataclass(frozen=True, slots=True)
class _LazyBin:
    """A bin of blocks. `build` computes the key indices at each use: stored for all bins, they would be larger than the inputs."""

    # [6, R, 1] int64. Of each block: place and length of the row's context in `contexts`, start of the own tokens, low, first, end.
    members: Tensor
    # Packed indices of all contexts. Then one 0, because `build` also reads the entry after a context, and ignores its value.
    contexts: Tensor
    length: int  # L
    width: int  # C
    queries: Tensor  # this field and the next three: as in `RowBin`
    padding: Tensor
    real: Tensor
    real_tokens: Tensor

    def build(self, window: int | None) -> tuple[RowBin, Tensor]:
        """The bin with the packed index of each key, and a mask: bool [R, L, C], true where a query sees a key."""
        place, context, start, low, first, end = self.members
        device = self.members.device
        position = low + torch.arange(self.width, device=device)  # [R, C]
        in_row = torch.minimum(position, end - 1)
        before = self.contexts[place + torch.minimum(in_row, context)]
        keys = torch.where(in_row < context, before, start + in_row - context)
        query = torch.minimum(first + torch.arange(self.length, device=device), end - 1)  # [R, L]
        # Padded keys have positions after all queries, so causality hides padded keys, too.
        seen = visible(query, position, window)
        row_bin = RowBin(
            rows=len(keys), length=self.length, width=self.width, queries=self.queries, keys=keys.reshape(-1),
            padding=self.padding, real=self.real, real_tokens=self.real_tokens,
        )  # fmt: skip
        return row_bin, seen


class GeneralAttention:
    """Attention over packed trees. In `rows` each packed token must be an own token of exactly one row."""

    def __init__(self, rows: list[NodeRow], window: int | None, heads: int, device: torch.device) -> None:
        self.window = window
        shared = {id(row.context): row.context for row in rows}
        contexts = index_tensor(np.concatenate([*shared.values(), [0]]), device)
        places = dict(zip(shared, np.cumsum([0, *(context.size for context in shared.values())]), strict=False))
        table = np.array([(places[id(row.context)], row.context.size, row.start) for row in rows])
        sizes = [(row.context.size, row.length) for row in rows]
        blocks = [block for row, size in enumerate(sizes) for block in cut_into_blocks(*size, window, heads, row)]
        bins = _group_into_bins(blocks, heads, device)
        self._lazy_bins = [_make_lazy_bin(members, table, contexts, device) for members in bins]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D], `sinks` [H] -> [T, H, D]."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        kv_heads = key.shape[1]
        for lazy_bin in self._lazy_bins:
            row_bin, seen = lazy_bin.build(self.window)
            q, k, v = row_bin.queries_of(query, kv_heads), row_bin.keys_of(key), row_bin.keys_of(value)
            row_bin.put(out, attend_seen(q, k, v, seen, scaling, softcap, sinks), kv_heads)
        return out

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        gradients: tuple[Tensor, Tensor, Tensor],
        sinks_gradient: Tensor | None,
    ) -> None:
        """Writes the gradients of `inputs` (query, key, value) into `gradients`. Adds to `sinks_gradient` [H]."""
        query, key, value = inputs
        kv_heads = key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        key_value_sums = [torch.zeros(key.shape, dtype=wide, device=key.device) for _ in range(2)]
        for lazy_bin in self._lazy_bins:
            row_bin, seen = lazy_bin.build(self.window)
            q, k, v = row_bin.queries_of(query, kv_heads), row_bin.keys_of(key), row_bin.keys_of(value)
            g = row_bin.queries_of(grad, kv_heads, zero_padding=True)
            weights, slope = _weights(q, k, seen, scaling, softcap, sinks)
            weights_gradient = torch.bmm(g, v.transpose(1, 2)).to(wide)
            if sinks is not None:
                weights_gradient = F.pad(weights_gradient, (0, 1))
            scores_gradient = torch._softmax_backward_data(weights_gradient, weights, -1, wide)
            if sinks is not None:
                if sinks_gradient is not None:
                    column = scores_gradient[..., -1].view(row_bin.rows, kv_heads, row_bin.length, -1).sum((0, 2))
                    sinks_gradient.add_(column.reshape(-1))
                scores_gradient, weights = scores_gradient[..., :-1], weights[..., :-1]
            if slope is not None:
                scores_gradient = scores_gradient * slope
            product_gradient = scores_gradient.mul(scaling).to(query.dtype)
            row_bin.put(gradients[0], torch.bmm(product_gradient, k), kv_heads)
            row_bin.add(key_value_sums[0], torch.bmm(product_gradient.transpose(1, 2), q))
            row_bin.add(key_value_sums[1], torch.bmm(weights.to(query.dtype).transpose(1, 2), g))
        gradients[1].copy_(key_value_sums[0])
        gradients[2].copy_(key_value_sums[1])


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Positions of queries [..., L] and keys [..., C] -> bool [..., L, C]: 0 <= query - key < window."""
    distance = query.unsqueeze(-1) - key.unsqueeze(-2)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attend_seen(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`q` [R K, L G, D], `k` and `v` [R K, C, D], `seen` bool [R, L, C], `sinks` [H] -> [R K, L G, D]. Each query must see at
    least one key. Autograd cannot differentiate this function."""
    weights, _ = _weights(q, k, seen, scaling, softcap, sinks)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.bmm(weights.to(v.dtype), v)


def _weights(
    q: Tensor, k: Tensor, seen: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(softmax [R K, L G, C], or [R K, L G, C + 1] with a sink; derivative of the cap [R K, L G, C], or None without a cap)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q.to(wide).mul(scaling), k.to(wide).transpose(1, 2))
    slope = None
    if softcap is not None:
        tanh = scores.div_(softcap).tanh_()
        slope = 1 - tanh.square()
        scores = tanh.mul_(softcap)
    rows, length, width = seen.shape
    split = scores.view(rows, -1, length, scores.shape[1] // length, width)  # [R, K, L, G, C]
    split.masked_fill_(~seen[:, None, :, None], float("-inf"))
    if sinks is not None:
        column = sinks.detach().to(wide).view(1, split.shape[1], 1, -1, 1).expand(*split.shape[:-1], 1)
        scores = torch.cat([split, column], -1).view(*scores.shape[:2], width + 1)
    return torch.softmax(scores, -1), slope


def cut_into_blocks(context: int, length: int, window: int | None, heads: int, row: int = 0) -> list[QueryBlock]:
    """Cuts the own tokens of a row (`length` tokens after a context of `context` tokens) into blocks, in order. `heads`: H."""
    first, total = context, context + length
    blocks = []
    # In a block of more queries than the window, most scores would be of keys that the query cannot see.
    limit = _MAX_QUERIES if window is None else max(_MIN_QUERIES, min(_MAX_QUERIES, window))
    while first < total:
        low = 0 if window is None else max(0, first - window + 1)
        fitting = _BLOCK_BYTES // (4 * heads * (first - low + limit))
        end = min(total, first + max(min(limit, fitting), _MIN_QUERIES))
        blocks.append(QueryBlock(row, low, first, end))
        first = end
    return blocks


def _group_into_bins(blocks: list[QueryBlock], heads: int, device: torch.device) -> list[list[QueryBlock]]:
    """Sorts blocks by size. A block starts a new bin if the last bin with this block would exceed a limit of the device."""
    max_bytes, max_padded = (_BIN_BYTES, _MAX_PADDED_PER_REAL) if device.type == "cpu" else _GPU_BIN_LIMITS
    bins: list[list[QueryBlock]] = []
    bin_scores = bin_length = 0
    for block in sorted(blocks, key=lambda block: (-block.width, -block.length)):
        scores = block.width * block.length
        if bins:
            longest = max(bin_length, block.length)
            padded = (len(bins[-1]) + 1) * bins[-1][0].width * longest
            if padded <= max_padded * (bin_scores + scores) and padded * heads * 4 <= max_bytes:
                bins[-1].append(block)
                bin_scores, bin_length = bin_scores + scores, longest
                continue
        bins.append([block])
        bin_scores, bin_length = scores, block.length
    return bins


def _make_lazy_bin(blocks: list[QueryBlock], table: np.ndarray, contexts: Tensor, device: torch.device) -> _LazyBin:
    members = np.array([(*table[block.row], block.low, block.first, block.end) for block in blocks], np.int64)
    _, context, start, _, first, end = (column[:, None] for column in members.T)
    length = max(block.length for block in blocks)
    offset = first + np.arange(length)  # row positions, [R, L]
    queries = start - context + np.minimum(offset, end - 1)
    real = (offset < end).reshape(-1)
    return _LazyBin(
        members=to_device(np.ascontiguousarray(members.T), device).unsqueeze(-1), contexts=contexts, length=length,
        width=max(block.width for block in blocks), queries=index_tensor(queries, device),
        padding=index_tensor(np.flatnonzero(~real), device), real=index_tensor(np.flatnonzero(real), device),
        real_tokens=index_tensor(queries.reshape(-1)[real], device),
    )  # fmt: skip
