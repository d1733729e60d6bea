"""Splitting a batch over ranks into equally many microbatches of equal work, and putting the results back in order.

    batch --pack_bins--> bins of sequences --shard--> rank 0: microbatch 0, 1, ...      every rank: the same number
                                                      rank 1: microbatch 0, 1, ...
    results of all ranks, end to end --restore(inverse)--> rows in the batch's order

Why equal counts: with sharded parameters every microbatch is a collective. A rank with one fewer enters the collective
that ends the step while the others wait in that of a microbatch, and all hang until the watchdog.

Guarantees: every row is in exactly one microbatch of one rank; all ranks have the same number of microbatches; no
microbatch holds more tokens than its capacity; the length to pad to is that of the whole batch, the same on all ranks.

Shape legend: N rows of a batch, R ranks, K microbatches a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from asyncrl.errors import DataError
from asyncrl.types import Int64Array

from .batch_meta import BatchMeta

T = TypeVar("T")
Bins: TypeAlias = list[list[int]]
Packer: TypeAlias = Literal["balanced", "first_fit", "in_order"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank, microbatch after microbatch. `microbatches` [K]: (start, stop) rows of `meta`."""

    meta: BatchMeta
    microbatches: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]  # [K] what counts against the capacity


@dataclass(frozen=True, slots=True)
class Sharding:
    """`inverse` [N] gathers: row i of the batch is row inverse[i] of the shards' rows laid end to end."""

    shards: tuple[Shard, ...]
    inverse: Int64Array
    pad_to: int

    def restore(self, parts: Sequence[Sequence[T]]) -> list[T]:
        """Per-row results of every rank (rank by rank, rows as in its shard), in the order of the batch.

        Errors: DataError where a rank brings another number of rows than its shard has.
        """
        for rank, (part, shard) in enumerate(zip(parts, self.shards, strict=True)):
            if len(part) != len(shard.meta):
                raise DataError(f"rank {rank} brought {len(part)} rows back; its shard has {len(shard.meta)}")
        rows = [row for part in parts for row in part]
        return [rows[i] for i in self.inverse.tolist()]


# -- bins ----------------------------------------------------------------------------------------------------------


def pack_bins(
    lengths: Sequence[int],
    capacity: int,
    *,
    packer: Packer = "balanced",
    round_to: int = 1,
    min_bins: int = 1,
    bins_multiple: int = 1,
    allow_empty: bool = False,
) -> Bins:
    """Bins of at most `capacity` tokens that hold every index of `lengths` exactly once.

    packer: `balanced` fills as few bins as first-fit decreasing needs and levels them (longest first, into the emptiest
    bin; where that does not fit, first-fit's bins stay); `first_fit` does not level; `in_order` keeps the order and
    starts a new bin when one is full. round_to: each length counts rounded up to this multiple.
    min_bins, bins_multiple: the number of bins is raised to both, by taking sequences out of the fullest bins.
    allow_empty: bins may stay empty where there are too few sequences (a rank then runs a microbatch of weight 0).
    Errors: DataError for a sequence longer than `capacity`, or too few sequences for the bins.
    """
    if min(capacity, round_to, min_bins, bins_multiple) < 1:
        raise DataError(
            f"capacity {capacity}, round_to {round_to}, min_bins {min_bins} and bins_multiple {bins_multiple} are at least 1"
        )
    sizes = [-(-int(length) // round_to) * round_to for length in lengths]
    if sizes and max(sizes) > capacity:
        worst = int(np.argmax(sizes))
        raise DataError(
            f"sequence {worst} has {lengths[worst]} tokens ({sizes[worst]} rounded up); a microbatch holds {capacity}: "
            "raise the tokens per microbatch, or shorten the sequence"
        )
    bins = _in_order(sizes, capacity) if packer == "in_order" else _first_fit(sizes, capacity)
    count = max(len(bins), min_bins)
    count = -(-count // bins_multiple) * bins_multiple
    if len(sizes) < count and not allow_empty:
        raise DataError(
            f"{len(sizes)} sequences cannot fill {count} bins (a multiple of {bins_multiple}), one each at least"
        )
    if packer == "balanced":
        bins = _level(sizes, capacity, count) or bins
    return _raise_count(bins, sizes, count)


def _in_order(sizes: list[int], capacity: int) -> Bins:
    bins: Bins = []
    used = 0
    for index, size in enumerate(sizes):
        if not bins or used + size > capacity:
            bins.append([])
            used = 0
        bins[-1].append(index)
        used += size
    return bins


def _first_fit(sizes: list[int], capacity: int) -> Bins:
    bins: Bins = []
    room: list[int] = []
    for index in _longest_first(sizes):
        place = next((i for i, free in enumerate(room) if free >= sizes[index]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= sizes[index]
    return bins


def _level(sizes: list[int], capacity: int, count: int) -> Bins | None:
    """Longest first into the emptiest of `count` bins (of equally empty ones, that with fewer sequences), if that fits."""
    bins: Bins = [[] for _ in range(count)]
    loads = [0] * count
    for index in _longest_first(sizes):
        place = min(range(count), key=lambda i: (loads[i], len(bins[i])))
        if loads[place] + sizes[index] > capacity:
            return None
        bins[place].append(index)
        loads[place] += sizes[index]
    return bins


def _raise_count(bins: Bins, sizes: list[int], count: int) -> Bins:
    """More bins, by moving the shortest sequence of the fullest bin that can spare one; empty ones where none can."""
    while len(bins) < count:
        spare = [i for i, members in enumerate(bins) if len(members) > 1]
        if not spare:
            bins.append([])
            continue
        fullest = max(spare, key=lambda i: sum(sizes[index] for index in bins[i]))
        moved = min(bins[fullest], key=lambda index: sizes[index])
        bins[fullest].remove(moved)
        bins.append([moved])
    return bins


def _longest_first(sizes: list[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


# -- ranks ---------------------------------------------------------------------------------------------------------


def shard_packed(
    meta: BatchMeta,
    ranks: int,
    capacity: int,
    *,
    packer: Packer = "balanced",
    round_to: int = 1,
    allow_empty: bool = False,
) -> Sharding:
    """Sequence packing: every microbatch is a bin of `pack_bins`, their number a multiple of the ranks.

    Bins are dealt fullest first, a round of `ranks` bins at a time, the fullest of a round to the rank that has least so
    far: in every round all ranks work about as long, and in the whole step too. Errors: DataError.
    """
    lengths = _lengths(meta, ranks)
    bins = pack_bins(
        lengths,
        capacity,
        packer=packer,
        round_to=round_to,
        min_bins=ranks,
        bins_multiple=ranks,
        allow_empty=allow_empty,
    )
    loads = [sum(-(-lengths[i] // round_to) * round_to for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda i: -loads[i]) if packer != "in_order" else list(range(len(bins)))
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        totals = [sum(loads[i] for i in mine) for mine in dealt]
        emptiest = sorted(range(ranks), key=lambda rank: totals[rank])
        for bin_index, rank in zip(order[start : start + ranks], emptiest, strict=True):
            dealt[rank].append(bin_index)
    return _build(
        meta, [[bins[i] for i in mine] for mine in dealt], [[loads[i] for i in mine] for mine in dealt], round_to
    )


def shard_padded(meta: BatchMeta, ranks: int, capacity: int, *, round_to: int = 1) -> Sharding:
    """Dynamic batching of padded rows: sorted by length and dealt over the ranks, so that rows of one microbatch are of
    about one length. Where a microbatch ends is decided by the longest row of any rank: the same place on all of them.

    A microbatch costs rows x longest row. Errors: DataError unless the rows are a multiple of the ranks and each fits.
    """
    lengths = _lengths(meta, ranks)
    if len(lengths) % ranks:
        raise DataError(f"{len(lengths)} rows do not divide evenly over {ranks} ranks")
    sizes = [-(-length // round_to) * round_to for length in lengths]
    if max(sizes) > capacity:
        raise DataError(f"a row has {max(sizes)} tokens (rounded up to {round_to}); a microbatch holds {capacity}")
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    cuts, start = [0], 0
    for place in range(len(order) // ranks):
        longest = sizes[order[place * ranks + ranks - 1]]
        if (place - start + 1) * longest > capacity:
            cuts.append(place)
            start = place
    cuts.append(len(order) // ranks)
    mine = [order[rank::ranks] for rank in range(ranks)]
    bounds = list(itertools.pairwise(cuts))
    bins = [[rows[a:b] for a, b in bounds] for rows in mine]
    loads = [[len(rows) * max(sizes[i] for i in rows) for rows in of_rank] for of_rank in bins]
    return _build(meta, bins, loads, round_to)


def shard_rows(meta: BatchMeta, ranks: int) -> Sharding:
    """Equally many rows a rank, consecutive ones, in one microbatch. Errors: DataError unless they divide evenly."""
    lengths = _lengths(meta, ranks)
    if len(lengths) % ranks:
        raise DataError(f"{len(lengths)} rows do not divide evenly over {ranks} ranks")
    each = len(lengths) // ranks
    rows = [[list(range(rank * each, (rank + 1) * each))] for rank in range(ranks)]
    return _build(meta, rows, [[sum(lengths[i] for i in bins[0])] for bins in rows], 1)


def _lengths(meta: BatchMeta, ranks: int) -> tuple[int, ...]:
    if ranks < 1:
        raise DataError(f"a batch is sharded over at least 1 rank, found {ranks}")
    if not len(meta):
        raise DataError(f"batch of {meta.partition!r}: no rows to shard")
    if meta.lengths is None:
        raise DataError(f"batch of {meta.partition!r}: sharding needs the lengths of its rows")
    return meta.lengths


def _build(meta: BatchMeta, bins: list[Bins], loads: list[list[int]], round_to: int) -> Sharding:
    shards = []
    # The row of the batch at each place of the shards laid end to end.
    order: list[int] = []
    for of_rank, tokens in zip(bins, loads, strict=True):
        rows = [index for members in of_rank for index in members]
        ends = np.cumsum([0, *(len(members) for members in of_rank)]).tolist()
        shards.append(Shard(meta.subset(rows), tuple(itertools.pairwise(ends)), tuple(tokens)))
        order += rows
    inverse: Int64Array = np.empty(len(order), np.int64)
    inverse[np.array(order, np.int64)] = np.arange(len(order))
    return Sharding(tuple(shards), inverse, meta.pad_target(round_to))
