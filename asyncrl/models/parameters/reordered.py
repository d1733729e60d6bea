"""A weight in the layout of oneDNN's products, at a place that the next version is written into.

torch gives such a copy as an opaque tensor and has no way to write another weight into it; a fresh one for every version costs its
page faults, and comes whole. The layout is that of blocks: some rows by some words of 32 bits (a float32, or two neighbours of
bfloat16), a row of blocks after the other, and in a block word after word, each of all its rows. Which blocks, nobody says: they
are found by comparing with what torch has made of the first weight. Where they are others, where that weight cannot tell (zeros),
or without native code, torch makes a fresh copy each time.

Shape legend: O output features (rows), I input features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..native import library as native

PIECE_BYTES = 1 << 18  # written at a time: some 50 us
_ROWS_HINT = 64  # measured: the layout does not depend on it between 16 and 1,024 rows
_WORD = 4  # bytes


class Blocks(NamedTuple):
    """Rows and words of a block."""

    rows: int
    words: int


KNOWN_BLOCKS = tuple(Blocks(rows, words) for words in (16, 32) for rows in (64, 48, 32, 16))


def reorder(weight_OI: Tensor) -> Tensor:
    """A fresh copy, opaque, by torch."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return found


class Reordered:
    """See the module. `tensor`: the copy, for `mkldnn._linear_pointwise`. Lives on the lane."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.tensor = reorder(weight_OI)
        self.blocks = _blocks_of(self.tensor, weight_OI)  # None: `write` makes a fresh copy
        self._step, self.pieces = 1, 1  # rows of blocks that are written at a time, and how often
        if self.blocks is not None:
            count = weight_OI.shape[0] // self.blocks.rows
            self._step = max(PIECE_BYTES * count // weight_OI.nbytes, 1)
            self.pieces = -(-count // self._step)

    def write(self, weight_OI: Tensor) -> None:
        """Become a copy of another weight of the same shape and dtype."""
        if self.blocks is None:
            self.tensor = reorder(weight_OI)
        else:
            write_blocks(weight_OI, self.tensor, self.blocks)

    def write_in_pieces(self, weight_OI: Tensor) -> Iterator[None]:
        """The same, `pieces` times; in between it is a mixture, which nobody may use."""
        if self.blocks is None:
            self.write(weight_OI)
            yield
            return
        count = weight_OI.shape[0] // self.blocks.rows
        for first in range(0, count, self._step):
            _write(weight_OI, self.tensor, self.blocks, first, min(first + self._step, count))
            yield


def write_blocks(weight_OI: Tensor, tensor: Tensor, blocks: Blocks, into: native.BlockSums | None = None) -> None:
    """`tensor`, which lies in these blocks wherever that is, becomes a copy of the weight. `into`: its checksums, too."""
    _write(weight_OI, tensor, blocks, 0, weight_OI.shape[0] // blocks.rows, into)


def _write(
    weight_OI: Tensor, tensor: Tensor, blocks: Blocks, first: int, last: int, into: native.BlockSums | None = None
) -> None:
    address: int = torch.ops.mkldnn.data_ptr(tensor)
    native.reorder(weight_OI, address, blocks, first, last, into)


def _blocks_of(tensor: Tensor, weight_OI: Tensor) -> Blocks | None:
    """Those in which `weight_OI` lies in `tensor`; None: they are not known, or cannot be told, or written."""
    rows, columns = weight_OI.shape
    words, odd = divmod(columns * weight_OI.itemsize, _WORD)
    if odd or not native.available() or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    if torch.ops.mkldnn._nbytes(tensor) != weight_OI.nbytes:  # padded
        return None
    fitting = [each for each in KNOWN_BLOCKS if rows % each.rows == 0 and words % each.words == 0]
    return next((each for each in fitting if _holds(tensor, weight_OI, each)), None)


def _holds(tensor: Tensor, weight_OI: Tensor, blocks: Blocks) -> bool:
    """Whether the first row of blocks, and the last one that could lie in no other way (rows that pad are zeros), lie in `tensor`
    as they would be written."""
    size = blocks.rows * weight_OI.shape[1] * weight_OI.itemsize
    expected = np.empty(size, np.uint8)
    parts = weight_OI.split(blocks.rows)
    last = next((row for row in range(len(parts) - 1, -1, -1) if _tells(parts[row])), None)
    if last is None or (last == 0 and len(parts) > 1) or not _tells(parts[0]):
        return False
    address: int = torch.ops.mkldnn.data_ptr(tensor)
    for row in (0, last):
        native.reorder(parts[row], expected.ctypes.data, blocks, 0, 1)
        if ctypes.string_at(address + row * size, size) != expected.tobytes():
            return False
    return True


def _tells(part: Tensor) -> bool:
    """Whether most words differ from their neighbours in both directions: zeros lie everywhere alike."""
    words = part.view(torch.int32)
    differences = (words[1:] != words[:-1], words[:, 1:] != words[:, :-1])
    return all(bool(each.float().mean() > 0.5) for each in differences)
