"""Metadata of a batch: the ids of its rows in the store, their lengths and tags. The rows themselves stay in the store.

    meta.subset([2, 0])   meta.slice(0, 4)   BatchMeta.concat([a, b])   meta.drop([1])   meta.with_fields("advantages")

Every operation is pure, and its result passes the checks of the constructor. Batches can share ids, lengths and tags
safely, because all of these are immutable. The length to pad to is computed on demand: a stored value would be wrong
after a concat or a subset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from asyncrl.errors import DataError

Scalar: TypeAlias = str | int | float | bool | None


class Tags(Mapping[str, Scalar]):
    """The tags of one row: an immutable mapping of names to plain values. Hashable, picklable."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Scalar] | Iterable[tuple[str, Scalar]] = ()) -> None:
        self._items = dict(items)
        for name, value in self._items.items():
            if not isinstance(name, str) or not isinstance(value, Scalar):
                raise DataError(
                    f"tag {name!r} has a value of type {type(value).__name__}; a tag is a string with a plain value "
                    "(str, int, float, bool or None)"
                )

    def __getitem__(self, name: str) -> Scalar:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Tags({self._items})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tags, (dict(self._items),)


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """The metadata of rows of one partition of the store.

    `fields`: the columns that every row of the batch has, in the order in which they were written.
    `lengths` (tokens) and `tags`: one entry per row, or None where some rows have no length or no tags.
    Errors: DataError at construction, for a repeated id, a negative length, or another number of entries than of ids.
    """

    partition: str
    ids: tuple[str, ...]
    fields: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    tags: tuple[Tags, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ids, str) or isinstance(self.fields, str):
            raise DataError("batch: ids and fields must be lists of names; found a single string")
        # A frozen dataclass refuses a plain assignment.
        assign = object.__setattr__
        assign(self, "ids", tuple(self.ids))
        assign(self, "fields", tuple(dict.fromkeys(self.fields)))
        if len(set(self.ids)) != len(self.ids):
            repeated = sorted({row_id for row_id in self.ids if self.ids.count(row_id) > 1})
            raise DataError(f"batch of {self.partition!r}: the ids {repeated[:5]} occur more than once; expected once")
        for name, entries in (("lengths", self.lengths), ("tags", self.tags)):
            if entries is not None and len(entries) != len(self.ids):
                raise DataError(
                    f"batch of {self.partition!r}: {len(entries)} {name} for {len(self.ids)} rows; "
                    f"give {name} one entry per row, or None"
                )
        if self.lengths is not None:
            assign(self, "lengths", tuple(int(length) for length in self.lengths))
            if any(length < 0 for length in self.lengths):
                raise DataError(f"batch of {self.partition!r}: a length is {min(self.lengths)}; expected 0 or more")
        if self.tags is not None:
            assign(self, "tags", tuple(tag if isinstance(tag, Tags) else Tags(tag) for tag in self.tags))

    def __len__(self) -> int:
        return len(self.ids)

    def subset(self, indices: Iterable[int]) -> BatchMeta:
        """The rows with these numbers, in this order. IndexError for a number out of range, DataError for a repeated number."""
        chosen = [self._row_number(index) for index in indices]
        return replace(
            self,
            ids=tuple(self.ids[i] for i in chosen),
            lengths=None if self.lengths is None else tuple(self.lengths[i] for i in chosen),
            tags=None if self.tags is None else tuple(self.tags[i] for i in chosen),
        )

    def slice(self, start: int, stop: int) -> BatchMeta:
        """Rows start to stop - 1. IndexError unless 0 <= start <= stop <= rows."""
        if not 0 <= start <= stop <= len(self.ids):
            raise IndexError(f"asked for the rows {start} to {stop} of a batch of {len(self.ids)} rows")
        return self.subset(range(start, stop))

    def drop(self, indices: Iterable[int]) -> BatchMeta | None:
        """The batch without these rows, or None if no row remains. IndexError for a number out of range."""
        dropped = {self._row_number(index) for index in indices}
        kept = [i for i in range(len(self.ids)) if i not in dropped]
        return self.subset(kept) if kept else None

    def _row_number(self, index: int) -> int:
        if not 0 <= int(index) < len(self.ids):
            raise IndexError(f"asked for row {int(index)} of a batch of {len(self.ids)} rows")
        return int(index)

    @staticmethod
    def concat(batches: Sequence[BatchMeta]) -> BatchMeta:
        """One batch of all rows. Fields, lengths and tags remain if every batch has them.

        Errors: DataError for an empty list, batches of two partitions, or a row that is in two batches.
        """
        if not batches:
            raise DataError("concat got an empty list of batches; give at least one batch")
        partitions = sorted({batch.partition for batch in batches})
        if len(partitions) > 1:
            raise DataError(f"concat got batches of the partitions {partitions}; give batches of one partition")
        lengths = [batch.lengths for batch in batches if batch.lengths is not None]
        tags = [batch.tags for batch in batches if batch.tags is not None]
        return BatchMeta(
            partition=partitions[0],
            ids=tuple(row_id for batch in batches for row_id in batch.ids),
            fields=tuple(name for name in batches[0].fields if all(name in batch.fields for batch in batches)),
            lengths=tuple(n for part in lengths for n in part) if len(lengths) == len(batches) else None,
            tags=tuple(tag for part in tags for tag in part) if len(tags) == len(batches) else None,
        )

    def with_fields(self, *names: str) -> BatchMeta:
        """The batch with more fields. A field that the batch already has keeps its position."""
        return replace(self, fields=(*self.fields, *names))

    def with_tags(self, tags: Sequence[Mapping[str, Scalar]]) -> BatchMeta:
        """The batch with more tags, one mapping per row. A new value replaces the old value of the same name."""
        if len(tags) != len(self.ids):
            raise DataError(f"batch of {self.partition!r}: {len(tags)} tags for {len(self.ids)} rows; give one per row")
        old = self.tags or (Tags(),) * len(self.ids)
        return replace(self, tags=tuple(Tags({**a, **b}) for a, b in zip(old, tags, strict=True)))

    def pad_target(self, *multiples: int) -> int:
        """The longest length, rounded up to a multiple of the largest of `multiples`. DataError without lengths.

        Call this method before the batch is sharded: all shards must be padded to the same length.
        """
        if self.lengths is None:
            raise DataError(f"batch of {self.partition!r}: the length to pad to needs lengths, found None; set lengths")
        multiple = max(multiples, default=1)
        if multiple < 1:
            raise DataError(f"lengths can be rounded up to a multiple of 1 or more, found {multiple}")
        return -(-max(self.lengths, default=0) // multiple) * multiple  # rounded up
