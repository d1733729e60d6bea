"""Rows of similar lengths, padded to one shape. Their queries and the keys that they attend to are gathered from packed tensors.

The query heads of one key/value head are stacked as rows of one product, so keys and values are never expanded.

Shape legend: T packed tokens, H query heads, K key/value heads, G = H/K, D head size; R rows of L queries and C keys each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..copying import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBin:
    """Padding repeats a real token. `queries_of` zeroes padded queries' gradients; the caller must mask padded keys."""

    rows: int  # R
    length: int  # L
    width: int  # C
    queries: Tensor  # [R * L] packed index
    keys: Tensor  # [R * C] packed index
    padding: Tensor  # positions in `queries` that are padding
    real: Tensor  # positions in `queries` that are not
    target: Tensor  # packed index of `real`

    @property
    def scores(self) -> int:
        """How many scores one attention head computes."""
        return self.rows * self.length * self.width

    def queries_of(self, tensor: Tensor, kv_heads: int, zero_padding: bool = False) -> Tensor:
        """[T, H, D] -> [R K, L G, D]."""
        rows = tensor.index_select(0, self.queries)
        if zero_padding and self.padding.numel():
            rows.index_fill_(0, self.padding, 0.0)
        heads, size = tensor.shape[1:]
        split = rows.view(self.rows, self.length, kv_heads, heads // kv_heads, size).transpose(1, 2)
        return split.reshape(self.rows * kv_heads, -1, size)

    def keys_of(self, tensor: Tensor) -> Tensor:
        """[T, K, D] -> [R K, C, D]."""
        heads, size = tensor.shape[1:]
        rows = tensor.index_select(0, self.keys).view(self.rows, self.width, heads, size)
        return rows.transpose(1, 2).reshape(self.rows * heads, -1, size)

    def put(self, tensor: Tensor, part: Tensor, kv_heads: int) -> None:
        """The inverse of `queries_of`: overwrite the bin's tokens."""
        split = part.view(self.rows, kv_heads, self.length, -1, part.shape[2]).transpose(1, 2)
        rows = split.reshape(self.rows * self.length, *tensor.shape[1:])
        tensor.index_copy_(0, self.target, rows.index_select(0, self.real) if self.padding.numel() else rows)

    def add(self, tensor: Tensor, part: Tensor) -> None:
        """The adjoint of `keys_of`: sums over all rows that share a key. (Masked keys have gradients of zero.)"""
        heads, size = tensor.shape[1:]
        rows = part.view(self.rows, heads, -1, size).transpose(1, 2).to(tensor.dtype)
        tensor.index_add_(0, self.keys, rows.reshape(-1, heads, size))


def index_tensor(array: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """The array as a flat int64 tensor on the device."""
    return to_device(np.ascontiguousarray(array.reshape(-1), np.int64), torch.device(device))
