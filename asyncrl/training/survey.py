"""Values of the whole step, over all ranks, that some losses need before the first backward.

* The counts of the step, if two terms of the loss have different denominators.
* The entropies of all tokens, if only the tokens with the highest entropy have a policy loss.
So all microbatches must be known before the first one is trained. The configuration refuses such a loss for a streamed step.

These functions are collective: in each step all ranks must make the same calls in the same order, also a rank without microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.terms import entropy_threshold
from asyncrl.types import Float32Array, Microbatch

from .accumulators import Counts
from .reducer import Reducer, sum_over_ranks


def survey(
    loss: Loss,
    batches: Sequence[Microbatch],
    entropies: Sequence[Float32Array],
    reducer: Reducer,
    device: torch.device,
    max_length: int,
    leads: bool = True,
) -> tuple[Loss, list[Microbatch]]:
    """A loss whose terms share one normaliser, and the microbatches with a `keep` column if the loss needs one. A collective.

    `entropies`: [S] of each microbatch, in nats. Read only if `loss.top_entropy_quantile` is below 1. `leads`: whether this rank
    adds its microbatches to the sums; of siblings that share microbatches only the leader does.
    """
    selected = list(batches)
    if loss.top_entropy_quantile < 1:
        # The empty array is for a rank without microbatches.
        local_N = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(entropies if leads else ())]))
        threshold = entropy_threshold(gather_over_ranks(local_N, reducer, device), loss.top_entropy_quantile)
        selected = [
            replace(batch, keep=entropy_S.astype(np.float64) >= threshold)
            for batch, entropy_S in zip(batches, entropies, strict=True)
        ]
    if not loss.bonus_apart:
        return loss, selected
    counts = Counts(
        sequences=sum(batch.sequences for batch in selected),
        tokens=sum(batch.scored for batch in selected),
        microbatches=len(selected),
        kept=sum(batch.scored if batch.keep is None else int(batch.keep.sum()) for batch in selected),
    )
    totals = (counts if leads else Counts()).over_ranks(reducer, device)
    return loss.with_bonus_scale(totals.denominators(max_length)[loss.normaliser] / max(totals.kept, 1.0)), selected


def gather_over_ranks(local_N: Tensor, reducer: Reducer, device: torch.device) -> Tensor:
    """Concatenates the vectors of all ranks, float64 on the CPU. Two all-reduces: the lengths, then a padded table."""
    lengths = torch.zeros(reducer.world_size, dtype=torch.float64)
    lengths[reducer.rank] = local_N.numel()
    lengths = sum_over_ranks(reducer, lengths, device)
    table = torch.zeros(reducer.world_size, int(lengths.max()), dtype=torch.float64)
    table[reducer.rank, : local_N.numel()] = local_N.double()
    table = sum_over_ranks(reducer, table, device)
    return torch.cat([row[: int(length)] for row, length in zip(table, lengths, strict=True)])
