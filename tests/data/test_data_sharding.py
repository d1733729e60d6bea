"""Packing into bins and sharding over ranks: every row once, equal counts, capacities kept, the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.data.batch_meta import BatchMeta, Tags
from asyncrl.data.sharding import Sharding, pack_bins, shard_packed, shard_padded, shard_rows
from asyncrl.errors import DataError

PACKERS = ["balanced", "first_fit", "in_order"]


def batch(lengths: list[int]) -> BatchMeta:
    ids = tuple(f"r{i}" for i in range(len(lengths)))
    return BatchMeta("p", ids, lengths=tuple(lengths), tags=tuple(Tags({"row": i}) for i in range(len(lengths))))


def rounded(length: int, to: int) -> int:
    return -(-length // to) * to


# -- bins ----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    capacity=st.integers(40, 90),
    packer=st.sampled_from(PACKERS),
    round_to=st.sampled_from([1, 4, 8]),
    min_bins=st.integers(1, 5),
    multiple=st.integers(1, 5),
    empty=st.booleans(),
)
def test_every_index_is_in_one_bin_within_capacity_and_the_number_of_bins_is_as_asked(
    lengths: list[int], capacity: int, packer: Any, round_to: int, min_bins: int, multiple: int, empty: bool
) -> None:
    wanted = dict(packer=packer, round_to=round_to, min_bins=min_bins, bins_multiple=multiple)
    try:
        bins = pack_bins(lengths, capacity, allow_empty=empty, **wanted)  # type: ignore[arg-type]
    except DataError as error:
        assert not empty and "cannot fill" in str(error)
        with_empty = pack_bins(lengths, capacity, allow_empty=True, **wanted)  # type: ignore[arg-type]
        assert len(lengths) < len(with_empty)
        return
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert len(bins) % multiple == 0 and len(bins) >= min_bins
    assert all(sum(rounded(lengths[i], round_to) for i in members) <= capacity for members in bins)
    assert empty or all(bins)
    fewest = pack_bins(lengths, capacity, packer="in_order", round_to=round_to, allow_empty=True)
    if packer == "in_order" and len(bins) == len(fewest):
        assert [index for members in bins for index in members] == list(range(len(lengths)))


def test_balanced_bins_are_level_and_no_more_than_first_fit_needs() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]
    first_fit, balanced = (pack_bins(lengths, 24, packer=packer) for packer in ("first_fit", "balanced"))
    loads = [sum(lengths[i] for i in members) for members in balanced]
    assert len(balanced) == len(first_fit) == 2 and loads == [24, 24]
    four = pack_bins(lengths, 24, bins_multiple=4)
    assert sorted(sum(lengths[i] for i in members) for members in four) == [12, 12, 12, 12]


def test_where_levelling_does_not_fit_first_fits_bins_stay() -> None:
    """Longest into the emptiest: 8 + 5 and 7 + 5, and the last 5 fits nowhere. First fit: 8 + 7 and 5 + 5 + 5."""
    assert pack_bins([8, 7, 5, 5, 5], 15) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(lengths=[3, 11], capacity=10), "sequence 1 has 11 tokens"),
        (dict(lengths=[9], capacity=10, round_to=8), r"9 tokens \(16 rounded up\)"),
        (dict(lengths=[1, 1], capacity=10, bins_multiple=3), "2 sequences cannot fill 3 bins"),
        (dict(lengths=[], capacity=10), "0 sequences cannot fill 1 bins"),
        (dict(lengths=[1], capacity=0), "at least 1"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        pack_bins(**arguments)


# -- ranks ---------------------------------------------------------------------------------------------------------


def check(sharding: Sharding, meta: BatchMeta, capacity: int | None = None) -> None:
    rows = [row for shard in sharding.shards for row in shard.meta.ids]
    assert sorted(rows) == sorted(meta.ids)
    assert len({len(shard.microbatches) for shard in sharding.shards}) == 1
    for shard in sharding.shards:
        starts, stops = [a for a, _ in shard.microbatches], [b for _, b in shard.microbatches]
        assert starts == [0, *stops[:-1]] and stops[-1] == len(shard.meta)
        assert len(shard.tokens) == len(shard.microbatches)
        assert capacity is None or all(tokens <= capacity for tokens in shard.tokens)
        for row, length, tag in zip(shard.meta.ids, shard.meta.lengths or (), shard.meta.tags or (), strict=True):
            index = int(row[1:])
            assert length == (meta.lengths or ())[index] and tag["row"] == index
    assert sharding.restore([shard.meta.ids for shard in sharding.shards]) == list(meta.ids)
    assert np.array(rows)[sharding.inverse].tolist() == list(meta.ids)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    packer=st.sampled_from(PACKERS),
    round_to=st.sampled_from([1, 8]),
    data=st.data(),
)
def test_shards_hold_every_row_once_in_equal_counts_and_the_way_back_is_right(
    lengths: list[int], ranks: int, packer: Any, round_to: int, data: st.DataObject
) -> None:
    meta = batch(lengths)
    empty = data.draw(st.booleans())
    try:
        sharding = shard_packed(meta, ranks, 64, packer=packer, round_to=round_to, allow_empty=empty)
    except DataError as error:
        assert "cannot fill" in str(error) and not empty
    else:
        check(sharding, meta, 64)
        for shard in sharding.shards:
            for (start, stop), tokens in zip(shard.microbatches, shard.tokens, strict=True):
                assert tokens == sum(rounded(n, round_to) for n in (shard.meta.lengths or ())[start:stop])
        assert sharding.pad_to == rounded(max(lengths), round_to)
    assume(len(lengths) % ranks == 0)
    check(shard_rows(meta, ranks), meta)
    padded = shard_padded(meta, ranks, 64, round_to=round_to)
    check(padded, meta, 64)
    for shard in padded.shards:
        for (start, stop), tokens in zip(shard.microbatches, shard.tokens, strict=True):
            longest = max(rounded(n, round_to) for n in (shard.meta.lengths or ())[start:stop])
            assert tokens == (stop - start) * longest


def test_rounds_and_ranks_are_level() -> None:
    rng = np.random.default_rng(0)
    meta = batch(rng.integers(20, 200, 256).tolist())
    sharding = shard_packed(meta, 4, 2048)
    totals = [sum(shard.tokens) for shard in sharding.shards]
    assert max(totals) - min(totals) <= 0.01 * max(totals)
    for work in zip(*(shard.tokens for shard in sharding.shards), strict=True):
        assert max(work) - min(work) <= 0.05 * max(work)


def test_what_cannot_be_sharded_is_refused() -> None:
    for call, words in (
        (lambda: shard_rows(batch([1, 2, 3]), 2), "3 rows do not divide evenly over 2 ranks"),
        (lambda: shard_padded(batch([1, 2, 3]), 2, 10), "do not divide evenly"),
        (lambda: shard_padded(batch([1, 20]), 2, 10), "a row has 20 tokens"),
        (lambda: shard_packed(batch([1, 20]), 2, 10), "sequence 1 has 20 tokens"),
        (lambda: shard_rows(batch([1]).slice(0, 0), 1), "no rows to shard"),
        (lambda: shard_rows(BatchMeta("p", ("a",)), 1), "needs the lengths"),
        (lambda: shard_rows(batch([1]), 0), "at least 1 rank"),
        (lambda: shard_rows(batch([1, 1]), 2).restore([["a"], []]), "rank 1 brought 0 rows back; its shard has 1"),
    ):
        with pytest.raises(DataError, match=words):
            call()
