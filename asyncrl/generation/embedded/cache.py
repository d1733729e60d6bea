"""The key/value cache of the embedded engine. plans.py has the attention plans that read it.

One buffer is allocated at the start and never grows: `[layers, 2, rows, K, positions, D]`. rows x positions is at most the budget
of the engine (`engine.kv_positions`), and a row has room for the longest present sequence. If a longer sequence or more sequences
come, `fit` changes this shape and moves the cached positions. Running sequences occupy rows [0..n) without holes. So in layers
without window, soft cap and sinks, a decode step attends over a view of the buffer, and copies nothing. Keys and values are not
repeated for grouped query heads: the query heads that share a key head are passed as query positions of one attention call.

Where a kernel for ragged rows reads the cache (on a GPU), the buffer is `[layers, 2, rows, positions, K, D]`, as that kernel
requires. Other code reads a transposed view with the dimensions in the usual order.

The buffer starts as zeros: padding is masked by adding -inf to its scores, and a NaN in memory that was never written would
stay a NaN.

Shape legend: K key/value heads, D head size, n running rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.attention.ragged import kernel_for
from asyncrl.models.native import library as native
from asyncrl.types import Int64Array


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one cache. `positions`: of each row, so a row holds a sequence of at most this length."""

    layers: int
    rows: int
    heads: int  # K
    positions: int
    head_size: int  # D

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values together."""
        return 2 * self.layers * self.rows * self.heads * self.positions * self.head_size * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU unused pages never become resident: numpy asks the system for zeros, torch would write them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class KVCache:
    """The buffer, its views, and moves of its rows. Use it only on the lane, the device's thread."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.total_positions = shape.rows * shape.positions  # limit for all rows together
        self._planes = _lazy_zeros(
            (shape.layers, 2, self.total_positions * shape.heads * shape.head_size), dtype, device
        )
        self.ragged_kernel = kernel_for(device, dtype, shape.head_size)
        self._set_shape(shape)
        # The native kernel reads only the positions that a row has, so it needs no masks.
        self.has_native_kernel = native.attends(shape.head_size, self._planes)

    def _set_shape(self, shape: CacheShape) -> None:
        self.shape = shape
        rows = self._planes[..., : shape.rows * shape.heads * shape.positions * shape.head_size]
        if self.ragged_kernel is None:
            self.data: Tensor = rows.unflatten(2, (shape.rows, shape.heads, shape.positions, shape.head_size))
            flat = rows.unflatten(2, (-1, shape.head_size))  # [rows * K * positions, D] of each layer
        else:
            self.data = rows.unflatten(2, (shape.rows, shape.positions, shape.heads, shape.head_size)).transpose(3, 4)
            # [total_positions, K, D], for every shape of the rows
            flat = self._planes.unflatten(2, (-1, shape.heads, shape.head_size))
        self.keys = [self.data[layer, 0] for layer in range(shape.layers)]  # [rows, K, positions, D]
        self.values = [self.data[layer, 1] for layer in range(shape.layers)]
        self.flat_keys = [flat[layer, 0] for layer in range(shape.layers)]
        self.flat_values = [flat[layer, 1] for layer in range(shape.layers)]

    def fit(self, rows: int, longest: int, preferred: int, cached_n: Int64Array) -> None:
        """Change the shape if it has no room for `rows` rows of `longest` positions. Errors: ValueError beyond `total_positions`.
        `preferred`: rows get at least this length while there is room, so that the shape seldom changes. `cached_n`: number of
        positions that each of the first rows holds. These positions are copied, keys or values of one layer at a time."""
        shape = self.shape
        if rows <= shape.rows and longest <= shape.positions:
            return
        if rows * longest > self.total_positions:
            raise ValueError(f"{rows} rows of {longest} positions do not fit into the cache of {self.total_positions}")
        positions = max(longest, min(preferred, self.total_positions // rows))
        old_data = self.data
        self._set_shape(replace(shape, rows=self.total_positions // positions, positions=positions))
        length = int(cached_n.max(initial=0))
        if length == 0:
            return
        used_rows = int(np.flatnonzero(cached_n)[-1]) + 1
        for layer in range(shape.layers):
            for part in range(2):  # keys, values
                copy = old_data[layer, part, :used_rows, :, :length].clone()  # source and target overlap
                self.data[layer, part, :used_rows, :, :length] = copy

    @property
    def device(self) -> torch.device:
        return self.data.device

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` into row `target`, in all layers."""
        if length and source != target:
            self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def swap_rows(self, row: int, other: int, length: int, other_length: int) -> None:
        """Swap two rows. `length` and `other_length`: how many positions each of them holds; 0: the row is empty."""
        if not length:
            row, other, length, other_length = other, row, other_length, length
        saved = self.data[:, :, other, :, :other_length].clone()
        self.copy_row(row, other, length)
        self.data[:, :, row, :, :other_length] = saved
