"""The forms of a column. Columns travel without padding; `materialize` pads them, with the values that its caller names.

    form     a column of N rows                                          a row
    JAGGED   `Jagged`, or a list of arrays                               an array [L_i, ...]; rows differ in L_i
    DENSE    an array [N, a, ...]                                        an array [a, ...]
    SCALAR   an array [N]                                                a number
    OBJECT   an object or string array [N], or a list of anything else   anything: text, None, messages

Numbers come in arrays: a list of numbers is a column of objects. Rows are copied in and out; a stored array is
read-only. Lists, dicts, sets and tuples are copied with what they hold; any other object is passed on as it is.

Shape legend: N rows, L_i length of row i, W width of a padded column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.types import Int64Array

# Columns in which 0 is a value need another padding. The id of the pad token depends on the tokenizer, so callers must name it.
DEFAULT_PADS: dict[str, float] = {"versions": -1, "routed_experts": -1}
NAMED_PADS = frozenset({"tokens"})


class ColumnForm(StrEnum):
    """The form of a column; the module docstring has the table."""

    JAGGED = "jagged"
    DENSE = "dense"
    SCALAR = "scalar"
    OBJECT = "object"


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """N rows of different lengths, end to end. `values` [sum L_i, ...]; `offsets` [N + 1], row i is offsets[i:i + 2]."""

    values: npt.NDArray[Any]
    offsets: Int64Array

    def __post_init__(self) -> None:
        offsets = self.offsets
        if offsets.ndim != 1 or offsets.size < 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise DataError("jagged column: offsets begin with 0 and never fall")
        if self.values.ndim < 1 or self.values.shape[0] != offsets[-1]:
            raise DataError(f"jagged column: values {self.values.shape} for offsets that end at {int(offsets[-1])}")

    @classmethod
    def from_rows(cls, rows: Sequence[npt.NDArray[Any]]) -> Jagged:
        """Copies. Errors: DataError unless rows agree in dtype and in every dimension but the first."""
        if not rows:
            return cls(np.zeros(0, np.float32), np.zeros(1, np.int64))
        check_rows_agree(rows)
        return cls(np.concatenate(rows), np.cumsum([0, *(row.shape[0] for row in rows)], dtype=np.int64))

    @property
    def lengths(self) -> Int64Array:
        """[N] the length of each row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a jagged column of {len(self)} rows")
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: Iterable[int]) -> Jagged:
        """These rows, in this order, copied."""
        rows = [self[int(index)] for index in indices]
        return Jagged.from_rows(rows) if rows else Jagged(self.values[:0], np.zeros(1, np.int64))

    def pad(self, value: float, width: int = 0) -> npt.NDArray[Any]:
        """[N, W, ...] with `value` on the right. W is the larger of `width` and the length of the longest row."""
        lengths = self.lengths
        columns = max(int(lengths.max(initial=0)), width)
        padded = np.full((len(self), columns, *self.values.shape[1:]), value, self.values.dtype)
        if self.values.shape[0]:
            padded[np.arange(columns) < lengths[:, None]] = self.values
        return padded


def check_rows_agree(rows: Sequence[npt.NDArray[Any]]) -> None:
    """Errors: DataError unless the rows differ in nothing but their length."""
    dtype, inner = rows[0].dtype, rows[0].shape[1:]
    if rows[0].ndim < 1 or any(row.dtype != dtype or row.shape[1:] != inner for row in rows):
        found = sorted({f"{row.dtype}{list(row.shape)}" for row in rows})
        raise DataError(f"jagged column: rows differ in more than their length: {found[:4]}")


Column: TypeAlias = npt.NDArray[Any] | Jagged
Columns: TypeAlias = dict[str, Column]


def trim(values: npt.NDArray[Any], lengths: Sequence[int], name: str = "column") -> Jagged:
    """A padded array [N, W, ...] as jagged rows of these lengths; what lies behind a row's length is padding.

    Errors: DataError if N is not the number of lengths, or W is less than the longest row: that would cut tokens off.
    """
    if values.ndim < 2 or values.shape[0] != len(lengths):
        raise DataError(f"{name}: expected [{len(lengths)}, width, ...], found {list(values.shape)}")
    longest = max(lengths, default=0)
    if values.shape[1] < longest:
        raise DataError(f"{name}: {values.shape[1]} columns for rows of up to {longest} tokens; nothing may be cut off")
    counts = np.asarray(lengths, dtype=np.int64)
    keep = np.arange(values.shape[1]) < counts[:, None]
    return Jagged(values[keep], np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def materialize(
    columns: Mapping[str, Column], pads: Mapping[str, float], *, lengths: Sequence[int] | None = None, pad_to: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """The columns as arrays. A jagged column is padded on the right to its longest row; other columns are not changed.

    pads: the padding by column name. For other columns the padding is in DEFAULT_PADS, or is 0. Columns of NAMED_PADS must
    be in `pads` (DataError). lengths, pad_to: a jagged column whose rows have exactly these lengths holds a value per token.
    Such columns are padded to at least `pad_to`, so that all shards of a batch have one shape (`BatchMeta.pad_target`).
    """
    padded: dict[str, npt.NDArray[Any]] = {}
    for name, column in columns.items():
        if not isinstance(column, Jagged):
            padded[name] = column
            continue
        if name in NAMED_PADS and name not in pads:
            raise DataError(f"padding column {name!r} needs its value by name, as in pads={{{name!r}: pad_token_id}}")
        per_token = lengths is not None and column.lengths.tolist() == list(lengths)
        padded[name] = column.pad(pads.get(name, DEFAULT_PADS.get(name, 0)), pad_to if per_token else 0)
    return padded


# -- rows ----------------------------------------------------------------------------------------------------------


def split(column: Any, rows: int, name: str) -> tuple[ColumnForm, list[Any]]:
    """The form of a column and its rows, not yet copied. Errors: TypeError; DataError unless it has `rows` rows."""
    form = _form(column, name)
    if len(column) != rows:
        raise DataError(f"column {name!r} has {len(column)} rows for {rows} ids; one each")
    return form, column.tolist() if form is ColumnForm.OBJECT and isinstance(column, np.ndarray) else list(column)


def _form(column: Any, name: str) -> ColumnForm:
    if isinstance(column, Jagged):
        return ColumnForm.JAGGED
    if isinstance(column, np.ndarray):
        if column.ndim == 1 and column.dtype.kind in "OUS":
            return ColumnForm.OBJECT
        if column.dtype.kind in "biuf" and column.ndim >= 1:
            return ColumnForm.SCALAR if column.ndim == 1 else ColumnForm.DENSE
        raise TypeError(
            f"column {name!r} is an array {column.dtype}{list(column.shape)}; expected numbers, or objects [N]"
        )
    if isinstance(column, (list, tuple)):
        arrays = [row for row in column if isinstance(row, np.ndarray)]
        if not column or len(arrays) < len(column):
            return ColumnForm.OBJECT
        if any(row.ndim < 1 or row.dtype.kind not in "biuf" for row in arrays):
            raise TypeError(
                f"column {name!r} is a list of arrays; each row must hold numbers and have a first dimension"
            )
        return ColumnForm.JAGGED
    raise TypeError(
        f"column {name!r} is a {type(column).__module__}.{type(column).__name__}; expected a numpy array, a Jagged column "
        "or a list (a tensor as tensor.cpu().numpy())"
    )


def stored_copy(form: ColumnForm, row: Any) -> Any:
    """The row as a store keeps it: a copy, in which arrays are read-only."""
    if form is ColumnForm.OBJECT:
        return clone(row)
    if form is ColumnForm.SCALAR:
        return row  # a numpy scalar: immutable
    copy = np.array(row, order="C")
    copy.setflags(write=False)
    return copy


def join(form: ColumnForm, rows: Sequence[Any], name: str) -> Column:
    """A column of rows that `stored_copy` made; copies. Errors: DataError where dense rows have different shapes."""
    if form is ColumnForm.OBJECT:
        column = np.empty(len(rows), dtype=object)  # np.array() would turn a list into a dimension
        for index, row in enumerate(rows):
            column[index] = clone(row)
        return column
    if form is ColumnForm.JAGGED:
        return Jagged.from_rows(rows)
    shapes = sorted({np.shape(row) for row in rows})
    if len(shapes) > 1:
        raise DataError(
            f"column {name!r} has rows of the shapes {shapes[:4]}: put it as a list of arrays, or get fewer rows"
        )
    return np.array(rows) if rows else np.zeros(0, np.float32)


def clone(value: Any) -> Any:
    """A copy of a container with what it holds; a value that is no container is passed on as it is."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and type(value) in (list, tuple, set, frozenset):
        return type(value)(clone(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def nbytes(row: Any) -> int:
    """Bytes of a row's contents: arrays and numbers exactly, text and containers by what they hold, other objects 8."""
    if isinstance(row, (np.ndarray, np.generic)):
        return int(row.nbytes)
    if isinstance(row, (str, bytes)):
        return len(row)
    if isinstance(row, dict):
        return sum(nbytes(key) + nbytes(item) for key, item in row.items())
    if isinstance(row, (list, tuple, set, frozenset)):
        return sum(nbytes(item) for item in row)
    return 8
