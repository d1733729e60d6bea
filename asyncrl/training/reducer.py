"""What the trainer needs from the other ranks: the part of `distributed.world.World` that it calls."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Reducer(Protocol):
    """Synchronous collectives, called on the lane, by every rank in the same order."""

    rank: int
    world_size: int

    def all_reduce_sum_(self, tensor: Tensor) -> object:
        """Sum over ranks, in place. A small float64 tensor on the trainer's device."""
        ...

    def reduce_gradients_(self, flat: Tensor) -> object:
        """Sum over ranks, in place, of the flat gradient buffer on its device."""
        ...


class OneRank:
    """The reducer of a run with one rank: nothing to add."""

    rank = 0
    world_size = 1

    def all_reduce_sum_(self, tensor: Tensor) -> None:
        return None

    def reduce_gradients_(self, flat: Tensor) -> None:
        return None


def sum_over_ranks(reducer: Reducer, table: Tensor, device: torch.device) -> Tensor:
    """Sum a float64 host tensor over ranks. The collective wants it on the device that the process group belongs to."""
    if reducer.world_size == 1:
        reducer.all_reduce_sum_(table)
        return table
    moved = table.to(device)
    reducer.all_reduce_sum_(moved)
    return moved.cpu()
