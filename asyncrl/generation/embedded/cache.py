"""The key/value cache of the embedded engine. plans.py has the attention plans that read it.

One buffer is allocated at the start and never grows: `[layers, 2, rows, K, positions, D]`, where rows x positions is the
budget of the engine (`engine.kv_positions`) and a row is as long as the longest running sequence needs. A longer sequence, or
more sequences, change that shape (`fit`) and move the cached positions. Running sequences occupy rows [0..n) without holes,
so a decode step attends over a view of the buffer: nothing is gathered, nothing is expanded for grouped heads (the G = H / K
queries that share a key head are G query positions of one attention call).

One attention call pads all its rows to the longest. So `split_rows` cuts [0..n) into a few *runs* of rows of similar length,
with one call for each run. All rows grow by one a step, so the cut stays good until a row is added or removed.

Where a kernel for ragged rows reads the cache (on a GPU), the buffer is `[layers, 2, rows, positions, K, D]`, as that kernel
requires, and rows are not cut into runs. Other code reads a transposed view with the dimensions in the usual order.

The buffer starts as zeros: padding is masked by adding -inf to its scores, and a NaN in memory that was never written would
stay a NaN.

Shape legend: K key/value heads, D head size, n running rows.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.attention.ragged import kernel_for
from asyncrl.models.native import library as native
from asyncrl.types import Int64Array

# One more attention call in each layer costs about 70 us, the time of reading this many bytes of padding.
SPLIT_GAIN_BYTES = 1_500_000


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one cache. `positions`: length of a row now, the longest context that a row can hold."""

    layers: int
    rows: int
    heads: int  # K
    positions: int
    head_size: int  # D

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values together."""
        return 2 * self.layers * self.rows * self.heads * self.positions * self.head_size * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the memory is mapped, so unused pages never become resident (torch.zeros writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


class KVCache:
    """Storage and row moves. Only the lane may call it."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.total_positions = shape.rows * shape.positions  # of all rows, whatever their shape
        self._planes = _lazy_zeros(
            (shape.layers, 2, self.total_positions * shape.heads * shape.head_size), dtype, device
        )
        self.kernel = kernel_for(device, dtype, shape.head_size)
        self._view(shape)
        # The native kernel reads only the positions that a row has, so it needs no runs and no masks.
        self.native = native.attends(shape.head_size, self._planes)

    def _view(self, shape: CacheShape) -> None:
        self.shape = shape
        rows = self._planes[..., : shape.rows * shape.heads * shape.positions * shape.head_size]
        if self.kernel is None:
            self.data: Tensor = rows.unflatten(2, (shape.rows, shape.heads, shape.positions, shape.head_size))
            flat = rows.unflatten(2, (-1, shape.head_size))  # [rows * K * positions, D] of each layer
        else:
            self.data = rows.unflatten(2, (shape.rows, shape.positions, shape.heads, shape.head_size)).transpose(3, 4)
            # [total_positions, K, D], whatever shape rows have
            flat = self._planes.unflatten(2, (-1, shape.heads, shape.head_size))
        self.keys = [self.data[layer, 0] for layer in range(shape.layers)]  # [rows, K, positions, D]
        self.values = [self.data[layer, 1] for layer in range(shape.layers)]
        self.flat_keys = [flat[layer, 0] for layer in range(shape.layers)]
        self.flat_values = [flat[layer, 1] for layer in range(shape.layers)]

    def fit(self, rows: int, longest: int, usual: int, cached_n: Int64Array) -> None:
        """Change the shape if it has no room for `rows` rows of `longest` positions; these must fit `total_positions`.

        `usual`: a common length, at which rows start so that the shape seldom changes. `cached_n`: positions that the first rows
        hold. They are copied to their new places, the keys or values of one layer at a time.
        """
        shape = self.shape
        if rows <= shape.rows and longest <= shape.positions:
            return
        if rows * longest > self.total_positions:
            raise ValueError(f"{rows} rows of {longest} positions do not fit into the cache of {self.total_positions}")
        positions = max(longest, min(usual, self.total_positions // rows))
        old_data = self.data
        self._view(replace(shape, rows=self.total_positions // positions, positions=positions))
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
        """Device of the buffer."""
        return self.data.device

    @property
    def bytes_per_position(self) -> int:
        """Bytes of keys and values of one position in one layer."""
        return 2 * self.shape.heads * self.shape.head_size * self.data.element_size()

    def runs(self, length_n: Int64Array) -> list[int]:
        """The ends of the runs of rows [0..n) that share an attention call; valid until a row is added or removed."""
        if self.native or self.kernel is not None:
            return [int(length_n.size)]
        return split_rows(length_n, SPLIT_GAIN_BYTES // self.bytes_per_position)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` into row `target`, in all layers."""
        if length and source != target:
            self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def swap_rows(self, row: int, other: int, length: int, other_length: int) -> None:
        """Let two rows change places. `length` and `other_length`: how many positions each holds, perhaps none."""
        if not length:
            row, other, length, other_length = other, row, other_length, length
        saved = self.save(other, other_length) if other_length else None
        self.copy_row(row, other, length)
        if saved is not None:
            self.restore(saved, row)

    def save(self, row: int, length: int) -> Tensor:
        """A copy [layers, 2, K, length, D] that outlives the row."""
        return self.data[:, :, row, :, :length].clone()

    def restore(self, saved: Tensor, row: int) -> None:
        """Write the result of `save` into the first positions of `row`, in all layers."""
        self.data[:, :, row, :, : saved.shape[3]] = saved


def split_rows(length_n: Int64Array, gain: int) -> list[int]:
    """Cut rows [0..n) into runs of similar length: the ends of the runs, ascending, the last is n.

    The best cut is made if it saves more than `gain` padded positions; then both parts are cut in the same way.
    """
    ends: list[int] = []

    def cut(start: int, stop: int) -> None:
        lengths = length_n[start:stop]
        if stop - start > 1:
            left = np.maximum.accumulate(lengths)[:-1]
            right = np.maximum.accumulate(lengths[::-1])[::-1][1:]
            count = np.arange(1, stop - start)
            cost = left * count + right * (stop - start - count)
            best = int(cost.argmin())
            if int(lengths.max()) * (stop - start) - int(cost[best]) > gain:
                cut(start, start + best + 1)
                cut(start + best + 1, stop)
                return
        ends.append(stop)

    cut(0, int(length_n.size))
    return ends
