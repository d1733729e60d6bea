"""The plain path: hidden states from transformers' own forward, with one row for each sequence and no replaced layer.

A packed tree is split into rows, each a prefix with one of its suffixes. The hidden states of a prefix are read from the row of
its first suffix. With `padded`, rows share a forward and are padded on the right, which causal layers do not see; else each row
runs alone.

Shape legend: T packed tokens, E hidden size, R rows of one forward, L their padded length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.types import Int64Array

from .attention.tree import TreePlan

_TOKENS = 4096  # most padded tokens of one forward


class PlainForward:
    """To be called on the lane only."""

    def __init__(self, decoder: nn.Module, *, padded: bool) -> None:
        self.decoder = decoder
        self.padded = padded

    def hidden(self, tokens_T: Tensor, plan: TreePlan) -> Tensor:
        """[T] -> [T, E], the decoder's last hidden states. Differentiable."""
        rows = row_indices(plan)
        place_T = np.full(plan.tokens, -1, np.int64)  # row of each token in the joined outputs
        parts, total = [], 0
        for batch in self._batches(rows):
            length = max(row.size for row in batch)
            hidden_RLE = self._forward(tokens_T, batch, length)
            for number, row in enumerate(batch):
                fresh = place_T[row] < 0
                place_T[row[fresh]] = total + number * length + np.flatnonzero(fresh)
            parts.append(hidden_RLE.flatten(0, 1))
            total += len(batch) * length
        return torch.cat(parts).index_select(0, torch.from_numpy(place_T).to(tokens_T.device))

    def _forward(self, tokens_T: Tensor, batch: list[Int64Array], length: int) -> Tensor:
        index_RL = np.zeros((len(batch), length), np.int64)
        mask_RL = np.zeros((len(batch), length), np.int64)
        for number, row in enumerate(batch):
            index_RL[number, : row.size] = row
            index_RL[number, row.size :] = row[-1]
            mask_RL[number, : row.size] = 1
        arguments: dict[str, Any] = {"input_ids": tokens_T[torch.from_numpy(index_RL).to(tokens_T.device)]}
        if not mask_RL.all():
            arguments["attention_mask"] = torch.from_numpy(mask_RL).to(tokens_T.device)
        hidden_RLE: Tensor = self.decoder(**arguments, use_cache=False).last_hidden_state
        return hidden_RLE

    def _batches(self, rows: list[Int64Array]) -> list[list[Int64Array]]:
        """Rows in batches, longest first: the first row of a batch has its padded length."""
        batches: list[list[Int64Array]] = []
        for row in sorted(rows, key=lambda row: -row.size):
            last = batches[-1] if batches else None
            if self.padded and last is not None and (len(last) + 1) * last[0].size <= _TOKENS:
                last.append(row)
            else:
                batches.append([row])
        return batches


def row_indices(plan: TreePlan) -> list[Int64Array]:
    """Packed indices of each row in order: a prefix and one of its suffixes; a prefix alone where it has none."""
    rows = []
    for prefix, own in plan.rows():
        before = np.arange(prefix.start, prefix.start + prefix.length)
        rows.append(np.concatenate([before, np.arange(own.start, own.start + own.length)]))
    return rows
