"""A bin: rows of similar lengths, padded to one shape. Queries, keys and values are gathered from packed tensors.

The query heads of one key/value head are stacked as rows of one matrix product, so keys and values are never repeated.

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
    """The indices of a bin. Padding repeats a real token: callers must mask padded keys, and zero gradients of padded queries."""

    rows: int  # R
    length: int  # L
    width: int  # C
    queries: Tensor  # [R * L] packed index of each query
    keys: Tensor  # [R * C] packed index of each key
    padding: Tensor  # indices into `queries` of padded queries
    real: Tensor  # indices into `queries` of the other queries
    real_tokens: Tensor  # queries[real]

    @property
    def scores(self) -> int:
        """The number of attention scores for each query head, padding included."""
        return self.rows * self.length * self.width

    def queries_of(self, tensor: Tensor, kv_heads: int, zero_padding: bool = False) -> Tensor:
        """The queries of the bin: [T, H, D] -> [R K, L G, D]. `zero_padding`: padded queries are set to 0, for gradients."""
        rows = tensor.index_select(0, self.queries)
        if zero_padding and self.padding.numel():
            rows.index_fill_(0, self.padding, 0.0)
        heads, size = tensor.shape[1:]
        split = rows.view(self.rows, self.length, kv_heads, heads // kv_heads, size).transpose(1, 2)
        return split.reshape(self.rows * kv_heads, -1, size)

    def keys_of(self, tensor: Tensor) -> Tensor:
        """The keys or values of the bin: [T, K, D] -> [R K, C, D]."""
        heads, size = tensor.shape[1:]
        rows = tensor.index_select(0, self.keys).view(self.rows, self.width, heads, size)
        return rows.transpose(1, 2).reshape(self.rows * heads, -1, size)

    def put(self, tensor: Tensor, part: Tensor, kv_heads: int) -> None:
        """The inverse of `queries_of`: writes `part` [R K, L G, D], without padding, to the bin's queries in `tensor` [T, H, D]."""
        split = part.view(self.rows, kv_heads, self.length, -1, part.shape[2]).transpose(1, 2)
        rows = split.reshape(self.rows * self.length, *tensor.shape[1:])
        real_rows = rows.index_select(0, self.real) if self.padding.numel() else rows
        tensor.index_copy_(0, self.real_tokens, real_rows)

    def add(self, tensor: Tensor, part: Tensor) -> None:
        """The adjoint of `keys_of`: adds `part` [R K, C, D] to the bin's keys in `tensor` [T, K, D]. Padded keys must be 0."""
        heads, size = tensor.shape[1:]
        rows = part.view(self.rows, heads, -1, size).transpose(1, 2).to(tensor.dtype)
        tensor.index_add_(0, self.keys, rows.reshape(-1, heads, size))


def index_tensor(array: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """The array as a flat int64 tensor on the device."""
    return to_device(np.ascontiguousarray(array.reshape(-1), np.int64), torch.device(device))
