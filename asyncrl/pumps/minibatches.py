"""Several optimizer steps over disjoint parts of one batch (`algorithm.minibatches`), and what is said of them afterwards.

The groups of a step on all ranks, in the order of their ids, are cut into n runs whose lengths differ by at most one: so the
parts are the same on any number of ranks, and each rank trains what it holds of a part, perhaps nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.algorithms.base import kind
from asyncrl.types import Group, StepResult

from .metrics import Gather


async def part_of_each(groups: Sequence[Group], count: int, gather: Gather, rank: int) -> list[int]:
    """Of each of this rank's groups, the part of the batch that it belongs to, from 0. A collective where there are several
    parts and several ranks."""
    if count == 1:
        return [0] * len(groups)
    return parts_of_rank(await gather([group.group_id for group in groups]), rank, count)


def parts_of_rank(ids: Sequence[Sequence[int]], rank: int, count: int) -> list[int]:
    """The part of each group of `ids[rank]`; `ids`: by rank, group ids in any order."""
    places = sorted((group_id, r, i) for r, each in enumerate(ids) for i, group_id in enumerate(each))
    found = {i: place * count // len(places) for place, (_, r, i) in enumerate(places) if r == rank}
    return [found[i] for i in range(len(ids[rank]))]


def over_parts(results: Sequence[StepResult]) -> StepResult:
    """What is reported of a pass over a batch: counts are sums over its optimizer steps, everything else means, smallest and
    largest values of them; version and learning rate are those of the last."""
    if len(results) == 1:
        return results[0]
    metrics: dict[str, float] = {}
    for name in {name: None for result in results for name in result.metrics}:
        values = [result.metrics[name] for result in results if name in result.metrics]
        if kind(name) != "sum":
            metrics[name] = min(values) if kind(name) == "min" else max(values)
        else:
            metrics[name] = math.fsum(values) / (1 if name.endswith("_tokens") else len(values))
    last = results[-1]
    metrics["optim/lr"] = last.lr
    return replace(
        last,
        loss=math.fsum(result.loss for result in results) / len(results),
        grad_norm=math.fsum(result.grad_norm for result in results) / len(results),
        tokens=sum(result.tokens for result in results),
        sequences=sum(result.sequences for result in results),
        microbatches=sum(result.microbatches for result in results),
        metrics=metrics,
    )
