"""Splits a batch into microbatches of about equal work, equally many for each rank, and restores the order of results.

    batch --pack_bins--> bins of sequences --shard--> rank 0: microbatch 0, 1, ...      every rank: the same number
                                                      rank 1: microbatch 0, 1, ...
    results of all ranks, concatenated --restore--> results in the order of the batch

All ranks must have the same number of microbatches. With sharded parameters every microbatch runs a collective. A rank with
fewer microbatches would start the collective at the end of the step while other ranks wait in the collective of a
microbatch. All ranks would then hang until the watchdog ends the run.

Guarantees: Every row is in exactly one microbatch of one rank. No microbatch has more tokens than its capacity. All ranks
pad to the same length, which fits the longest row of the batch.

Shapes: N rows of a batch, K microbatches of a rank.
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
    """The rows of one rank in the order of its microbatches. `microbatches` [K]: (start, stop) rows of `meta`."""

    meta: BatchMeta
    microbatches: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]  # [K] tokens that count against the capacity


@dataclass(frozen=True, slots=True)
class Sharding:
    """One shard per rank. Row i of the batch is row `inverse[i]` ([N]) of the concatenated shards.

    `pad_to`: length in tokens to which every rank pads its rows."""

    shards: tuple[Shard, ...]
    inverse: Int64Array
    pad_to: int

    def restore(self, results: Sequence[Sequence[T]]) -> list[T]:
        """Results in the order of the batch. `results`: for each rank one result per row of its shard.

        Errors: DataError if a rank has another number of results than its shard has rows.
        """
        for rank, (rank_results, shard) in enumerate(zip(results, self.shards, strict=True)):
            if len(rank_results) != len(shard.meta):
                raise DataError(f"rank {rank} gave {len(rank_results)} results for {len(shard.meta)} rows of its shard")
        joined = [result for rank_results in results for result in rank_results]
        return [joined[i] for i in self.inverse.tolist()]


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
    """Bins of at most `capacity` tokens. Every index of `lengths` is in exactly one bin.

    packer: `first_fit` is first-fit decreasing. `balanced` spreads the sequences evenly over as many bins as `first_fit`
    needs, or falls back to `first_fit`. `in_order` keeps the order, and opens a new bin when the last bin is full.
    round_to: each length is rounded up to a multiple of this number.
    min_bins, bins_multiple: the number of bins is at least `min_bins`, and a multiple of `bins_multiple`.
    allow_empty: bins may be empty if there are too few sequences (a rank runs an empty bin as a microbatch of weight 0).
    Errors: DataError for a sequence longer than `capacity`, or too few sequences for the bins.
    """
    if min(capacity, round_to, min_bins, bins_multiple) < 1:
        raise DataError(
            "capacity, round_to, min_bins and bins_multiple must be at least 1; found "
            f"{capacity}, {round_to}, {min_bins} and {bins_multiple}"
        )
    sizes = [-(-int(length) // round_to) * round_to for length in lengths]  # rounded up
    if sizes and max(sizes) > capacity:
        longest = int(np.argmax(sizes))
        raise DataError(
            f"sequence {longest} has {lengths[longest]} tokens ({sizes[longest]} rounded up); a microbatch holds {capacity}: "
            "raise the tokens per microbatch, or shorten the sequence"
        )
    bins = _in_order(sizes, capacity) if packer == "in_order" else _first_fit(sizes, capacity)
    count = max(len(bins), min_bins)
    count = -(-count // bins_multiple) * bins_multiple  # rounded up
    if len(sizes) < count and not allow_empty:
        raise DataError(
            f"{len(sizes)} sequences cannot fill {count} bins (a multiple of {bins_multiple}); use more sequences or fewer bins"
        )
    if packer == "balanced":
        bins = _balanced(sizes, capacity, count) or bins
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
    room: list[int] = []  # free tokens of each bin
    for index in _longest_first(sizes):
        bin_index = next((i for i, free in enumerate(room) if free >= sizes[index]), None)
        if bin_index is None:
            bin_index = len(bins)
            bins.append([])
            room.append(capacity)
        bins[bin_index].append(index)
        room[bin_index] -= sizes[index]
    return bins


def _balanced(sizes: list[int], capacity: int, count: int) -> Bins | None:
    """Put each sequence, longest first, into the emptiest of `count` bins (ties: fewest sequences). None if the bins are full."""
    bins: Bins = [[] for _ in range(count)]
    loads = [0] * count
    for index in _longest_first(sizes):
        emptiest = min(range(count), key=lambda i: (loads[i], len(bins[i])))
        if loads[emptiest] + sizes[index] > capacity:
            return None
        bins[emptiest].append(index)
        loads[emptiest] += sizes[index]
    return bins


def _raise_count(bins: Bins, sizes: list[int], count: int) -> Bins:
    """Add bins. Each new bin gets the shortest sequence of the fullest bin with two sequences, or stays empty without one."""
    while len(bins) < count:
        candidates = [i for i, indices in enumerate(bins) if len(indices) > 1]
        if not candidates:
            bins.append([])
            continue
        fullest = max(candidates, key=lambda i: sum(sizes[index] for index in bins[i]))
        moved = min(bins[fullest], key=lambda index: sizes[index])
        bins[fullest].remove(moved)
        bins.append([moved])
    return bins


def _longest_first(sizes: list[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


def shard_packed(
    meta: BatchMeta,
    ranks: int,
    capacity: int,
    *,
    packer: Packer = "balanced",
    round_to: int = 1,
    allow_empty: bool = False,
) -> Sharding:
    """Sequence packing: every microbatch is a bin of `pack_bins`. The number of bins is a multiple of `ranks`.

    Bins are sorted by tokens and assigned in rounds of `ranks` bins. In each round the rank with the fewest tokens gets the
    fullest bin. So all ranks have about equal work in each round and in the step. Errors: DataError.
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
    loads = [sum(-(-lengths[i] // round_to) * round_to for i in indices) for indices in bins]
    order = list(range(len(bins)))
    if packer != "in_order":
        order.sort(key=lambda i: -loads[i])
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        totals = [sum(loads[i] for i in rank_bins) for rank_bins in assigned]
        emptiest_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for bin_index, rank in zip(order[start : start + ranks], emptiest_first, strict=True):
            assigned[rank].append(bin_index)
    bins_by_rank = [[bins[i] for i in rank_bins] for rank_bins in assigned]
    return _build(meta, bins_by_rank, [[loads[i] for i in rank_bins] for rank_bins in assigned], round_to)


def shard_padded(meta: BatchMeta, ranks: int, capacity: int, *, round_to: int = 1) -> Sharding:
    """Dynamic batching of padded rows. Rows are sorted by length, so rows of one microbatch have about equal lengths.

    A microbatch costs (number of rows) x (longest row). The longest row of all ranks decides where a microbatch ends, so all
    ranks get the same number of microbatches. Errors: DataError for a number of rows that is no multiple of `ranks`, or a
    row longer than `capacity`.
    """
    lengths = _lengths(meta, ranks)
    if len(lengths) % ranks:
        raise DataError(f"{len(lengths)} rows do not divide evenly over {ranks} ranks; use a multiple of {ranks}")
    sizes = [-(-length // round_to) * round_to for length in lengths]
    if max(sizes) > capacity:
        raise DataError(f"a row has {max(sizes)} tokens (rounded up to {round_to}); raise the capacity of {capacity}")
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    cuts, start = [0], 0
    rows_per_rank = len(order) // ranks
    for row in range(rows_per_rank):
        # Rank r gets every `ranks`-th row from row r on. So the last rank has the longest of the rows with this number.
        longest = sizes[order[row * ranks + ranks - 1]]
        if (row - start + 1) * longest > capacity:
            cuts.append(row)
            start = row
    cuts.append(rows_per_rank)
    bounds = list(itertools.pairwise(cuts))
    rows_by_rank = [order[rank::ranks] for rank in range(ranks)]
    bins = [[rows[start:stop] for start, stop in bounds] for rows in rows_by_rank]
    loads = [[len(rows) * max(sizes[i] for i in rows) for rows in rank_bins] for rank_bins in bins]
    return _build(meta, bins, loads, round_to)


def shard_rows(meta: BatchMeta, ranks: int) -> Sharding:
    """One microbatch of consecutive rows per rank. Errors: DataError if the number of rows is no multiple of `ranks`."""
    lengths = _lengths(meta, ranks)
    if len(lengths) % ranks:
        raise DataError(f"{len(lengths)} rows do not divide evenly over {ranks} ranks; use a multiple of {ranks}")
    count = len(lengths) // ranks
    bins = [[list(range(rank * count, (rank + 1) * count))] for rank in range(ranks)]
    return _build(meta, bins, [[sum(lengths[i] for i in rank_bins[0])] for rank_bins in bins], 1)


def _lengths(meta: BatchMeta, ranks: int) -> tuple[int, ...]:
    if ranks < 1:
        raise DataError(f"sharding needs at least 1 rank, found {ranks}")
    if not len(meta):
        raise DataError(f"batch of {meta.partition!r}: no rows to shard; expected at least one")
    if meta.lengths is None:
        raise DataError(f"batch of {meta.partition!r}: sharding needs the lengths of its rows; set lengths")
    return meta.lengths


def _build(meta: BatchMeta, bins: list[Bins], loads: list[list[int]], round_to: int) -> Sharding:
    shards = []
    # Rows of the batch, in the order of the concatenated shards.
    order: list[int] = []
    for rank_bins, tokens in zip(bins, loads, strict=True):
        rows = [index for indices in rank_bins for index in indices]
        ends = np.cumsum([0, *(len(indices) for indices in rank_bins)]).tolist()
        shards.append(Shard(meta.subset(rows), tuple(itertools.pairwise(ends)), tuple(tokens)))
        order += rows
    inverse: Int64Array = np.empty(len(order), np.int64)
    inverse[np.array(order, np.int64)] = np.arange(len(order))  # the inverse permutation
    return Sharding(tuple(shards), inverse, meta.pad_target(round_to))
