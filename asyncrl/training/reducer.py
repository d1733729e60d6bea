"""The collectives that the trainer uses. `distributed.world.World` implements them for several ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Reducer(Protocol):
    """Synchronous collectives. All ranks must call them in the same order, each on its device's thread."""

    rank: int
    world_size: int

    def all_reduce_sum_(self, tensor: Tensor) -> object:
        """Replaces `tensor`, which is small, float64 and on the trainer's device, by its sum over ranks."""

    def reduce_gradients_(self, flat: Tensor) -> object:
        """Replaces the flat gradient buffer by its sum over ranks."""


class OneRank:
    """The reducer of a run with one rank. A sum over one rank changes nothing."""

    rank = 0
    world_size = 1

    def all_reduce_sum_(self, tensor: Tensor) -> None:
        return None

    def reduce_gradients_(self, flat: Tensor) -> None:
        return None


def sum_over_ranks(reducer: Reducer, table: Tensor, device: torch.device) -> Tensor:
    """The sum of a float64 CPU tensor over ranks, on the CPU. `device`: the device of the process group."""
    tensor = table if reducer.world_size == 1 else table.to(device)
    reducer.all_reduce_sum_(tensor)
    return tensor.cpu()
