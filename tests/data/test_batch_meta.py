"""Batch metadata: pure, checked at construction, nothing shared. Its rows in bins and over ranks, each once and within capacity."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.data.batch_meta import BatchMeta, Tags
from asyncrl.data.sharding import Sharding, pack_bins, shard_packed, shard_padded, shard_rows
from asyncrl.errors import DataError


def batch(rows: int, start: int = 0, **settings: Any) -> BatchMeta:
    values: dict[str, Any] = {
        "partition": "rollout",
        "ids": tuple(f"r{start + i}" for i in range(rows)),
        "fields": ("tokens", "mask"),
        "lengths": tuple(10 * (start + i) for i in range(rows)),
        "tags": tuple(Tags({"row": start + i}) for i in range(rows)),
    }
    return BatchMeta(**{**values, **settings})


def rows(meta: BatchMeta) -> list[tuple[str, int, int]]:
    assert meta.lengths is not None and meta.tags is not None
    return [(i, n, tag["row"]) for i, n, tag in zip(meta.ids, meta.lengths, meta.tags, strict=True)]  # type: ignore[misc]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_keep_their_columns_through_any_chain_of_operations(data: st.DataObject) -> None:
    """Against a list of rows."""
    count = data.draw(st.integers(1, 8))
    meta, model = batch(count), [(f"r{i}", 10 * i, i) for i in range(count)]
    added = count
    for _ in range(data.draw(st.integers(0, 6))):
        match data.draw(st.sampled_from(["subset", "slice", "drop", "concat"])):
            case "subset":
                order = data.draw(st.lists(st.integers(0, len(model) - 1), unique=True)) if model else []
                meta, model = meta.subset(order), [model[i] for i in order]
            case "slice":
                a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(model))] * 2)))
                meta, model = meta.slice(a, b), model[a:b]
            case "drop":
                gone = data.draw(st.sets(st.integers(0, len(model) - 1))) if model else set()
                rest = meta.drop(gone)
                model = [row for i, row in enumerate(model) if i not in gone]
                if rest is None:
                    assert model == []
                    return
                meta = rest
            case _:
                more = data.draw(st.integers(0, 3))
                meta = BatchMeta.concat([meta, batch(more, added)])
                model += [(f"r{added + i}", 10 * (added + i), added + i) for i in range(more)]
                added += more
        assert rows(meta) == model and meta.fields == ("tokens", "mask") and len(meta) == len(model)


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"lengths": (1,)}, "1 lengths for 2 rows"),
        ({"tags": (Tags(),) * 3}, "3 tags for 2 rows"),
        ({"lengths": (1, -1)}, "a length is -1; expected 0 or more"),
        ({"ids": ("a", "a")}, r"\['a'\] occur more than once"),
        ({"ids": "ab"}, "single string"),
        ({"fields": "tokens"}, "single string"),
        ({"tags": ({"x": [1]}, {})}, "tag 'x' has a value of type list"),
        ({"tags": ({1: 2}, {})}, "tag 1"),
    ],
)
def test_construction_refuses_what_does_not_fit(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        batch(2, **bad)


def test_nothing_is_shared_and_nothing_can_be_changed() -> None:
    lengths, tag = [1, 2], {"row": 0}
    meta = BatchMeta("p", ["a", "b"], ["x"], lengths, [tag, {}])  # type: ignore[arg-type]
    lengths[0], tag["row"] = 99, 99
    child = meta.subset([0])
    stamped = child.with_tags([{"row": 5, "new": 1}])
    assert meta.lengths == (1, 2) and meta.tags is not None and meta.tags[0] == {"row": 0}
    assert child.tags == ({"row": 0},) and stamped.tags == ({"row": 5, "new": 1},)
    with pytest.raises(TypeError):
        meta.tags[0]["row"] = 1  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        meta.ids = ()  # type: ignore[misc]
    assert len({hash(meta), hash(batch(2))}) == 2 and hash(meta) == hash(pickle.loads(pickle.dumps(meta)))
    assert pickle.loads(pickle.dumps(stamped)) == stamped


def test_concat_keeps_what_every_batch_knows() -> None:
    a, b = batch(2), batch(1, 2, fields=("mask", "rewards"), lengths=None)
    both = BatchMeta.concat([a, b])
    assert both.ids == ("r0", "r1", "r2") and both.fields == ("mask",) and both.lengths is None
    assert both.tags == ({"row": 0}, {"row": 1}, {"row": 2})
    assert BatchMeta.concat([a, batch(1, 2, tags=None)]).tags is None
    with pytest.raises(DataError, match="batches of the partitions"):
        BatchMeta.concat([a, batch(1, 2, partition="other")])
    with pytest.raises(DataError, match="more than once"):
        BatchMeta.concat([a, a])
    with pytest.raises(DataError, match="an empty list of batches"):
        BatchMeta.concat([])


def test_the_length_to_pad_to_is_that_of_these_rows() -> None:
    meta = batch(4)  # lengths 0, 10, 20, 30
    assert meta.pad_target() == 30 and meta.pad_target(8) == 32 and meta.pad_target(8, 64) == 64
    assert meta.slice(0, 2).pad_target(8) == 16
    assert BatchMeta.concat([meta.slice(0, 2), batch(1, 5)]).pad_target(8) == 56
    assert meta.slice(0, 0).pad_target(8) == 0
    with pytest.raises(DataError, match="needs lengths, found None"):
        batch(1, lengths=None).pad_target()


def test_fields_are_added_in_order_once() -> None:
    meta = batch(1)
    assert meta.with_fields("advantages", "mask", "old").fields == ("tokens", "mask", "advantages", "old")
    assert meta.fields == ("tokens", "mask")


def test_bad_rows_are_index_errors() -> None:
    meta = batch(3)
    for bad in (lambda: meta.subset([3]), lambda: meta.subset([-1]), lambda: meta.drop([3]), lambda: meta.slice(2, 1)):
        with pytest.raises(IndexError, match="3 rows"):
            bad()
    with pytest.raises(DataError, match="more than once"):
        meta.subset([0, 0])
    with pytest.raises(DataError, match="1 tags for 3 rows"):
        meta.with_tags([{}])


# -- sharding ------------------------------------------------------------------------------------------------------

PACKERS = ["balanced", "first_fit", "in_order"]


def of_lengths(lengths: list[int]) -> BatchMeta:
    return batch(len(lengths), lengths=tuple(lengths))


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
        (dict(lengths=[1], capacity=0), "must be at least 1; found 0, 1, 1 and 1"),
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
    meta = of_lengths(lengths)
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
    meta = of_lengths(rng.integers(20, 200, 256).tolist())
    sharding = shard_packed(meta, 4, 2048)
    totals = [sum(shard.tokens) for shard in sharding.shards]
    assert max(totals) - min(totals) <= 0.01 * max(totals)
    for work in zip(*(shard.tokens for shard in sharding.shards), strict=True):
        assert max(work) - min(work) <= 0.05 * max(work)


def test_what_cannot_be_sharded_is_refused() -> None:
    for call, words in (
        (lambda: shard_rows(of_lengths([1, 2, 3]), 2), "3 rows do not divide evenly over 2 ranks"),
        (lambda: shard_padded(of_lengths([1, 2, 3]), 2, 10), "do not divide evenly"),
        (lambda: shard_padded(of_lengths([1, 20]), 2, 10), "a row has 20 tokens"),
        (lambda: shard_packed(of_lengths([1, 20]), 2, 10), "sequence 1 has 20 tokens"),
        (lambda: shard_rows(of_lengths([1]).slice(0, 0), 1), "no rows to shard"),
        (lambda: shard_rows(BatchMeta("p", ("a",)), 1), "needs the lengths"),
        (lambda: shard_rows(of_lengths([1]), 0), "at least 1 rank"),
        (
            lambda: shard_rows(of_lengths([1, 1]), 2).restore([["a"], []]),
            "rank 1 gave 0 results for 1 rows of its shard",
        ),
    ):
        with pytest.raises(DataError, match=words):
            call()
