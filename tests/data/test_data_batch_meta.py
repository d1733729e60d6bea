"""Batch metadata: pure, checked at construction, nothing shared."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.batch_meta import BatchMeta, Tags
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
        ({"lengths": (1, -1)}, "negative length -1"),
        ({"ids": ("a", "a")}, r"\['a'\] occur more than once"),
        ({"ids": "ab"}, "single string"),
        ({"fields": "tokens"}, "single string"),
        ({"tags": ({"x": [1]}, {})}, "tag 'x' is a list"),
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
    with pytest.raises(DataError, match="different partitions"):
        BatchMeta.concat([a, batch(1, 2, partition="other")])
    with pytest.raises(DataError, match="more than once"):
        BatchMeta.concat([a, a])
    with pytest.raises(DataError, match="no batches"):
        BatchMeta.concat([])


def test_the_length_to_pad_to_is_that_of_these_rows() -> None:
    meta = batch(4)  # lengths 0, 10, 20, 30
    assert meta.pad_target() == 30 and meta.pad_target(8) == 32 and meta.pad_target(8, 64) == 64
    assert meta.slice(0, 2).pad_target(8) == 16
    assert BatchMeta.concat([meta.slice(0, 2), batch(1, 5)]).pad_target(8) == 56
    assert meta.slice(0, 0).pad_target(8) == 0
    with pytest.raises(DataError, match="needs the lengths"):
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
