"""Packed copies of the trainer's weights on a board of their own: made once for each version by the trainer, which needs them too.

    board    | half 0: version v        | half 1: version v + 1    |     weights, as the modules read them
    copies   | half 0: v, in blocks     | half 1: v + 1, in blocks |     the same, as products on a CPU read them

A half of the copies is free when that half of the board is. Nobody is told of a version before its copies are there, too: so a
reader has nothing to pack, and moves to both at once. The trainer's own products read them there until its weights change.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from asyncrl.models.native.library import BlockSums
from asyncrl.models.parameters.placed import PackedLayout
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board
from asyncrl.transport.memory.halves import BUCKET_BYTES


class PackedCopies:
    """See the module. Made by `of`; all of it on the lane."""

    def __init__(self, policy: PolicyModel, layout: PackedLayout, board: Board) -> None:
        self.layout, self.board = layout, board
        self._policy = policy
        self._halves = [layout.place(board.half(half), policy.dtype) for half in (0, 1)]
        self._sums = np.zeros((2, board.buckets, 2), np.uint64)  # of what was written into the halves

    @classmethod
    def of(cls, policy: PolicyModel) -> Self | None:
        """None: no copy of this model can lie there. Errors: OutOfMemory, PlatformError."""
        products = policy.products
        layout = PackedLayout.of([each.form() for each in products], [each.origin for each in products])
        if not layout.size:
            return None
        return cls(policy, layout, Board.create(layout.size, torch.uint8, layout.digest(policy.dtype)))

    def message(self) -> dict[str, Any]:
        """For a reader, beside the descriptor of the board."""
        return {"board": self.board.description, "layout": self.layout.message()}

    def write(self, half: int) -> None:
        """Of what the modules read now, into a half that nobody reads, and that says that it holds no version."""
        self.board.clear(half)
        sums = self._sums[half]
        sums[:] = 0
        for product, place, placed in zip(self._policy.products, self.layout.places, self._halves[half], strict=True):
            if place is not None and placed is not None:
                number, start = place
                product.write_placed(placed, self.layout.forms[number], BlockSums(sums, start, BUCKET_BYTES))

    def complete(self, half: int, version: int) -> None:
        """They are those of `version`, which the modules read now; written, where they were not since the weights changed."""
        products = zip(self._policy.products, self._halves[half], strict=True)
        if not all(placed is None or product.reads(placed) for product, placed in products):
            self.write(half)
        self.board.complete(half, version, lambda: self._sums[half])

    def clear(self, half: int) -> None:
        """What it holds is not to be used."""
        self.board.clear(half)

    def close(self) -> None:
        """The trainer's products keep what they read."""
        self._halves.clear()
        self.board.close()
