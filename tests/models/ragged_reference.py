"""A kernel for ragged rows by the definition, in any dtype: what the plans around the real one are tested with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from asyncrl.models.attention.ragged import RaggedRows


class ReferenceKernel:
    """Counts its calls. Refuses queries, keys or ends that FlashAttention would refuse."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, qkv: Sequence[Tensor], rows: RaggedRows, scaling: float) -> tuple[Tensor, Tensor]:
        self.calls += 1
        query, key, value = qkv
        out = torch.full(query.shape, torch.nan, dtype=query.dtype)
        lse = torch.full(
            (query.shape[1], query.shape[0]), torch.nan, dtype=torch.promote_types(query.dtype, torch.float32)
        )
        for own, seen in self._rows(qkv, rows):
            scores = _scores(query[own], key[seen], rows, scaling)
            lse[:, own] = scores.logsumexp(-1)
            weights = (scores - lse[:, own].unsqueeze(-1)).exp().to(value.dtype)
            out[own] = torch.einsum("hqk,khd->qhd", weights, _expanded(value[seen], query))
        return out, lse

    def cached(self, qkv: Sequence[Tensor], rows: RaggedRows, used_N: Tensor, scaling: float) -> Tensor:
        self.calls += 1
        query, key, value = qkv
        assert used_N.dtype == torch.int32 and int(used_N.max()) <= rows.keys.longest and rows.causal
        out = torch.full(query.shape, torch.nan, dtype=query.dtype)
        for number, (first, end) in enumerate(pairwise(rows.queries.ends.tolist())):
            start = int(rows.keys.ends[number])
            seen = slice(start, start + int(used_N[number]))
            scores = _scores(query[first:end], key[seen], rows, scaling)
            weights = scores.softmax(-1).to(value.dtype)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, _expanded(value[seen], query))
        return out

    def backward(
        self, grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, rows: RaggedRows, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Dao et al., arXiv:2205.14135, algorithm 4, of whole rows."""
        self.calls += 1
        found = tuple(torch.full(part.shape, torch.nan, dtype=part.dtype) for part in qkv)
        query, key, value, grad, out = (part.to(lse.dtype) for part in (*qkv, grad, out))
        for own, seen in self._rows(qkv, rows):
            k, v = _expanded(key[seen], query), _expanded(value[seen], query)
            weights = (_scores(query[own], key[seen], rows, scaling) - lse[:, own].unsqueeze(-1)).exp()
            of_weights = torch.einsum("qhd,khd->hqk", grad[own], v)
            delta = (grad[own] * out[own]).sum(-1).t().unsqueeze(-1)
            of_scores = weights * (of_weights - delta) * scaling
            found[0][own] = torch.einsum("hqk,khd->qhd", of_scores, k).to(found[0].dtype)
            for target, part in ((found[1], torch.einsum("hqk,qhd->khd", of_scores, query[own])),
                                 (found[2], torch.einsum("hqk,qhd->khd", weights, grad[own]))):  # fmt: skip
                target[seen] = part.unflatten(1, (key.shape[1], -1)).sum(2).to(target.dtype)
        return found[0], found[1], found[2]

    def _rows(self, qkv: Sequence[Tensor], rows: RaggedRows) -> Iterator[tuple[slice, slice]]:
        for ends, packed in ((rows.queries, qkv[0]), (rows.keys, qkv[1])):
            assert ends.ends.dtype == torch.int32 and int(ends.ends[0]) == 0 and int(ends.ends[-1]) == packed.shape[0]
            lengths = ends.ends.diff()
            assert int(lengths.min()) > 0 and int(lengths.max()) == ends.longest
        assert rows.queries.ends.shape == rows.keys.ends.shape
        pairs = (pairwise(ends.ends.tolist()) for ends in (rows.queries, rows.keys))
        for own, seen in zip(*pairs, strict=True):
            yield slice(*own), slice(*seen)


def _expanded(part: Tensor, query: Tensor) -> Tensor:
    return part.repeat_interleave(query.shape[1] // part.shape[1], 1)


def _scores(q: Tensor, k: Tensor, rows: RaggedRows, scaling: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, _expanded(k, q)).to(torch.promote_types(q.dtype, torch.float32)) * scaling
    if rows.causal:
        ahead = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        scores = scores.masked_fill((ahead < 0) | (ahead >= (rows.window or len(k))), float("-inf"))
    return scores
