"""Reads rows for the ranks of a replica, and writes their results. All ranks of a replica work on the same rows.

`fetch` has two policies: `leader_broadcast` (rank 0 of the replica reads and broadcasts) and `independent` (every rank
reads). With either policy exactly one rank of the replica writes results: see `write_back`.
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
    """A store as `fetch` sees it: rows can be read."""

    def get(self, meta: BatchMeta, fields: Sequence[str] | None = None) -> Columns:
        """The columns `fields` (default: `meta.fields`) of the rows of `meta`, in the order of `meta.ids`."""
        ...


class ColumnSink(Protocol):
    """A store as `write_back` sees it: columns can be written."""

    def put(self, partition: str, ids: Sequence[str], columns: Mapping[str, Any]) -> BatchMeta:
        """Write columns of the rows `ids` of a partition. Returns the metadata of these rows with the new fields."""
        ...


def fetch(
    source: Source | None,
    meta: BatchMeta,
    fields: Sequence[str] | None = None,
    *,
    group: ReplicaGroup | None = None,
    policy: Policy = "auto",
) -> Columns:
    """The columns `fields` (default: `meta.fields`) of the rows of `meta`, equal on every rank of the replica.

    `auto` is leader_broadcast in a replica of several ranks, else independent. Only a rank that reads needs a source.
    Errors: LifecycleError for leader_broadcast without a group, or a rank that reads without a source. DataError if the
    ranks ask for different rows. If the source raises on the leader, the other ranks raise FetchFailed.
    """
    if policy == "leader_broadcast" and group is None:
        raise LifecycleError("fetch: leader_broadcast needs the replica's group; this rank has none; use auto")
    if policy == "independent" or group is None or (policy == "auto" and group.size == 1):
        return _read(source, meta, fields)
    request = [meta.partition, list(meta.ids), list(fields or meta.fields)]
    # The leader calls the function, and `share` returns its result on every rank.
    arrays, (leader_request, names, objects) = group.share(lambda: _flatten(_read(source, meta, fields), request))
    if leader_request != request:
        partition, ids, columns = leader_request
        raise DataError(
            f"fetch: the ranks of a replica must ask for the same rows: the leader asks for {len(ids)} rows of {partition!r} "
            f"with the columns {columns}, this rank for {len(request[1])} rows of {request[0]!r} with {request[2]}"
        )
    return {name: _unflatten(name, arrays, objects) for name in names}


def write_back(
    sink: ColumnSink | None, meta: BatchMeta, columns: Mapping[str, Any], coordinates: Coordinates
) -> BatchMeta:
    """Write more columns of the rows of `meta`. Every rank calls; only the rank at tp = cp = pp = 0 writes.

    Returns `meta` with the new fields, on every rank. Errors: DataError on every rank, before anything is written, for a
    column whose length is not the number of rows. LifecycleError on the rank that writes, if `sink` is None.
    """
    for name, column in columns.items():
        split(column, len(meta), name)
    if coordinates.writes:
        if sink is None:
            raise LifecycleError(f"write_back: the rank at {coordinates} writes for its replica; give it a store")
        sink.put(meta.partition, meta.ids, columns)
    return meta.with_fields(*columns)


def _read(source: Source | None, meta: BatchMeta, fields: Sequence[str] | None) -> Columns:
    if source is None:
        raise LifecycleError("fetch: this rank has to read the rows; give it a store")
    return source.get(meta, fields)


def _flatten(columns: Columns, request: Any) -> tuple[Arrays, Any]:
    """(arrays, (request, names of the columns, object columns as lists)). A jagged column gives two arrays."""
    arrays: Arrays = {}
    objects: dict[str, list[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, Jagged):
            arrays[f"values/{name}"], arrays[f"offsets/{name}"] = column.values, column.offsets
        elif column.dtype == object:
            objects[name] = column.tolist()
        else:
            arrays[f"dense/{name}"] = column
    return arrays, (request, list(columns), objects)


def _unflatten(name: str, arrays: Arrays, objects: Mapping[str, list[Any]]) -> Any:
    if f"values/{name}" in arrays:
        return Jagged(arrays[f"values/{name}"], arrays[f"offsets/{name}"])
    if name not in objects:
        return arrays[f"dense/{name}"]
    column = np.empty(len(objects[name]), dtype=object)  # np.array would turn a list into a dimension
    for index, value in enumerate(objects[name]):
        column[index] = value
    return column
