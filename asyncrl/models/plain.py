"""The plain path: transformers' own forward, without replaced layers, computes the hidden states. Each sequence is a row.

Packed trees are split into rows, each from a root to a leaf. An inner node is in several rows, and its hidden states are read from
the row that runs first. With `padded`, rows share a forward and are padded on the right, where causal layers do not see
the padding. Without `padded` each row runs alone.

Shape legend: T packed tokens, E hidden size, R rows of one forward, L tokens of the longest row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.types import Int64Array

from .attention.tree import TreePlan

_MAX_TOKENS = 4096  # of one forward, padding included; a longer row runs alone


class PlainForward:
    """Runs `decoder`. Must be called on the lane, the thread that owns the device."""

    def __init__(self, decoder: nn.Module, *, padded: bool) -> None:
        self.decoder = decoder
        self.padded = padded

    def hidden(self, tokens_T: Tensor, plan: TreePlan) -> Tensor:
        """[T] -> [T, E], the decoder's last hidden states. Differentiable."""
        rows = plan.sequences()
        index_T = np.full(plan.tokens, -1, np.int64)  # index of each token in cat(parts); -1: not yet known
        parts, total = [], 0
        for batch in self._batches(rows):
            length = max(row.size for row in batch)
            hidden_RLE = self._forward(tokens_T, batch, length)
            for number, row in enumerate(batch):
                # Tokens of an inner node have an index already, if another row of the node came first.
                new = index_T[row] < 0
                index_T[row[new]] = total + number * length + np.flatnonzero(new)
            parts.append(hidden_RLE.flatten(0, 1))
            total += len(batch) * length
        return torch.cat(parts).index_select(0, torch.from_numpy(index_T).to(tokens_T.device))

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
        """Rows in batches, long rows first. So the other rows of a batch are padded to the length of its first row."""
        batches: list[list[Int64Array]] = []
        for row in sorted(rows, key=lambda row: -row.size):
            last = batches[-1] if batches else None
            if self.padded and last is not None and (len(last) + 1) * last[0].size <= _MAX_TOKENS:
                last.append(row)
            else:
                batches.append([row])
        return batches
