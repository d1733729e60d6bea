"""Batch metadata: which rows of the store a batch is, and what is known about them. Never the rows themselves.

    meta.subset([2, 0])   meta.slice(0, 4)   BatchMeta.concat([a, b])   meta.drop([1])   meta.with_fields("advantages")

Every operation is pure and checks its result as the constructor does. Nothing is shared by reference: ids, fields and
lengths are tuples, tags are immutable mappings of plain values, so nobody can change the batch of somebody else. What
follows from the rows (such as the length to pad to) is computed when asked for, never carried along: it could only be
out of date after a concat or a subset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from asyncrl.errors import DataError

Scalar: TypeAlias = str | int | float | bool | None


class Tags(Mapping[str, Scalar]):
    """What is known about one row: an immutable mapping of names to plain values. Hashable, picklable."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Scalar] | Iterable[tuple[str, Scalar]] = ()) -> None:
        found = dict(items)
        for name, value in found.items():
            if not isinstance(name, str) or not isinstance(value, Scalar):
                raise DataError(
                    f"tag {name!r} is a {type(value).__name__}; tags are plain values (str, int, float, bool, None) by name"
                )
        self._items = found

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
    """`lengths` (tokens) and `tags` have one entry a row, or are None where they are not known for every row.

    `fields`: the columns that every row of the batch is known to have, in the order they were written.
    Errors: DataError at construction, for ids that repeat, entries that do not count up to the rows, bad lengths.
    """

    partition: str
    ids: tuple[str, ...]
    fields: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    tags: tuple[Tags, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ids, str) or isinstance(self.fields, str):
            raise DataError("batch: ids and fields are sequences of names; found a single string")
        # The one moment at which a frozen value may settle its own form.
        put = object.__setattr__
        put(self, "ids", tuple(self.ids))
        put(self, "fields", tuple(dict.fromkeys(self.fields)))
        if len(set(self.ids)) != len(self.ids):
            twice = sorted({name for name in self.ids if self.ids.count(name) > 1})
            raise DataError(f"batch of {self.partition!r}: the ids {twice[:5]} occur more than once")
        for what, entries in (("lengths", self.lengths), ("tags", self.tags)):
            if entries is not None and len(entries) != len(self.ids):
                raise DataError(
                    f"batch of {self.partition!r}: {len(entries)} {what} for {len(self.ids)} rows; one each, or None"
                )
        if self.lengths is not None:
            put(self, "lengths", tuple(int(length) for length in self.lengths))
            if any(length < 0 for length in self.lengths):
                raise DataError(f"batch of {self.partition!r}: negative length {min(self.lengths)}")
        if self.tags is not None:
            put(self, "tags", tuple(tag if isinstance(tag, Tags) else Tags(tag) for tag in self.tags))

    def __len__(self) -> int:
        return len(self.ids)

    # -- rows ------------------------------------------------------------------------------------------------------

    def subset(self, indices: Iterable[int]) -> BatchMeta:
        """These rows, in this order. IndexError for a row that is not there, DataError for one named twice."""
        chosen = [int(index) for index in indices]
        for index in chosen:
            if not 0 <= index < len(self.ids):
                raise IndexError(f"row {index} of a batch of {len(self.ids)} rows")
        return replace(
            self,
            ids=tuple(self.ids[i] for i in chosen),
            lengths=None if self.lengths is None else tuple(self.lengths[i] for i in chosen),
            tags=None if self.tags is None else tuple(self.tags[i] for i in chosen),
        )

    def slice(self, start: int, stop: int) -> BatchMeta:
        """Rows start to stop - 1. IndexError unless 0 <= start <= stop <= rows."""
        if not 0 <= start <= stop <= len(self.ids):
            raise IndexError(f"rows {start} to {stop} of a batch of {len(self.ids)} rows")
        return self.subset(range(start, stop))

    def drop(self, indices: Iterable[int]) -> BatchMeta | None:
        """All rows but these, or None where that leaves none. IndexError for a row that is not there."""
        gone = {int(index) for index in indices}
        for index in gone:
            if not 0 <= index < len(self.ids):
                raise IndexError(f"row {index} of a batch of {len(self.ids)} rows")
        rest = [i for i in range(len(self.ids)) if i not in gone]
        return self.subset(rest) if rest else None

    @staticmethod
    def concat(batches: Sequence[BatchMeta]) -> BatchMeta:
        """All rows of batches of one partition. Fields, lengths and tags are kept where every batch knows them.

        Errors: DataError for no batch at all, two partitions, or a row that is in two batches.
        """
        if not batches:
            raise DataError("concat of no batches; at least one")
        partitions = sorted({batch.partition for batch in batches})
        if len(partitions) > 1:
            raise DataError(f"concat of batches of different partitions: {partitions}")
        lengths = [batch.lengths for batch in batches if batch.lengths is not None]
        tags = [batch.tags for batch in batches if batch.tags is not None]
        return BatchMeta(
            partition=partitions[0],
            ids=tuple(name for batch in batches for name in batch.ids),
            fields=tuple(name for name in batches[0].fields if all(name in batch.fields for batch in batches)),
            lengths=tuple(n for part in lengths for n in part) if len(lengths) == len(batches) else None,
            tags=tuple(tag for part in tags for tag in part) if len(tags) == len(batches) else None,
        )

    # -- what is known about them ----------------------------------------------------------------------------------

    def with_fields(self, *names: str) -> BatchMeta:
        """These columns are there as well; ones that are known already keep their place."""
        return replace(self, fields=(*self.fields, *names))

    def with_tags(self, tags: Sequence[Mapping[str, Scalar]]) -> BatchMeta:
        """Add tags, one mapping a row; a new value replaces the old one of that name. DataError unless one a row."""
        if len(tags) != len(self.ids):
            raise DataError(f"batch of {self.partition!r}: {len(tags)} tags for {len(self.ids)} rows; one each")
        old = self.tags or (Tags(),) * len(self.ids)
        return replace(self, tags=tuple(Tags({**a, **b}) for a, b in zip(old, tags, strict=True)))

    def pad_target(self, *multiples: int) -> int:
        """The longest row rounded up to a multiple of the largest of `multiples`: mint it from the whole batch, before
        sharding, so that all shards share it. DataError where the lengths are not known."""
        if self.lengths is None:
            raise DataError(f"batch of {self.partition!r}: the length to pad to needs the lengths of its rows")
        multiple = max(multiples, default=1)
        if multiple < 1:
            raise DataError(f"lengths are rounded up to a multiple of at least 1, found {multiple}")
        return -(-max(self.lengths, default=0) // multiple) * multiple
