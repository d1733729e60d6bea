"""Rows of training data in files (JSONL, CSV, parquet, a saved `datasets` directory) behind one small protocol.

Arrow files are memory-mapped or held as one table, and one row is turned into Python objects at a time. A directory
written by `datasets.Dataset.save_to_disk` is read with pyarrow alone, so `datasets` need not be installed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from asyncrl.config.load import SHARD, parquet_shards
from asyncrl.errors import DataError

from .tokenizing import check_unicode, without_nulls

Row: TypeAlias = Mapping[str, Any]

ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".parquet")
_SPLIT = re.compile(r"(train|test|valid|val|dev|eval)[a-z]*(?![a-z])|(.+?)(?=-\d+-of-\d+$)", re.IGNORECASE)


class PromptRows(Protocol):
    """A fixed sequence of rows; `source` says where they come from in messages."""

    source: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class ListRows:
    """Rows that were given as a list in memory."""

    def __init__(self, rows: Sequence[Row], source: str = "the list of rows") -> None:
        self.source = source
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


class TableRows:
    """Rows of an Arrow table; reading a row slices the table. A value that Python cannot hold, such as a date beyond the year 9999,
    becomes text: `1000000000000 timestamp[s]`. Errors: `DataError` for two columns of one name."""

    def __init__(self, table: Any, source: str) -> None:
        check_names(table.column_names, source)
        self.source = source
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return arrow_row(self._table.slice(index, 1))


def arrow_row(table: Any) -> dict[str, Any]:
    """The only row of an Arrow table as Python's objects."""
    try:
        [row] = table.to_pylist()
    except Exception:  # each type raises errors of its own
        row = {name: _as_python(table.column(name)[0]) for name in table.column_names}
    return {name: without_nulls(value) for name, value in row.items()}


def _as_python(scalar: Any) -> Any:
    import pyarrow as pa

    try:
        return scalar.as_py()
    except Exception:  # see `arrow_row`
        if isinstance(scalar, pa.StructScalar):
            return {name: _as_python(each) for name, each in scalar.items()}
        if isinstance(scalar, pa.ListScalar):  # a map is a list of pairs
            return [_as_python(each) for each in scalar.values]
        if isinstance(scalar, (pa.StringScalar, pa.LargeStringScalar, pa.StringViewScalar)):
            return scalar.as_buffer().to_pybytes()  # the bytes are not UTF-8
        value = scalar.value
        return _as_python(value) if isinstance(value, pa.Scalar) else f"{value} {scalar.type}"


def check_names(names: Sequence[str], source: str) -> None:
    """Errors: `DataError` if two columns have one name."""
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise DataError(
            f"{source} has several columns named {', '.join(map(repr, twice))}; give each a name of its own"
        )


def open_rows(path: str | os.PathLike[str]) -> PromptRows:
    """Read a file or directory by its form.

    Errors: `DataError` that names the path, what was found and what is expected.
    """
    place = Path(path).expanduser()
    suffix = place.suffix.lower()
    try:
        if place.is_dir():
            return _open_directory(place)
        if not place.exists():
            if shards := parquet_shards(place):
                _check_shards(shards, str(place))
                return _open_parquet(shards, str(place))
            raise DataError(
                f"the prompt file {place} does not exist (looked from {Path.cwd()}); expected a {', '.join(ENDINGS)} "
                "file, a directory of parquet files, one written by datasets.save_to_disk, or a data set of the hub "
                "(org/name:split)"
            )
        if suffix == ".parquet":
            return _open_parquet([place], str(place))
        if suffix == ".csv":
            return _open_csv(place)
        if suffix in ENDINGS:
            return _open_json(place)
    except OSError as error:
        raise DataError(f"the prompt file {place} cannot be read: {error}") from error
    raise DataError(f"the prompt file {place} has the ending {suffix!r}; expected one of {', '.join(ENDINGS)}")


def is_local(source: str | os.PathLike[str]) -> bool:
    """Whether `open_rows` finds a file or directory there, readable or not."""
    place = Path(source).expanduser()
    return place.exists() or bool(parquet_shards(place))


def digest(rows: PromptRows, column: str) -> int:
    """A cheap fingerprint: number of rows, and the prompts of up to 64 of them, spread evenly."""
    count = len(rows)
    check = zlib.crc32(str(count).encode())
    for index in sorted({k * (count - 1) // 63 for k in range(64)}) if count else ():
        check = zlib.crc32(repr(rows[index].get(column)).encode(), check)
    return check


def _check_shards(files: Sequence[Path], source: str) -> None:
    """Errors: `DataError` if shards are missing, or of several shardings of one data set."""
    found: dict[tuple[str, int], list[int]] = {}
    for file in files:
        if shard := SHARD.fullmatch(file.name):
            found.setdefault((shard[1], int(shard[3])), []).append(int(shard[2]))
    beginnings = [beginning for beginning, _ in found]
    for (beginning, count), numbers in found.items():
        if beginnings.count(beginning) > 1 or len(set(numbers)) < len(numbers):
            counts = ", ".join(f"-of-{each}" for name, each in found if name == beginning)
            raise DataError(
                f"{source} has the files of several shardings of {beginning!r} ({counts}; {len(files)} files); remove those of "
                "all but one"
            )
        if missing := sorted({*range(count)} - {*numbers}):
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise DataError(
                f"{source} lacks {len(missing)} of the {count} files {beginning}-NUMBER-of-{count}: {shown}; add them, or name the "
                "files that are meant one by one in a function (data.train=file.py:function)"
            )


def _open_parquet(files: Sequence[Path], source: str) -> PromptRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        try:
            check_names(pq.read_schema(file).names, str(file))
            tables.append(pq.read_table(file))
        except pa.ArrowException as error:
            raise DataError(f"the prompt file {file} is not a readable parquet file: {error}") from error
    try:
        return TableRows(pa.concat_tables(tables, promote_options="permissive"), source)
    except pa.ArrowException as error:
        raise DataError(f"the parquet files of {source} do not have the same columns: {error}") from error


def _open_csv(place: Path) -> PromptRows:
    """The first line names the columns; every value is a string, as it stands in the file ("007" stays "007")."""
    rows: list[Row] = []
    with place.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, [])
            check_names(names, f"the first line of {place}")
            for values in lines:
                if len(values) != len(names) and values:
                    raise DataError(
                        f"{place} line {lines.line_num} has {len(values)} values; the first line names {len(names)} "
                        f"columns ({', '.join(names)}); a value with a comma or a line break stands in double quotes"
                    )
                if values:
                    rows.append(dict(zip(names, values, strict=True)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{place} is not valid CSV in UTF-8 (line {lines.line_num + 1}): {error}") from error
    return ListRows(rows, str(place))


def _open_json(place: Path) -> PromptRows:
    data = place.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if place.suffix.lower() == ".json" and data.lstrip()[:1] == b"[":
        values = _read_json(data, f"the prompt file {place}")
        numbered = [(f"{place} row {number}", value) for number, value in enumerate(values, start=1)]
    else:
        numbered = list(_json_lines(data, place))
    for where, value in numbered:
        if not isinstance(value, dict):
            raise DataError(f"{where} holds {type(value).__name__}; expected an object with a prompt column")
    return ListRows([value for _, value in numbered], str(place))


def _json_lines(data: bytes, place: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{place} line {number}", _read_json(line, f"{place} line {number}")


def _read_json(data: bytes, where: str) -> Any:
    """Parsed by `json`, which keeps integers of any size; faster packages make floats of large ones. Errors: `DataError`."""
    try:
        text = data.decode()
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error
    if "\\u" in text:
        check_unicode(value, where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object"
        )
    return found


def _number(text: str) -> float:
    """Errors: ValueError for NaN and infinity, and for a number beyond a float's."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number; write null where a value is missing")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_number, parse_constant=_number)


def _open_directory(place: Path) -> PromptRows:
    """Parquet files, or a directory of `Dataset.save_to_disk`: state.json names Arrow stream files."""
    import pyarrow as pa

    if (place / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in place.iterdir() if entry.is_dir()))
        raise DataError(f"{place} holds several splits ({splits}); name one of them, like {place / 'train'}")
    if not (place / "state.json").exists():
        return _open_parquet(_one_split(place), str(place))
    try:
        state = json.loads((place / "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(place / name))).read_all() for name in names]
        return TableRows(pa.concat_tables(tables), str(place))
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"{place} is not a readable datasets directory: {type(error).__name__}: {error}; write it anew with "
            "datasets.save_to_disk, or save it as parquet"
        ) from error


def _one_split(place: Path) -> list[Path]:
    """The parquet files of a directory by name; several splits beside each other are never read as one data set."""
    files = sorted(place.glob("*.parquet"))
    if not files:
        raise DataError(
            f"{place} is a directory without parquet files and without state.json; expected parquet files, or what "
            "datasets.save_to_disk writes"
        )
    splits = {found.group(0).lower() if (found := _SPLIT.match(file.stem)) else "" for file in files}
    if len(splits) > 1:
        raise DataError(
            f"{place} holds parquet files of several splits ({', '.join(file.name for file in files[:8])}); name one "
            f"file, or what the names of its files begin with, like {place / 'train'} for train-00000-of-00002.parquet"
        )
    _check_shards(files, str(place))
    return files
