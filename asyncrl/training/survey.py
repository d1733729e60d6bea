"""What a loss may need to know of the whole step before its first backward, over all ranks.

Two things are: the counts, where the terms of a loss are divided by different numbers and there is no second gradient
buffer; and the entropies of all tokens, where only the top share of them has a policy loss. A streamed step knows neither
in time (the configuration refuses it); a step that is gathered whole before it is trained does.

Every rank takes part in the collectives, one without microbatches too, between two steps and in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.terms import entropy_threshold
from asyncrl.types import Float32Array, Microbatch, Normaliser

from .accumulators import Counts
from .reducer import Reducer, sum_over_ranks


def survey(
    loss: Loss,
    batches: Sequence[Microbatch],
    entropies: Sequence[Float32Array],
    reducer: Reducer,
    device: torch.device,
    max_length: int,
) -> tuple[Loss, list[Microbatch]]:
    """The loss with its terms under one normaliser, and the microbatches with their `keep` column.

    `entropies`: [S] of each microbatch, in nats; read only where `loss.top_entropy_quantile` is below 1.
    """
    found = list(batches)
    if loss.top_entropy_quantile < 1:
        mine = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *entropies]))
        threshold = entropy_threshold(over_ranks(mine, reducer, device), loss.top_entropy_quantile)
        found = [
            replace(batch, keep=entropy_S.astype(np.float64) >= threshold)
            for batch, entropy_S in zip(batches, entropies, strict=True)
        ]
    if loss.extra_normaliser is None:
        return loss, found
    kept = Counts(
        sequences=sum(batch.sequences for batch in found),
        tokens=sum(batch.scored for batch in found),
        microbatches=len(found),
        extra=sum(batch.scored if batch.keep is None else int(batch.keep.sum()) for batch in found),
    ).over_ranks(reducer, device)
    denominators = kept.denominators(max_length)
    by_extra = denominators[loss.extra_normaliser]
    if loss.extra_normaliser is Normaliser.TOKENS:  # a mean over the tokens that the term acts on
        by_extra = max(kept.extra, 1.0)
    return loss.whole_step(denominators[loss.normaliser] / by_extra), found


def over_ranks(mine_N: Tensor, reducer: Reducer, device: torch.device) -> Tensor:
    """[N of this rank] -> [N of all ranks], float64 on the host. Two all-reduces: the lengths, then a padded table."""
    lengths = torch.zeros(reducer.world_size, dtype=torch.float64)
    lengths[reducer.rank] = mine_N.numel()
    lengths = sum_over_ranks(reducer, lengths, device)
    table = torch.zeros(reducer.world_size, int(lengths.max()), dtype=torch.float64)
    table[reducer.rank, : mine_N.numel()] = mine_N.double()
    table = sum_over_ranks(reducer, table, device)
    return torch.cat([row[: int(length)] for row, length in zip(table, lengths, strict=True)])
