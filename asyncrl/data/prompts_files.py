"""Rows of training data in files (JSONL, CSV, parquet, a saved `datasets` directory), all as `PromptRows`.

Parquet files are read into one Arrow table. Arrow files are memory-mapped. One row of a table at a time becomes Python objects. A
directory written by `datasets.Dataset.save_to_disk` is read with pyarrow alone, so `datasets` need not be installed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from asyncrl.config.load import SHARD, parquet_shards
from asyncrl.errors import DataError

from .tokenizing import check_unicode, without_nulls

Row: TypeAlias = Mapping[str, Any]

ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".parquet")
# Matches the beginning of a file's name: the name of a split. If there is no split: everything before the number of a shard.
_SPLIT = re.compile(r"(train|test|valid|val|dev|eval)[a-z]*(?![a-z])|(.+?)(?=-\d+-of-\d+$)", re.IGNORECASE)


class PromptRows(Protocol):
    """A fixed sequence of rows. `source`: where the rows come from, for messages."""

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
    """Rows of an Arrow table, converted one at a time. A value that Python cannot hold, such as a date beyond the year 9999,
    becomes text: `1000000000000 timestamp[s]`. Errors: `DataError` for two columns with the same name."""

    def __init__(self, table: Any, source: str) -> None:
        check_names(table.column_names, source)
        self.source = source
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return arrow_row(self._table.slice(index, 1))


def arrow_row(table: Any) -> dict[str, Any]:
    """The row of an Arrow table with one row, as Python objects."""
    try:
        [row] = table.to_pylist()
    except Exception:  # each Arrow type raises other errors
        row = {name: _as_python(table.column(name)[0]) for name in table.column_names}
    return {name: without_nulls(value) for name, value in row.items()}


def _as_python(scalar: Any) -> Any:
    import pyarrow as pa

    try:
        return scalar.as_py()
    except Exception:  # see `arrow_row`
        if isinstance(scalar, pa.StructScalar):
            return {name: _as_python(field) for name, field in scalar.items()}
        if isinstance(scalar, pa.ListScalar):  # a map is a list of pairs
            return [_as_python(item) for item in scalar.values]
        if isinstance(scalar, (pa.StringScalar, pa.LargeStringScalar, pa.StringViewScalar)):
            return scalar.as_buffer().to_pybytes()  # the bytes are not UTF-8
        value = scalar.value
        return _as_python(value) if isinstance(value, pa.Scalar) else f"{value} {scalar.type}"


def check_names(names: Sequence[str], source: str) -> None:
    """Errors: `DataError` if two columns have the same name."""
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise DataError(
            f"{source} has several columns named {', '.join(map(repr, repeated))}; give each column another name"
        )


def open_rows(file: str | os.PathLike[str]) -> PromptRows:
    """Read a file, a directory, or parquet shards (`parquet_shards`). The ending of a file decides its format.

    Errors: `DataError` that names the path, what was found and what is expected.
    """
    path = Path(os.path.expanduser(file))
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            return _open_directory(path)
        if not path.exists():
            if shards := parquet_shards(path):
                _check_shards(shards, str(path))
                return _open_parquet(shards, str(path))
            raise DataError(
                f"the prompt file {path} does not exist (looked from {Path.cwd()}); expected a {', '.join(ENDINGS)} file, a "
                "directory of parquet files, a directory written by datasets.save_to_disk, or a hub data set (org/name:split)"
            )
        if suffix == ".parquet":
            return _open_parquet([path], str(path))
        if suffix == ".csv":
            return _open_csv(path)
        if suffix in ENDINGS:
            return _open_json(path)
    except OSError as error:
        raise DataError(f"the prompt file {path} cannot be read: {error}") from error
    raise DataError(f"the prompt file {path} has the ending {suffix!r}; expected one of {', '.join(ENDINGS)}")


def is_local(source: str | os.PathLike[str]) -> bool:
    """Whether there is a file, a directory or shards for `open_rows` at this path, readable or not."""
    path = Path(os.path.expanduser(source))
    return os.path.exists(path) or bool(parquet_shards(path))


def digest(rows: PromptRows, column: str) -> int:
    """A cheap fingerprint of the number of rows, and of the prompts of up to 64 evenly spaced rows. For a row that lacks `column`
    all columns are used."""
    count = len(rows)
    check = zlib.crc32(str(count).encode())
    for index in sorted({k * (count - 1) // 63 for k in range(64)}) if count else ():
        check = zlib.crc32(repr(_without_sets(rows[index].get(column, rows[index]))).encode(), check)
    return check


def _without_sets(value: Any) -> Any:
    """The value with sorted lists in place of sets, except sets of numbers. PYTHONHASHSEED changes the order of sets of strings."""
    if type(value) is dict:
        return {key: _without_sets(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_sets, value))
    if isinstance(value, (set, frozenset)) and not all(isinstance(item, (int, float)) for item in value):
        return sorted(repr(_without_sets(item)) for item in value)
    return value


def _check_shards(files: Sequence[Path], source: str) -> None:
    """Errors: `DataError` if shards are missing, or belong to several shardings of one data set."""
    found: dict[tuple[str, int], list[int]] = {}
    for file in files:
        if shard := SHARD.fullmatch(file.name):
            found.setdefault((shard[1], int(shard[3])), []).append(int(shard[2]))
    prefixes = [prefix for prefix, _ in found]
    for (prefix, count), numbers in found.items():
        if prefixes.count(prefix) > 1 or len(set(numbers)) < len(numbers):
            counts = ", ".join(f"-of-{other_count}" for other_prefix, other_count in found if other_prefix == prefix)
            raise DataError(
                f"{source} has the files of several shardings of {prefix!r} ({counts}; {len(files)} files); keep the "
                "files of only one"
            )
        if missing := sorted({*range(count)} - {*numbers}):
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise DataError(
                f"{source} lacks {len(missing)} of the {count} files {prefix}-NUMBER-of-{count}: {shown}; add them, or set "
                "data.train=file.py:function to a function that reads the files you want and returns their rows"
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


def _open_csv(path: Path) -> PromptRows:
    """The first line names the columns. Every value is a string, with the characters of the file ("007" stays "007")."""
    rows: list[Row] = []
    # By default a value has at most 131,072 characters. The limit holds for the process.
    csv.field_size_limit(2**31 - 1)
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, [])
            check_names(names, f"the first line of {path}")
            for values in lines:
                if len(values) != len(names) and values:
                    raise DataError(
                        f"{path} line {lines.line_num} has {len(values)} values; the first line names {len(names)} "
                        f"columns ({', '.join(names)}); put a value with a comma or a line break in double quotes"
                    )
                if values:
                    rows.append(dict(zip(names, values, strict=True)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not valid CSV in UTF-8 (line {lines.line_num + 1}): {error}") from error
    return ListRows(rows, str(path))


def _open_json(path: Path) -> PromptRows:
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix.lower() == ".json" and data.lstrip()[:1] == b"[":
        values = _read_json(data, f"the prompt file {path}")
        numbered = [(f"{path} row {number}", value) for number, value in enumerate(values, start=1)]
    else:
        lines = [
            (f"{path} line {number}", line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()
        ]
        numbered = [(source, _read_json(line, source)) for source, line in lines]
    for source, value in numbered:
        if not isinstance(value, dict):
            raise DataError(f"{source} holds {type(value).__name__}; expected an object with a prompt column")
    return ListRows([value for _, value in numbered], str(path))


def _read_json(data: bytes, source: str) -> Any:
    """Parse with `json`, which keeps integers of any size: faster packages make floats of large integers. Errors: `DataError`."""
    try:
        text = data.decode()
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is not valid JSON: {error}") from error
    if "\\u" in text:
        check_unicode(value, source)
    return value


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Errors: ValueError for a repeated key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} is twice in one object")
    return mapping


def _number(text: str) -> float:
    """Errors: ValueError for NaN, for infinity, and for a number that is too large for a float."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number; write null if a value is missing")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of_pairs, parse_float=_number, parse_constant=_number)


def _open_directory(path: Path) -> PromptRows:
    """Reads a directory of parquet files, or a directory of `Dataset.save_to_disk`, which has Arrow stream files and state.json."""
    import pyarrow as pa

    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise DataError(f"{path} holds several splits ({splits}); name one of them, like {path / 'train'}")
    if not (path / "state.json").exists():
        return _open_parquet(_one_split(path), str(path))
    try:
        state = json.loads((path / "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(path / name))).read_all() for name in names]
        return TableRows(pa.concat_tables(tables), str(path))
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not a readable datasets directory: {type(error).__name__}: {error}; write it anew with "
            "datasets.save_to_disk, or save it as parquet"
        ) from error


def _one_split(path: Path) -> list[Path]:
    """The parquet files of a directory, sorted by name. Errors: DataError if there are none, or files of several splits."""
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise DataError(
            f"{path} is a directory without parquet files and without state.json; expected parquet files, or what "
            "datasets.save_to_disk writes"
        )
    matches = [_SPLIT.match(file.stem) for file in files]
    if len({match.group(0).lower() if match else "" for match in matches}) > 1:
        raise DataError(
            f"{path} holds parquet files of several splits ({', '.join(file.name for file in files[:8])}); name one "
            f"file, or the beginning of the file names of one split, like {path / 'train'} for train-00000-of-00002.parquet"
        )
    _check_shards(files, str(path))
    return files
