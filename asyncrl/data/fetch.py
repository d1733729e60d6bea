"""Reading rows and writing results on the ranks of a replica that work on the same rows.

fetch       leader_broadcast: one rank reads, its siblings receive        independent: every rank reads
write_back  one rank of the replica writes, whichever way it was read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from asyncrl.distributed.replica import Arrays, Coordinates, ReplicaGroup
from asyncrl.errors import DataError, LifecycleError

from .batch_meta import BatchMeta
from .columns import Columns, Jagged, split

Policy: TypeAlias = Literal["auto", "leader_broadcast", "independent"]


class Source(Protocol):
    """Where rows are read."""

    def get(self, meta: BatchMeta, fields: Sequence[str] | None = None) -> Columns:
        """The columns of the rows that `meta` names, in its order; its fields by default."""
        ...


class ColumnSink(Protocol):
    """Where results are written."""

    def put(self, partition: str, ids: Sequence[str], columns: Mapping[str, Any]) -> BatchMeta:
        """Write these columns of the rows `ids` of a partition; what names the rows from now on."""
        ...


def fetch(
    source: Source | None,
    meta: BatchMeta,
    fields: Sequence[str] | None = None,
    *,
    group: ReplicaGroup | None = None,
    policy: Policy = "auto",
) -> Columns:
    """The columns of these rows, the same on every rank of the replica.

    auto: leader_broadcast where the replica has siblings (`group`), else independent. Only ranks that read need a source.
    Errors: LifecycleError for leader_broadcast without a group, or a reader without a source; DataError where the
    siblings ask for different rows; what the source raises on the reader, FetchFailed on its siblings.
    """
    if policy == "leader_broadcast" and group is None:
        raise LifecycleError("fetch: leader_broadcast needs the replica's group; this rank has none (use auto)")
    if policy == "independent" or group is None or (policy == "auto" and group.size == 1):
        return _read(source, meta, fields)
    asked = [meta.partition, list(meta.ids), list(fields or meta.fields)]
    arrays, (found, order, objects) = group.share(lambda: _flatten(_read(source, meta, fields), asked))
    if found != asked:
        raise DataError(
            f"fetch: the siblings of a replica ask for different rows: the leader for {len(found[1])} of {found[0]!r} "
            f"with {list(found[2])}, this rank for {len(asked[1])} of {asked[0]!r} with {list(asked[2])}"
        )
    return {name: _column(name, arrays, objects) for name in order}


def write_back(
    sink: ColumnSink | None, meta: BatchMeta, columns: Mapping[str, Any], coordinates: Coordinates
) -> BatchMeta:
    """More columns for these rows: every rank of a replica calls, the one at tp = cp = pp = 0 writes.

    Returns the batch with these fields, on every rank. Errors: DataError, before anything is written and on every rank,
    for columns that do not count up to the rows; LifecycleError for the writer without a sink.
    """
    for name, column in columns.items():
        split(column, len(meta), name)
    if coordinates.writes:
        if sink is None:
            raise LifecycleError(f"write_back: {coordinates} writes for its replica and has no store")
        sink.put(meta.partition, meta.ids, columns)
    return meta.with_fields(*columns)


def _read(source: Source | None, meta: BatchMeta, fields: Sequence[str] | None) -> Columns:
    if source is None:
        raise LifecycleError("fetch: this rank has to read the rows and has no store")
    return source.get(meta, fields)


def _flatten(columns: Columns, asked: Any) -> tuple[Arrays, Any]:
    """Plain arrays (a jagged column is two), and what is no array: which columns, and the objects."""
    arrays: Arrays = {}
    objects: dict[str, list[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, Jagged):
            arrays[f"values/{name}"], arrays[f"offsets/{name}"] = column.values, column.offsets
        elif column.dtype == object:
            objects[name] = column.tolist()
        else:
            arrays[f"dense/{name}"] = column
    return arrays, (asked, list(columns), objects)


def _column(name: str, arrays: Arrays, objects: Mapping[str, list[Any]]) -> Any:
    if f"values/{name}" in arrays:
        return Jagged(arrays[f"values/{name}"], arrays[f"offsets/{name}"])
    if name not in objects:
        return arrays[f"dense/{name}"]
    column = np.empty(len(objects[name]), dtype=object)
    for index, value in enumerate(objects[name]):
        column[index] = value
    return column
