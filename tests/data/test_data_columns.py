"""Columns: jagged and back, padded by name, never cut; objects that stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.columns import ColumnForm, Jagged, clone, join, materialize, nbytes, split, stored_copy, trim
from asyncrl.errors import DataError

lengths_of_rows = st.lists(st.integers(0, 7), max_size=8)


def tokens(lengths: list[int], inner: tuple[int, ...] = ()) -> list[np.ndarray]:
    return [
        100 * i + np.arange(n * int(np.prod(inner)), dtype=np.int32).reshape(n, *inner) for i, n in enumerate(lengths)
    ]


@settings(max_examples=100, deadline=None)
@given(lengths_of_rows, st.sampled_from([(), (2,), (3, 2)]), st.integers(0, 12), st.integers(0, 5))
def test_jagged_padded_and_trimmed_is_the_same(
    lengths: list[int], inner: tuple[int, ...], width: int, extra: int
) -> None:
    rows = tokens(lengths, inner)
    jagged = Jagged.from_rows(rows) if rows else Jagged(np.zeros((0, *inner), np.int32), np.zeros(1, np.int64))
    padded = jagged.pad(-7, width)
    assert padded.shape == (len(rows), max([width, *lengths]), *inner) and padded.dtype == np.int32
    for row, line in zip(rows, padded, strict=True):
        assert np.array_equal(line[: len(row)], row) and (line[len(row) :] == -7).all()
    wider = np.concatenate([padded, np.full((len(rows), extra, *inner), 9, np.int32)], axis=1)
    back = trim(wider, lengths)
    assert back.lengths.tolist() == lengths == jagged.lengths.tolist()
    assert all(np.array_equal(a, b) for a, b in zip(back, rows, strict=True)) and len(list(back)) == len(rows)
    order = list(range(len(rows)))[::-1]
    assert [row.tolist() for row in jagged.take(order)] == [rows[i].tolist() for i in order]


def test_each_column_is_padded_by_its_name_and_tokens_only_with_a_named_value() -> None:
    columns: dict[str, Any] = {
        "tokens": Jagged.from_rows(tokens([2, 3])),
        "mask": Jagged.from_rows([np.ones(2, np.bool_), np.ones(3, np.bool_)]),
        "versions": Jagged.from_rows([np.full(2, 5, np.int32), np.full(3, 6, np.int32)]),
        "routed_experts": Jagged.from_rows([np.ones((2, 2), np.int16), np.ones((3, 2), np.int16)]),
        "images": Jagged.from_rows([np.ones((1, 4), np.float32), np.ones((6, 4), np.float32)]),
        "rewards": np.array([0.5, 1.0]),
    }
    padded = materialize(columns, {"tokens": 99}, lengths=[2, 3], pad_to=5)
    assert padded["tokens"].tolist() == [[0, 1, 99, 99, 99], [100, 101, 102, 99, 99]]
    assert padded["mask"].tolist() == [[True] * 2 + [False] * 3, [True] * 3 + [False] * 2]
    assert padded["versions"][0].tolist() == [5, 5, -1, -1, -1]
    assert padded["routed_experts"][0, 2:].tolist() == [[-1, -1]] * 3
    assert padded["images"].shape == (2, 6, 4)  # not per token: to its own longest row
    assert padded["rewards"] is columns["rewards"]
    assert materialize({"tokens": columns["tokens"]}, {"tokens": 0}, pad_to=2)["tokens"].shape == (2, 3)  # never cut
    with pytest.raises(DataError, match="'tokens' needs its value by name"):
        materialize(columns, {"mask": 0})


def test_nothing_is_cut_off_and_bad_jagged_columns_are_refused() -> None:
    with pytest.raises(DataError, match="3 columns for rows of up to 4 tokens"):
        trim(np.zeros((2, 3)), [4, 1])
    with pytest.raises(DataError, match=r"expected \[2, width"):
        trim(np.zeros((3, 3)), [1, 1])
    with pytest.raises(DataError, match=r"expected \[3, width"):
        trim(np.zeros(3), [1, 1, 1])
    for values, offsets in ((np.zeros(3), [0, 2]), (np.zeros(3), [1, 3]), (np.zeros(2), [0, 3, 2])):
        with pytest.raises(DataError, match="jagged column"):
            Jagged(values, np.array(offsets))
    with pytest.raises(DataError, match="differ in more than their length"):
        Jagged.from_rows([np.zeros(2, np.float32), np.zeros(2, np.int32)])
    with pytest.raises(IndexError, match="of 1 rows"):
        Jagged.from_rows([np.zeros(2)])[1]


@pytest.mark.parametrize(
    "column, form",
    [
        (np.arange(3), ColumnForm.SCALAR),
        (np.array([True, False, True]), ColumnForm.SCALAR),
        (np.zeros((3, 2)), ColumnForm.DENSE),
        (np.zeros((3, 2, 0)), ColumnForm.DENSE),
        ([np.zeros(1), np.zeros(2), np.zeros(0)], ColumnForm.JAGGED),
        (["a", None, "c"], ColumnForm.OBJECT),
        ([[{"role": "user"}], [], {"x": (1, [2])}], ColumnForm.OBJECT),
        (np.array(["a", "b", "c"]), ColumnForm.OBJECT),
        (np.array(["a", None, [1, 2]], object), ColumnForm.OBJECT),
        ([1.0, None, 2], ColumnForm.OBJECT),
    ],
)
def test_every_form_goes_in_and_comes_out_as_it_was(column: Any, form: ColumnForm) -> None:
    found, rows = split(column, 3, "x")
    back = join(form, [stored_copy(form, row) for row in rows], "x")
    assert found is form and len(back) == 3
    for a, b in zip(back, column, strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
    if isinstance(column, np.ndarray) and form is not ColumnForm.OBJECT:
        assert isinstance(back, np.ndarray) and back.dtype == column.dtype and back.shape == column.shape
    if form is ColumnForm.OBJECT:
        assert isinstance(back, np.ndarray) and back.dtype == object and back.shape == (3,)


@pytest.mark.parametrize(
    "column, words",
    [
        (3.0, "builtins.float"),
        ("abc", "builtins.str"),
        ({"a": 1}, "builtins.dict"),
        (np.zeros((2, 2), object), "expected numbers, or objects"),
        (np.array(["2026-01-01"], "datetime64[D]"), "expected numbers, or objects"),
        ([np.float64(1), np.zeros(())][1:], "a first dimension"),
        (np.float32(1), "numpy.float32"),
    ],
)
def test_other_types_are_refused_by_name(column: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        split(column, 1, "x")


def test_a_tensor_is_refused_with_what_to_do() -> None:
    import torch

    with pytest.raises(TypeError, match=r"torch\.Tensor; .* tensor\.cpu\(\)\.numpy\(\)"):
        split(torch.zeros(2), 2, "x")


def test_copies_share_nothing_and_sizes_count_contents() -> None:
    value = {"a": [1, {"b": np.zeros(2)}], "c": ({"x"},)}
    copy = clone(value)
    value["a"][1]["b"][0] = 5
    value["a"].append(3)
    assert copy["a"][1]["b"].tolist() == [0, 0] and len(copy["a"]) == 2 and copy["c"] == ({"x"},)
    assert nbytes(np.zeros(3, np.float32)) == 12 and nbytes(np.float16(1)) == 2
    assert nbytes({"ab": ["cde", b"f"]}) == 6 and nbytes(None) == 8
    kept = stored_copy(ColumnForm.JAGGED, np.arange(3)[::-1])
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
