"""One partition of the column store: its rows, what it knows of its columns, and the cursors of its tasks.

Every change is checked and copied first (`prepare`) and then made in a few steps that cannot fail (`commit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError

from .batch_meta import BatchMeta, Scalar, Tags
from .columns import Column, Form, Jagged, check_rows_agree, join, keep, nbytes, split, trim


class StoreFull(DataError):
    """A put would exceed the capacity of its partition. Nothing was put and nothing cleared: try again after a clear."""


@dataclass(frozen=True, slots=True)
class Field:
    """A declared column. `per_token`: one entry a token of the row; padded input [N, W, ...] is cut to the lengths."""

    name: str
    per_token: bool = False
    dtype: str | None = None


@dataclass(slots=True)
class _Row:
    values: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    length: int | None = None
    tags: Tags | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """A put that was checked and copied: what is left to do cannot fail."""

    ids: tuple[str, ...]
    values: dict[str, list[Any]]  # by column, a value a row
    forms: dict[str, tuple[Form, npt.DTypeLike]]
    lengths: Sequence[int] | None
    tags: list[Tags] | None
    growth: list[int]  # bytes, by row
    bytes: int  # that were written


class Partition:
    def __init__(
        self,
        name: str,
        fields: Sequence[Field] = (),
        tasks: Sequence[str] = (),
        max_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.declaration = (tuple(fields), tuple(tasks), max_rows, max_bytes)
        self._fields = {declared.name: declared for declared in fields}
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._forms: dict[str, tuple[Form, npt.DTypeLike]] = {}
        self._rows: dict[str, _Row] = {}  # in the order of their first put
        self._consumed: dict[str, set[str]] = {task: set() for task in tasks}
        self.bytes = 0
        self.largest_row = 0  # bytes, ever

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def ids(self) -> tuple[str, ...]:
        return tuple(self._rows)

    # -- in ----------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        ids: Sequence[str],
        columns: Mapping[str, Any],
        lengths: Sequence[int] | None,
        tags: Sequence[Mapping[str, Scalar]] | None,
    ) -> Put:
        """Changes nothing. Errors: DataError, TypeError, StoreFull."""
        if isinstance(ids, str) or len(set(ids)) != len(ids):
            raise DataError(f"put into {self.name!r}: ids are a sequence of different names")
        for what, entries in (("lengths", lengths), ("tags", tags)):
            if entries is not None and len(entries) != len(ids):
                raise DataError(f"put into {self.name!r}: {len(entries)} {what} for {len(ids)} rows; one each")
        lengths = self._lengths(ids, columns, lengths)
        values: dict[str, list[Any]] = {}
        forms: dict[str, tuple[Form, npt.DTypeLike]] = {}
        for name, column in columns.items():
            forms[name], values[name] = self._column(name, column, ids, lengths)
        written = [sum(nbytes(column[i]) for column in values.values()) for i in range(len(ids))]
        growth = [size - self._replaced(name, values) for name, size in zip(ids, written, strict=True)]
        put = Put(
            ids=tuple(ids),
            values=values,
            forms=forms,
            lengths=lengths,
            tags=None if tags is None else [Tags({**self._tags(n), **t}) for n, t in zip(ids, tags, strict=True)],
            growth=growth,
            bytes=sum(written),
        )
        self._check_capacity(put)
        return put

    def _lengths(self, ids: Sequence[str], columns: Mapping[str, Any], given: Sequence[int] | None) -> list[int] | None:
        """Tokens of each row: as given, or of the rows of the first jagged per-token column, or as they were before."""
        known = [row.length if (row := self._rows.get(name)) is not None else None for name in ids]
        found = None if given is None else [int(length) for length in given]
        for name, column in columns.items():
            jagged = isinstance(column, Jagged) or (
                isinstance(column, (list, tuple)) and all(isinstance(row, np.ndarray) for row in column)
            )
            if found is None and jagged and self._per_token(name):
                found = [len(row) for row in column]
        if found is None:
            return None if None in known else [length for length in known if length is not None]
        if len(found) != len(ids) or any(length < 0 for length in found):
            raise DataError(f"put into {self.name!r}: lengths {found[:5]} for {len(ids)} rows; one each, none negative")
        for name, old, new in zip(ids, known, found, strict=True):
            per_token = [column for column in self._fields if self._has(name, column) and self._per_token(column)]
            if old is not None and old != new and not set(per_token) <= set(columns):
                raise DataError(f"row {name!r} of {self.name!r} has {old} tokens; the put says {new}")
        return found

    def _column(
        self, name: str, column: Any, ids: Sequence[str], lengths: list[int] | None
    ) -> tuple[tuple[Form, npt.DTypeLike], list[Any]]:
        """The column's form and dtype, and copies of its rows."""
        where = f"column {name!r} of {self.name!r}"
        declared = self._fields.get(name)
        if self._per_token(name):
            if isinstance(column, np.ndarray) and column.ndim >= 2:
                if lengths is None:
                    raise DataError(f"{where} is padded; put it with the lengths of its rows")
                column = trim(column, lengths, where)
            form, rows = split(column, len(ids), name)
            if form is not Form.JAGGED:
                raise DataError(
                    f"{where} has one entry a token: expected a Jagged column, a list of arrays or [N, width]"
                )
            wrong = [i for i, row in enumerate(rows) if lengths is not None and len(row) != lengths[i]]
            if wrong:
                found, expected = len(rows[wrong[0]]), (lengths or [])[wrong[0]]
                raise DataError(f"{where}: row {ids[wrong[0]]!r} has {found} entries for {expected} tokens; one each")
        else:
            form, rows = split(column, len(ids), name)
        dtype: npt.DTypeLike = object if form is Form.OBJECT or not rows else np.asarray(rows[0]).dtype
        if declared is not None and declared.dtype is not None and rows and dtype != np.dtype(declared.dtype):
            raise DataError(f"{where} is {dtype}; it is declared as {declared.dtype}")
        before = self._forms.get(name)
        if before is not None and rows and before != (form, dtype):
            raise DataError(f"{where} is {form} of {dtype}; before it was {before[0]} of {before[1]}")
        if form is Form.JAGGED and rows:
            check_rows_agree(rows)
        kept = (form, dtype) if before is None or rows else before
        return kept, [keep(form, row) for row in rows]

    def _check_capacity(self, put: Put) -> None:
        rows = len(self._rows) + sum(name not in self._rows for name in put.ids)
        size = self.bytes + sum(put.growth)
        if self._max_rows is not None and rows > self._max_rows:
            raise StoreFull(f"partition {self.name!r} would hold {rows} rows; max_rows is {self._max_rows}")
        if self._max_bytes is not None and size > self._max_bytes:
            raise StoreFull(f"partition {self.name!r} would hold {size} bytes; max_bytes is {self._max_bytes}")

    def commit(self, put: Put) -> None:
        self._forms.update({name: form for name, form in put.forms.items() if put.ids})
        for index, name in enumerate(put.ids):
            row = self._rows.setdefault(name, _Row())
            row.values.update({column: values[index] for column, values in put.values.items()})
            row.bytes += put.growth[index]
            row.length = row.length if put.lengths is None else put.lengths[index]
            row.tags = row.tags if put.tags is None else put.tags[index]
            self.largest_row = max(self.largest_row, row.bytes)
        self.bytes += sum(put.growth)

    # -- out ---------------------------------------------------------------------------------------------------------

    def claim(
        self, task: str, required: Sequence[str], min_rows: int, max_rows: int | None, among: Iterable[str] | None
    ) -> BatchMeta | None:
        consumed = self.consumed(task)
        wanted = None if among is None else set(among)
        ready = [
            name
            for name, row in self._rows.items()
            if name not in consumed
            and (wanted is None or name in wanted)
            and all(column in row.values for column in required)
        ][:max_rows]
        if len(ready) < max(min_rows, 1):
            return None
        consumed.update(ready)
        return self.meta(ready)

    def consumed(self, task: str) -> set[str]:
        """Ids that the task has claimed. KeyError for an unknown task."""
        if task not in self._consumed:
            raise KeyError(
                f"partition {self.name!r} has no task {task!r}; it was registered with {list(self._consumed)}"
            )
        return self._consumed[task]

    def values(self, ids: Sequence[str], name: str) -> list[Any]:
        """The stored values of one column, not copied. KeyError for a row or a column that is not there."""
        self.check_rows(ids)
        missing = [row for row in ids if name not in self._rows[row].values]
        if missing:
            raise KeyError(
                f"column {name!r} of {self.name!r} is not there for {len(missing)} rows, such as {missing[0]!r}"
            )
        return [self._rows[row].values[name] for row in ids]

    def column(self, values: Sequence[Any], name: str) -> Column:
        return join(self._forms[name][0], values, name) if name in self._forms else np.empty(0, object)

    def is_object(self, name: str) -> bool:
        return name in self._forms and self._forms[name][0] is Form.OBJECT

    def meta(self, ids: Sequence[str]) -> BatchMeta:
        """These rows with what all of them have. KeyError for one that is not there."""
        self.check_rows(ids)
        rows = [self._rows[name] for name in ids]
        lengths = [row.length for row in rows if row.length is not None]
        return BatchMeta(
            partition=self.name,
            ids=tuple(ids),
            fields=tuple(c for c in rows[0].values if all(c in row.values for row in rows)) if rows else (),
            lengths=tuple(lengths) if len(lengths) == len(rows) else None,
            tags=tuple(row.tags or Tags() for row in rows) if any(row.tags is not None for row in rows) else None,
        )

    def clear(self, ids: Sequence[str]) -> int:
        """Forget these rows; returns their bytes. KeyError where one is not there: then none is forgotten."""
        self.check_rows(ids)
        freed = sum(self._rows.pop(name).bytes for name in ids)
        self.bytes -= freed
        for consumed in self._consumed.values():
            consumed.difference_update(ids)
        if not self._rows:  # an empty partition has no history: its columns may come back in another form
            self._forms.clear()
        return freed

    def check_rows(self, ids: Iterable[str]) -> None:
        missing = [name for name in ids if name not in self._rows]
        if missing:
            raise KeyError(f"partition {self.name!r} has no rows {missing[:5]}: never put, or cleared")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _per_token(self, name: str) -> bool:
        return name in self._fields and self._fields[name].per_token

    def _has(self, row: str, column: str) -> bool:
        return row in self._rows and column in self._rows[row].values

    def _tags(self, row: str) -> Mapping[str, Scalar]:
        found = self._rows.get(row)
        return {} if found is None or found.tags is None else found.tags

    def _replaced(self, row: str, columns: Iterable[str]) -> int:
        """Bytes of the values that these columns have in the row now."""
        return sum(nbytes(self._rows[row].values[column]) for column in columns if self._has(row, column))
