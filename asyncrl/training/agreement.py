"""Compares the bits of the masters (master weights) that several ranks hold. On equal processors these bits must be equal.

Each rank sends a checksum of its masters with the metrics of the process's first step, and then of every `COMPARE_EVERY`-th step.
If checksums differ, the ranks exchange one checksum for each tensor, and the error names the rank and the first tensor.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from asyncrl.distributed.collectives import Collectives
from asyncrl.errors import DivergenceError

from .accumulators import sum_over_ranks
from .optimizer import Parameters

COMPARE_EVERY = 10


def bit_sum(values: Tensor) -> Tensor:
    """The sum of float32 or float64 `values`, read as integers, modulo 2^64. One flipped bit always changes the sum."""
    flat = values.detach().view(-1)
    # Two float32 are read as one int64 if possible. To sum int32, torch first makes an int64 copy, twice as large as the master.
    pairs = flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0
    return flat.view(torch.int64 if pairs or flat.dtype == torch.float64 else torch.int32).sum(dtype=torch.int64)


def bit_sums(parameters: Parameters) -> Tensor:
    """`bit_sum` of the master of each tensor, int64 [tensors]."""
    return torch.stack([bit_sum(master) for _, master in parameters.named_masters()])


def exact_halves(sums: Tensor) -> Tensor:
    """int64 [n] as float64 [2 n] on the CPU: all upper 32 bits, then all lower 32 bits. float64 holds 32 bits exactly."""
    sums = sums.cpu()
    return torch.cat([sums >> 32, sums & 0xFFFFFFFF]).double()


def different_ranks(rows: Tensor, shards: int) -> list[int]:
    """The ranks r, r + `shards`, r + 2 `shards`, ... are a set: they should have the same masters. Returns the ranks whose row
    differs from the most frequent row of their set. `rows`: [ranks, columns]."""
    different = list[int]()
    for shard in range(shards):
        rows_of_set = [tuple(row) for row in rows[shard::shards].tolist()]
        # If two rows are equally frequent, this is the row of the lower rank.
        majority = Counter(rows_of_set).most_common(1)[0][0]
        different += [shard + shards * copy for copy, row in enumerate(rows_of_set) if row != majority]
    return sorted(different)


def require_same_weights(
    rows: Tensor, sums: Tensor, names: list[str], world: Collectives, shards: int, device: torch.device, version: int
) -> None:
    """Errors: DivergenceError on every rank if checksums differ. Calls a collective only in this case. `rows`: the
    checksum of each rank, as halves [ranks, 2]. `sums`: `bit_sums` of this rank. `names`: of the tensors, in order of `sums`."""
    if not (different := different_ranks(rows, shards)):
        return
    tensors = torch.zeros(world.world_size, 2 * len(sums), dtype=torch.float64)
    tensors[world.rank] = exact_halves(sums)
    by_tensor = sum_over_ranks(world, tensors, device).view(-1, 2, len(sums))
    found = list[str]()
    for rank in different:
        first = next(
            (name for i, name in enumerate(names) if rank in different_ranks(by_tensor[:, :, i], shards)), "no tensor"
        )
        found.append(f"training rank {rank} (first in {first})")
    error = DivergenceError(
        f"the weights of version {version} are not the same on all ranks: {' and '.join(found)} differ from most ranks, or from "
        "the lower of two ranks. A memory or a transfer has failed: replace the machine. Or the ranks run on unlike processors, "
        "whose optimizer steps differ in the last bits: train on machines of one kind. Then resume from a checkpoint"
    )
    error.unusable_weights = True
    raise error
