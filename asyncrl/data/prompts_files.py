"""Rows of training data from JSONL, parquet, a saved `datasets` directory, or memory, behind one small protocol.

Arrow files are memory-mapped or held as one table, and one row is turned into Python objects at a time. A directory
written by `datasets.Dataset.save_to_disk` is read with pyarrow alone, so `datasets` need not be installed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import orjson

from asyncrl.config.imports import load_object
from asyncrl.errors import DataError

Row: TypeAlias = Mapping[str, Any]


class Rows(Protocol):
    """A fixed sequence of rows; `source` says where they come from in messages."""

    source: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class ListRows:
    """Rows in memory."""

    def __init__(self, rows: Sequence[Row], source: str = "the list of rows") -> None:
        self.source = source
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


class TableRows:
    """Rows of an Arrow table; `row` costs one slice of it."""

    def __init__(self, table: Any, source: str) -> None:
        self.source = source
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row


def open_rows(path: str | os.PathLike[str]) -> Rows:
    """Read a file or directory by its form.

    Errors: `DataError` that names the path, what was found and what is expected.
    """
    place = Path(path).expanduser()
    suffix = place.suffix.lower()
    try:
        if place.is_dir():
            return _open_directory(place)
        if not place.exists():
            raise DataError(
                f"the prompt file {place} does not exist (looked from {Path.cwd()}); expected a .jsonl or .parquet "
                "file, or a directory written by datasets.save_to_disk (a data set of the hub is saved there first)"
            )
        if suffix == ".parquet":
            return _open_parquet(place)
        if suffix in (".jsonl", ".json", ".ndjson"):
            return _open_json(place)
    except OSError as error:
        raise DataError(f"the prompt file {place} cannot be read: {error}") from error
    raise DataError(f"the prompt file {place} has the ending {suffix!r}; expected .jsonl, .json or .parquet")


def load_rows(source: str | os.PathLike[str] | Sequence[Row]) -> Rows:
    """Rows from a list, a file or directory (`open_rows`), or a function `file.py:function` / `module:function`.

    The function takes no argument and returns a sequence of rows; a `reasoning_gym` data set is one line of it.
    Errors: `DataError`, `ConfigError` where the function cannot be imported.
    """
    if not isinstance(source, (str, os.PathLike)):
        return ListRows(source)
    if not isinstance(source, str) or ":" not in source or Path(source).exists():
        return open_rows(source)
    rows = load_object(source)()
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(
            f"{source} returned {type(rows).__name__}; expected a list of rows (mappings of column to value)"
        )
    return ListRows(rows, source)


def digest(rows: Rows, column: str) -> int:
    """A cheap fingerprint: number of rows, and the prompts of up to 64 of them, spread evenly."""
    count = len(rows)
    check = zlib.crc32(str(count).encode())
    for index in sorted({k * (count - 1) // 63 for k in range(64)}) if count else ():
        check = zlib.crc32(repr(rows[index].get(column)).encode(), check)
    return check


def _open_parquet(place: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return TableRows(pq.read_table(place), str(place))
    except pa.ArrowException as error:
        raise DataError(f"the prompt file {place} is not a readable parquet file: {error}") from error


def _open_json(place: Path) -> Rows:
    data = place.read_bytes()
    if place.suffix.lower() == ".json" and data.lstrip()[:1] == b"[":
        try:
            values = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise DataError(f"the prompt file {place} is not valid JSON: {error}") from error
        numbered = [(f"{place} row {number}", value) for number, value in enumerate(values, start=1)]
    else:
        numbered = list(_json_lines(data, place))
    for where, value in numbered:
        if not isinstance(value, dict):
            raise DataError(f"{where} holds {type(value).__name__}; expected an object with a prompt column")
    return ListRows([value for _, value in numbered], str(place))


def _json_lines(data: bytes, place: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{place} line {number}", orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{place} line {number} is not valid JSON: {error}") from error


def _open_directory(place: Path) -> Rows:
    """A directory of `Dataset.save_to_disk`: state.json names Arrow stream files."""
    import pyarrow as pa

    if (place / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in place.iterdir() if entry.is_dir()))
        raise DataError(f"{place} holds several splits ({splits}); name one of them, like {place / 'train'}")
    if not (place / "state.json").exists():
        raise DataError(f"{place} is a directory without state.json; expected one written by datasets.save_to_disk")
    try:
        state = orjson.loads((place / "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(place / name))).read_all() for name in names]
        return TableRows(pa.concat_tables(tables), str(place))
    except (orjson.JSONDecodeError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"{place} is not a readable datasets directory: {type(error).__name__}: {error}; write it anew with "
            "datasets.save_to_disk, or save it as parquet"
        ) from error
