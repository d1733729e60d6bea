"""Rows of training data, from the setting `data.train` or from an object of the user's program.

| source                                                           | how the rows are read                                 |
|------------------------------------------------------------------|-------------------------------------------------------|
| a file or directory                                              | `prompts_files.open_rows`                             |
| `org/name`, `org/name:split`, `org/name:config:split`            | `datasets.load_dataset`                               |
| `file.py:name`, `module:name`                                    | import; a function is called without arguments        |
| a list; a pandas, polars or Arrow table                          | kept in memory                                        |
| `len(data)` and `data[i]`: `datasets.Dataset`, reasoning-gym     | one row at each access                                |
| iterables, generators, `datasets.IterableDataset`                | all rows into memory, at most ITERATED_ROWS           |

Shuffling and resuming need rows by number. So an iterable is read to its end before the run, and an iterable with more than
ITERATED_ROWS rows is refused.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from asyncrl.builds import install_command
from asyncrl.config.hub import hub_error
from asyncrl.config.imports import installed, load_object, raised, user_code
from asyncrl.errors import DataError

from .prompts_files import ENDINGS, ListRows, PromptRows, Row, TableRows, arrow_row, check_names, is_local, open_rows
from .tokenizing import without_nulls

T = TypeVar("T")

ITERATED_ROWS = 100_000  # limit of rows of a source that can only be iterated
_NO_FILE_MESSAGE = "there is no file or directory {} (looked from {}), and as a data set of the hub"
_OFFLINE_ADVICE = "on a machine without the hub give a directory of its parquet files, or a directory of save_to_disk"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]+){0,2}")


class IndexedRows:
    """Rows of an object with `len(data)` and `data[index]`. `data[index]` must return an equal row at each call.

    A row of a reasoning-gym data set gets a column `prompt` with the value of its column `question`.
    """

    def __init__(self, data: Any, source: str) -> None:
        self.source = source
        self._data = data
        self._is_gym = callable(getattr(data, "score_answer", None))
        # Whether `data` is of the package `datasets`. If not, user code may generate a row at each access, which is slow.
        self.is_datasets_object = type(data).__module__.partition(".")[0] == "datasets"

    def __len__(self) -> int:
        return _call_user(lambda: len(self._data), f"the length of {self.source}")

    def __getitem__(self, index: int) -> Row:
        try:
            row: Row = _call_user(lambda: self._data[index], f"row {index + 1} of {self.source}")
        except DataError:
            if not self.is_datasets_object or self._data.format["type"] is not None:
                raise
            # `datasets` lacks a decoder for a column, or Python has no type for a value.
            row = arrow_row(self._data.with_format("arrow")[index])
        _check_row(row, index, self.source)
        if self.is_datasets_object:
            row = {name: without_nulls(value) for name, value in row.items()}
        if self._is_gym and "prompt" not in row and "question" in row:
            return {"prompt": row["question"], **row}
        return row


def kind_of(source: str) -> Literal["file", "hub", "code"]:
    """The kind of source that a value of `data.train` names. A path that does not exist is a `file`, too. Opens no file."""
    module, colon, _ = source.rpartition(":")
    first_folder, _, _ = source.partition("/")
    if is_local(source) or (not colon and (os.path.isdir(first_folder) or Path(source).suffix.lower() in ENDINGS)):
        return "file"
    if _HUB.fullmatch(source) and not module.endswith(".py"):
        return "hub"
    return "code" if colon else "file"


def load_rows(source: Any) -> PromptRows:
    """The rows of a source of the table above: a path, a hub id, the address of user code, or an object.

    Errors: `DataError`, also for an error in a function of the user; `ConfigError` if the function cannot be imported.
    """
    if not isinstance(source, (str, os.PathLike)):
        return as_rows(source, "the given rows")
    text = os.fspath(source)
    kind = "file" if isinstance(source, os.PathLike) else kind_of(source)
    if kind == "file":
        return open_rows(source)
    if kind == "hub":
        return _open_hub(text)
    data = load_object(text)
    if callable(data):
        data = _call_user(data, text)
    return as_rows(data, text)


def as_rows(data: Any, source: str) -> PromptRows:
    """The rows of an object. `source` is the origin of `data` in messages. Errors: `DataError` for an unknown type."""
    if isinstance(data, Mapping):
        names = ", ".join(map(str, list(data)[:8]))
        raise DataError(f"{source} gave {type(data).__name__} with {names}; expected rows: return one of its splits")
    if (table := _as_table(data, source)) is not None:
        return TableRows(table, source) if hasattr(table, "column_names") else _check_list(table, source)
    if not isinstance(data, (str, bytes)):
        if isinstance(data, Sequence):
            return _check_list(_call_user(lambda: list(data), source), source)
        if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            return IndexedRows(data, source)
        if hasattr(data, "__iter__"):
            rows = _read_all(data, source)
            if type(data).__module__.partition(".")[0] == "datasets":
                rows = [{name: without_nulls(value) for name, value in row.items()} for row in rows]
            return _check_list(rows, source)
    if inspect.iscoroutine(data):
        data.close()  # avoids "coroutine was never awaited"
    raise DataError(
        f"{source} gave {type(data).__name__}; expected rows (mappings of column to value): a list, an iterable, a data "
        "set with a length and rows by number, or a table"
    )


def _read_all(iterable: Any, source: str) -> list[Any]:
    rows = _call_user(lambda: list(islice(iter(iterable), ITERATED_ROWS + 1)), source)
    if len(rows) > ITERATED_ROWS:
        raise DataError(
            f"{source} gave {type(iterable).__name__}, which can only be iterated and has more than {ITERATED_ROWS:,} rows; "
            "shuffling and resuming need rows by number: return fewer rows (itertools.islice, IterableDataset.take), or "
            "return a list or a datasets.Dataset (Dataset.from_generator keeps its rows on disk)"
        )
    return rows


def _check_list(rows: Sequence[Any], source: str) -> PromptRows:
    for index, row in enumerate(rows):
        _check_row(row, index, source)
    return ListRows(rows, source)


def _check_row(row: Any, index: int, source: str) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f"row {index + 1} of {source} is {type(row).__name__}; expected a mapping of column to value")


def _as_table(data: Any, source: str) -> Any:
    """A data frame as an Arrow table. A pandas frame with a column that Arrow has no type for: a list of rows. Other data: None."""
    is_pandas = type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns")
    if not is_pandas and not hasattr(data, "__arrow_c_stream__"):
        return None
    import pyarrow as pa

    try:
        if is_pandas:
            check_names([str(name) for name in data.columns], source)
        return pa.Table.from_pandas(data, preserve_index=False) if is_pandas else pa.table(data)
    except (pa.ArrowException, OverflowError) as error:
        if is_pandas:
            return data.astype(object).where(data.notna(), None).to_dict("records")
        raise DataError(
            f"{source} gave {type(data).__name__} with a column that Arrow has no type for: {error}; return a list of rows instead"
        ) from error


def _call_user(call: Callable[[], T], source: str) -> T:
    """The result of user code. Errors: `DataError`, a message of one line, for every exception of the call."""
    with user_code(lambda error: DataError(f"{source} raised {raised(error)}")):
        return call()


def require_data_hub(source: str) -> None:
    """Errors: `DataError` if `datasets` is missing, or if the hub is unreachable and no copy is cached. Blocks like `hub_error`."""
    name = source.split(":")[0]
    prefix = _NO_FILE_MESSAGE.format(name, Path.cwd())
    if not installed("datasets"):
        raise DataError(f"{prefix} it needs the package `datasets`: {install_command('datasets')}")
    import datasets

    cached = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()
    if not cached and (reason := hub_error(name, "dataset")) is not None:
        raise DataError(f"{prefix} it cannot be fetched: {reason}; {_OFFLINE_ADVICE}")


def _open_hub(source: str) -> PromptRows:
    """Errors: `DataError` as in `require_data_hub`, or with the message of `datasets` if the data set cannot be loaded."""
    require_data_hub(source)
    import datasets

    name, *options = source.split(":")
    config = options[0] if len(options) == 2 else None
    try:
        data = datasets.load_dataset(name, config, split=options[-1] if options else None)
    except Exception as error:
        # Versions of `datasets` raise different types for a network error, an unknown name or an unknown split.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"{_NO_FILE_MESSAGE.format(name, Path.cwd())} {source!r} cannot be loaded: {reason}; expected "
            f"org/name, org/name:split or org/name:config:split; {_OFFLINE_ADVICE}"
        ) from error
    if isinstance(data, Mapping):
        if len(data) > 1:
            raise DataError(f"{source} has several splits ({', '.join(data)}); name one of them, like {name}:train")
        [data] = data.values()
    return as_rows(data, source)
