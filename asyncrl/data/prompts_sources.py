"""Rows of training data from whatever `data.train` names, or a program hands over.

| what it is                                                       | how it is read                                        |
|------------------------------------------------------------------|-------------------------------------------------------|
| a file or directory                                              | `prompts_files.open_rows`                             |
| `org/name`, `org/name:split`, `org/name:config:split`            | `datasets.load_dataset`                               |
| `file.py:name`, `module:name`                                    | imported; a function is called without arguments      |
| a list; a pandas, polars or Arrow table                          | held in memory                                        |
| a length and `data[i]`: `datasets.Dataset`, reasoning-gym, torch | one row at a time, when it is needed                  |
| iterables, generators, `datasets.IterableDataset`                | once, to their end, into memory; at most ITERATED_ROWS |

PromptRows always have numbers: epochs are shuffled by them, and a group id finds its row again after a resume. What can only
be iterated is therefore read as a whole before the run, and a source that does not end is refused.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from asyncrl.builds import install
from asyncrl.config.hub import hub_silence
from asyncrl.config.imports import installed, load_object, raised, user_code
from asyncrl.errors import DataError

from .prompts_files import ENDINGS, ListRows, PromptRows, Row, TableRows, arrow_row, check_names, is_local, open_rows
from .tokenizing import without_nulls

T = TypeVar("T")

ITERATED_ROWS = 100_000  # of a source that can only be iterated
_WANTED = "there is no file or directory {} (looked from {}), and as a data set of the hub"
_LOCAL = "on a machine without the hub give a directory of its parquet files, or one that save_to_disk wrote elsewhere"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]+){0,2}")


class IndexedRows:
    """Rows of anything with a length and `data[index]`; the rows are made anew at each access and must not change.

    `question` of a reasoning-gym data set is also its `prompt`.
    """

    def __init__(self, data: Any, source: str) -> None:
        self.source = source
        self._data = data
        self._is_gym = callable(getattr(data, "score_answer", None))
        self.is_stored = (
            type(data).__module__.partition(".")[0] == "datasets"
        )  # else a row may take its time to be made

    def __len__(self) -> int:
        return _run(lambda: len(self._data), f"the length of {self.source}")

    def __getitem__(self, index: int) -> Row:
        try:
            row: Row = _run(lambda: self._data[index], f"row {index + 1} of {self.source}")
        except DataError:
            if not self.is_stored or self._data.format["type"] is not None:
                raise
            # A column that `datasets` cannot decode here, or whose value Python's types cannot hold.
            row = arrow_row(self._data.with_format("arrow")[index])
        _check_row(row, index, self.source)
        if self.is_stored:
            row = {name: without_nulls(value) for name, value in row.items()}
        if self._is_gym and "prompt" not in row and "question" in row:
            return {"prompt": row["question"], **row}
        return row


def kind_of(source: str) -> Literal["file", "hub", "code"]:
    """What `data.train` names: `file` also where nothing is there and nothing else is meant. Looks at names alone."""
    place, colon, _ = source.rpartition(":")
    first, _, _ = source.partition("/")
    if is_local(source) or (not colon and (Path(first).is_dir() or Path(source).suffix.lower() in ENDINGS)):
        return "file"
    if _HUB.fullmatch(source) and not place.endswith(".py"):
        return "hub"
    return "code" if colon else "file"


def load_rows(source: Any) -> PromptRows:
    """Rows from a path, a hub id, an address of user code, or an object: the table above.

    Errors: `DataError`, also for whatever a function of the user's raises; `ConfigError` where it cannot be imported.
    """
    if not isinstance(source, (str, os.PathLike)):
        return as_rows(source, "the given rows")
    text = os.fspath(source)
    kind = "file" if isinstance(source, os.PathLike) else kind_of(source)
    if kind == "file":
        return open_rows(source)
    if kind == "hub":
        return _open_hub(text)
    found = load_object(text)
    if callable(found):
        _check_arguments(found, text)
        found = _run(found, text)
    return as_rows(found, text)


def as_rows(found: Any, source: str) -> PromptRows:
    """The rows of an object that a function returned, or a program gave. Errors: `DataError` that says what it was."""
    if isinstance(found, Mapping):
        names = ", ".join(map(str, list(found)[:8]))
        raise DataError(f"{source} gave {type(found).__name__} with {names}; expected rows: return one of its splits")
    if (table := _as_table(found, source)) is not None:
        return TableRows(table, source) if hasattr(table, "column_names") else _listed(table, source)
    if not isinstance(found, (str, bytes)):
        if isinstance(found, Sequence):
            return _listed(_run(lambda: list(found), source), source)
        if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
            return IndexedRows(found, source)
        if hasattr(found, "__iter__"):
            rows = _read_all(found, source)
            if type(found).__module__.partition(".")[0] == "datasets":
                rows = [{name: without_nulls(value) for name, value in row.items()} for row in rows]
            return _listed(rows, source)
    if inspect.iscoroutine(found):
        found.close()
    raise DataError(
        f"{source} gave {type(found).__name__}; expected rows (mappings of column to value): a list, an iterable, a data "
        "set with a length and rows by number, or a table"
    )


def _read_all(found: Any, source: str) -> list[Any]:
    rows = _run(lambda: list(islice(iter(found), ITERATED_ROWS + 1)), source)
    if len(rows) > ITERATED_ROWS:
        raise DataError(
            f"{source} gave {type(found).__name__}, which can only be iterated and has more than {ITERATED_ROWS:,} rows; "
            "shuffling and resuming need rows by number: end it (itertools.islice, IterableDataset.take), or return a "
            "list or a datasets.Dataset (Dataset.from_generator keeps its rows on disk)"
        )
    return rows


def _listed(rows: Sequence[Any], source: str) -> PromptRows:
    for index, row in enumerate(rows):
        _check_row(row, index, source)
    return ListRows(rows, source)


def _check_row(row: Any, index: int, source: str) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f"row {index + 1} of {source} is {type(row).__name__}; expected a mapping of column to value")


def _as_table(found: Any, source: str) -> Any:
    """An Arrow table of a data frame, without its index; its rows where Arrow has no type for a column; None of anything else."""
    is_pandas = type(found).__module__.partition(".")[0] == "pandas" and hasattr(found, "columns")
    if not is_pandas and not hasattr(found, "__arrow_c_stream__"):
        return None
    import pyarrow as pa

    try:
        if is_pandas:
            check_names([str(name) for name in found.columns], source)
        return pa.Table.from_pandas(found, preserve_index=False) if is_pandas else pa.table(found)
    except (pa.ArrowException, OverflowError) as error:
        if is_pandas:
            return found.astype(object).where(found.notna(), None).to_dict("records")
        raise DataError(
            f"{source} gave {type(found).__name__} with a column that Arrow has no type for: {error}; return a list of rows instead"
        ) from error


def _check_arguments(function: Callable[..., Any], source: str) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: the call itself says what is wrong
        return
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in fixed]
    if needed:
        raise DataError(f"{source} needs arguments ({', '.join(needed)}); a data function is called without any")


def _run(call: Callable[[], T], source: str) -> T:
    """User code whose errors are one line."""
    with user_code(lambda error: DataError(f"{source} raised {raised(error)}")):
        return call()


def require_data_hub(source: str) -> None:
    """What a data set of the hub needs to be read. Blocks for up to 5 s. Errors: `DataError`: not installed, or not reached."""
    name = source.split(":")[0]
    wanted = _WANTED.format(name, Path.cwd())
    if not installed("datasets"):
        raise DataError(f"{wanted} it needs the package `datasets`: {install('datasets')}")
    import datasets

    prepared = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()
    if not prepared and (silence := hub_silence(name, "dataset")) is not None:
        raise DataError(f"{wanted} it cannot be fetched: {silence}; {_LOCAL}")


def _open_hub(source: str) -> PromptRows:
    """Errors: `DataError`: as `require_data_hub`, or not of that name, with what the package says."""
    require_data_hub(source)
    import datasets

    name, *rest = source.split(":")
    try:
        found = datasets.load_dataset(name, rest[0] if len(rest) == 2 else None, split=rest[-1] if rest else None)
    except Exception as error:
        # Network, unknown name, configuration or split: each package version has its own types.
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"{_WANTED.format(name, Path.cwd())} {source!r} cannot be loaded: {said}; expected "
            f"org/name, org/name:split or org/name:config:split; {_LOCAL}"
        ) from error
    if isinstance(found, Mapping):
        if len(found) > 1:
            raise DataError(f"{source} has several splits ({', '.join(found)}); name one of them, like {name}:train")
        [found] = found.values()
    return as_rows(found, source)
