"""Attention with terms: sliding windows, capped scores, sinks. Over packed prefix trees, and over any keys (`attend_seen`).

    s = scaling q k'          capped: s = cap tanh(s / cap)          w = softmax([s where seen; sink])          out = w v

A sink is one more column of scores without a value, so it takes its share of the softmax and its gradient is that column's.

Each row's own queries go block by block, and a block meets only the band of keys that its queries can see, through the
shared prefix where the window reaches into it: time is linear in the window. Nothing is kept for backward but the inputs;
a block's scores are computed again there. Products take the dtype of the inputs; scores and softmax are float32 (float64
for float64 inputs), as in transformers' eager attention. Runs on any device.

Shape legend: T packed tokens, H query heads, K key/value heads, G = H/K, D head size; a bin has R blocks of L queries and C
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
from .rows import Row

# Of one block at most: a block computes this many scores in vain for each query of a long row.
_QUERIES = 128
_FEW_QUERIES = 16  # a block is not cut below this, however many keys it sees
_BLOCK_BYTES = 16 << 20  # float32 scores of one block
# Of several blocks together: about what the cores' caches hold.
_BIN_BYTES = 4 << 20
_PADDING = 1.25  # most padded scores per real score in a bin


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries at positions [first, end) of a row, keys at [low, end)."""

    row: Row
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
class _Band:
    """A bin of blocks. What is as large as its keys or scores is made when it is needed: in sum it outgrows the inputs."""

    # [6, R, 1]: prefix start and length, own start, low, first, end.
    members: Tensor
    length: int  # L
    width: int  # C
    queries: Tensor  # as in `RowBin`
    padding: Tensor
    real: Tensor
    target: Tensor

    def open(self, window: int | None) -> tuple[RowBin, Tensor]:
        """With the index of the keys, and what is seen: bool [R, L, C]."""
        prefix_start, prefix_length, start, low, first, end = self.members
        device = self.members.device
        position = low + torch.arange(self.width, device=device)  # [R, C]
        inside = torch.minimum(position, end - 1)
        keys = torch.where(inside < prefix_length, prefix_start + inside, start + inside - prefix_length)
        query = torch.minimum(first + torch.arange(self.length, device=device), end - 1)  # [R, L]
        seen = visible(query, position, window)  # padded keys lie behind every query
        gathered = RowBin(
            rows=len(keys), length=self.length, width=self.width, queries=self.queries, keys=keys.reshape(-1),
            padding=self.padding, real=self.real, target=self.target,
        )  # fmt: skip
        return gathered, seen


class GeneralAttention:
    """`rows` cover every packed token as an own token exactly once."""

    def __init__(self, rows: list[Row], window: int | None, heads: int, device: torch.device) -> None:
        self.window = window
        blocks = [block for row in rows for block in cut(row, window, heads)]
        self._bands = [_make_band(members, device) for members in _share_out(blocks, heads)]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D], `sinks` [H] -> [T, H, D]."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        kv_heads = key.shape[1]
        for band in self._bands:
            own, seen = band.open(self.window)
            q, k, v = own.queries_of(query, kv_heads), own.keys_of(key), own.keys_of(value)
            own.put(out, attend_seen(q, k, v, seen, scaling, softcap, sinks), kv_heads)
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
        """`gradients` become those of `inputs` (query, key, value); that of the sinks is added to `sinks_gradient` [H]."""
        query, key, value = inputs
        kv_heads = key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = [torch.zeros(key.shape, dtype=wide, device=key.device) for _ in range(2)]
        for band in self._bands:
            own, seen = band.open(self.window)
            q, k, v = own.queries_of(query, kv_heads), own.keys_of(key), own.keys_of(value)
            g = own.queries_of(grad, kv_heads, zero_padding=True)
            weights, slope = _weights(q, k, seen, scaling, softcap, sinks)
            of_weights = torch.bmm(g, v.transpose(1, 2)).to(wide)
            if sinks is not None:
                of_weights = F.pad(of_weights, (0, 1))
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, wide)
            if sinks is not None:
                if sinks_gradient is not None:
                    column = of_scores[..., -1].view(own.rows, kv_heads, own.length, -1).sum((0, 2))
                    sinks_gradient.add_(column.reshape(-1))
                of_scores, weights = of_scores[..., :-1], weights[..., :-1]
            if slope is not None:
                of_scores = of_scores * slope
            narrow = of_scores.mul(scaling).to(query.dtype)
            own.put(gradients[0], torch.bmm(narrow, k), kv_heads)
            own.add(sums[0], torch.bmm(narrow.transpose(1, 2), q))
            own.add(sums[1], torch.bmm(weights.to(query.dtype).transpose(1, 2), g))
        gradients[1].copy_(sums[0])
        gradients[2].copy_(sums[1])


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Positions [..., L] and [..., C] -> bool [..., L, C]: a key that is not ahead of the query, and within its window."""
    distance = query.unsqueeze(-1) - key.unsqueeze(-2)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attend_seen(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`q` [R K, L G, D], `k` and `v` [R K, C, D], `seen` bool [R, L, C], where each query sees a key, `sinks` [H] ->
    [R K, L G, D]. Without a graph."""
    weights, _ = _weights(q, k, seen, scaling, softcap, sinks)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.bmm(weights.to(v.dtype), v)


def _weights(
    q: Tensor, k: Tensor, seen: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The softmax, [R K, L G, C] or with a column more for the sink, and the derivative of the capping [R K, L G, C]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q.to(wide).mul(scaling), k.to(wide).transpose(1, 2))
    slope = None
    if softcap is not None:
        bent = scores.div_(softcap).tanh_()
        slope = 1 - bent.square()
        scores = bent.mul_(softcap)
    rows, length, width = seen.shape
    split = scores.view(rows, -1, length, scores.shape[1] // length, width)  # [R, K, L, G, C]
    split.masked_fill_(~seen[:, None, :, None], float("-inf"))
    if sinks is not None:
        column = sinks.detach().to(wide).view(1, split.shape[1], 1, -1, 1).expand(*split.shape[:-1], 1)
        scores = torch.cat([split, column], -1).view(*scores.shape[:2], width + 1)
    return torch.softmax(scores, -1), slope


def cut(row: Row, window: int | None, heads: int) -> list[QueryBlock]:
    """The own tokens of a row, in order."""
    _, prefix, _, own = row
    first, total = prefix, prefix + own
    blocks = []
    # what is computed in vain is as much as a block's queries: no more of them than the window has keys
    most = _QUERIES if window is None else max(_FEW_QUERIES, min(_QUERIES, window))
    while first < total:
        low = 0 if window is None else max(0, first - window + 1)
        fit = _BLOCK_BYTES // (4 * heads * (first - low + most))
        end = min(total, first + max(min(most, fit), _FEW_QUERIES))
        blocks.append(QueryBlock(row, low, first, end))
        first = end
    return blocks


def _share_out(blocks: list[QueryBlock], heads: int) -> list[list[QueryBlock]]:
    """Sort by size, then cut where padding would pass `_PADDING` or the scores `_BIN_BYTES`."""
    bins: list[list[QueryBlock]] = []
    real = length = 0
    for block in sorted(blocks, key=lambda block: (-block.width, -block.length)):
        own = block.width * block.length
        if bins:
            longest = max(length, block.length)
            padded = (len(bins[-1]) + 1) * bins[-1][0].width * longest
            if padded <= _PADDING * (real + own) and padded * heads * 4 <= _BIN_BYTES:
                bins[-1].append(block)
                real, length = real + own, longest
                continue
        bins.append([block])
        real, length = own, block.length
    return bins


def _make_band(blocks: list[QueryBlock], device: torch.device) -> _Band:
    members = np.array([(*block.row[:3], block.low, block.first, block.end) for block in blocks], np.int64)
    _, prefix, start, _, first, end = (column[:, None] for column in members.T)
    length = max(block.length for block in blocks)
    offset = first + np.arange(length)  # row positions, [R, L]
    queries = start - prefix + np.minimum(offset, end - 1)
    real = (offset < end).reshape(-1)
    return _Band(
        members=to_device(np.ascontiguousarray(members.T), device).unsqueeze(-1),
        length=length,
        width=max(block.width for block in blocks),
        queries=index_tensor(queries, device),
        padding=index_tensor(np.flatnonzero(~real), device),
        real=index_tensor(np.flatnonzero(real), device),
        target=index_tensor(queries.reshape(-1)[real], device),
    )
