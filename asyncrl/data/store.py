"""The column store: rows of a batch by id, column by column; who may read them, and when they are gone.

    put --> rows, by (partition, id) --> claim (a task's cursor) --> get --> clear
    put (more columns of the same rows, such as advantages) -^

Guarantees
* A row is ready for a task when the columns that the task requires are there: presence is the only readiness signal.
  Each task claims a row once, in the order in which rows were first put; tasks do not see each other's cursors.
* `put` happens as a whole or not at all, whatever is wrong with its last column. A put into a full store clears nothing.
* Nothing is aliased: rows are copied in and out, or handed out as read-only arrays (`rows`).
* Bytes and rows are accounted for, an overwritten column once; after `clear` of everything both are 0, and the ids may
  be used again by every task.
* One event an operation to every observer, errors included; an observer that fails is counted and breaks nothing.

Columns that nobody declared pass through. Used from the loop's thread only; only `wait_claim` waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import anyio

from asyncrl.errors import DataError, LifecycleError

from .batch_meta import BatchMeta, Scalar
from .columns import Columns, clone, nbytes
from .partition import Field, Partition, StoreFull

__all__ = ["Field", "Store", "StoreEvent", "StoreFull", "StoreStatistics"]

Status: TypeAlias = Literal["ok", "error", "timeout"]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    op: str  # register, put, claim, unclaim, get, consumption, clear, close
    partition: str
    rows: int
    bytes: int  # moved by the operation
    seconds: float
    status: Status
    held_rows: int  # in the store, after it
    held_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    rows: int
    bytes: int
    most_rows: int
    most_bytes: int
    largest_row: int  # bytes, ever seen
    operations: dict[str, int]
    errors: dict[str, int]  # by operation, timeouts included
    observer_failures: int
    observer_failure: str | None  # the last one


@dataclass(slots=True)
class _Probe:
    """What an operation says about itself in its event."""

    rows: int = 0
    bytes: int = 0


class Store:
    def __init__(
        self,
        observers: Sequence[Callable[[StoreEvent], None]] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._observers = list(observers)
        self._clock = clock
        self._partitions: dict[str, Partition] = {}
        self._changed = anyio.Event()
        self._closed = False
        self._most_rows = self._most_bytes = self._largest_row = 0
        self._operations: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._observer_failures = 0
        self._observer_failure: str | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def register(
        self,
        partition: str,
        fields: Sequence[Field] = (),
        tasks: Sequence[str] = (),
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Open a partition. Doing it again in the same words is fine. Errors: DataError for other words."""
        with self._observed("register", partition):
            wanted = Partition(partition, fields, tasks, max_rows, max_bytes)
            if self._partitions.setdefault(partition, wanted).declaration != wanted.declaration:
                raise DataError(f"partition {partition!r} is registered already, with other fields, tasks or capacity")

    def close(self) -> None:
        """Forget everything; whoever waits hears LifecycleError. Closing twice is fine."""
        if self._closed:
            return
        with self._observed("close", "") as probe:
            probe.rows, probe.bytes = self._totals()
            self._partitions.clear()
            self._closed = True
            self._notify()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- in ----------------------------------------------------------------------------------------------------------

    def put(
        self,
        partition: str,
        ids: Sequence[str],
        columns: Mapping[str, Any],
        *,
        lengths: Sequence[int] | None = None,
        tags: Sequence[Mapping[str, Scalar]] | None = None,
    ) -> BatchMeta:
        """Write these columns of these rows; a column that is there is replaced, other columns of the row stay.

        lengths: tokens of each row; known from the first jagged per-token column, or from an earlier put, without it.
        Returns the rows with every field that all of them have now. Errors: KeyError for an unknown partition; DataError
        for columns that do not fit the rows, the declaration or what was put before; TypeError; StoreFull.
        """
        with self._observed("put", partition) as probe:
            part = self._partition(partition)
            put = part.prepare(ids, columns, lengths, tags)
            part.commit(put)
            probe.rows, probe.bytes = len(put.ids), put.bytes
            rows, size = self._totals()
            self._most_rows, self._most_bytes = max(self._most_rows, rows), max(self._most_bytes, size)
            self._largest_row = max(self._largest_row, part.largest_row)
            self._notify()
            return part.meta(put.ids)

    @contextmanager
    def cleared_on_error(self, partition: str, ids: Sequence[str]) -> Iterator[None]:
        """Whatever these rows become inside, they are gone if the block fails or is cancelled: a producer that could not
        finish its group, a worker that died. Where clearing fails as well, both errors are raised together."""
        try:
            yield
        except BaseException as error:
            try:
                part = self._partition(partition)
                self.clear(partition, [name for name in ids if name in part])
            except Exception as second:
                raise BaseExceptionGroup("rows could not be drained after a failure", [error, second]) from error
            raise

    # -- out ---------------------------------------------------------------------------------------------------------

    def claim(
        self,
        partition: str,
        task: str,
        required: Sequence[str] = (),
        *,
        min_rows: int = 1,
        max_rows: int | None = None,
        among: Iterable[str] | None = None,
    ) -> BatchMeta | None:
        """Rows with all `required` columns that `task` has not claimed yet, oldest first; None for fewer than `min_rows`.

        among: only these ids. Errors: KeyError for an unknown partition or task.
        """
        with self._observed("claim", partition) as probe:
            found = self._partition(partition).claim(task, required, min_rows, max_rows, among)
            probe.rows = 0 if found is None else len(found)
            return found

    async def wait_claim(
        self,
        partition: str,
        task: str,
        required: Sequence[str] = (),
        *,
        min_rows: int = 1,
        max_rows: int | None = None,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """As `claim`, but waits for the rows. Errors: also TimeoutError, and LifecycleError where the store is closed."""
        with self._observed("claim", partition) as probe:
            try:
                with anyio.fail_after(timeout_s):
                    while True:
                        changed = self._changed
                        found = self._partition(partition).claim(task, required, min_rows, max_rows, None)
                        if found is not None:
                            break
                        await changed.wait()
            except TimeoutError:
                raise TimeoutError(
                    f"task {task!r} waited {timeout_s} s for {min_rows} rows of {partition!r} with {list(required)}"
                ) from None
            probe.rows = len(found)
            return found

    def unclaim(self, meta: BatchMeta, task: str) -> None:
        """The task did not use these rows after all: it may claim them again. KeyError for a row it did not claim."""
        with self._observed("unclaim", meta.partition) as probe:
            consumed = self._partition(meta.partition).consumed(task)
            missing = [name for name in meta.ids if name not in consumed]
            if missing:
                raise KeyError(f"task {task!r} has not claimed the rows {missing[:5]} of {meta.partition!r}")
            consumed.difference_update(meta.ids)
            probe.rows = len(meta)
            self._notify()

    def get(self, meta: BatchMeta, fields: Sequence[str] | None = None) -> Columns:
        """Copies of these columns (all that `meta` knows of, without `fields`), rows in the order of `meta`.

        Moves no cursor. Errors: KeyError for a row or a column that is not there; DataError where nothing was named.
        """
        with self._observed("get", meta.partition) as probe:
            part = self._partition(meta.partition)
            columns: Columns = {}
            for name in _selected(meta, fields):
                values = part.values(meta.ids, name)
                columns[name] = part.column(values, name)
                probe.bytes += sum(nbytes(value) for value in values)
            probe.rows = len(meta)
            return columns

    def rows(self, meta: BatchMeta, fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The same row by row, and without a copy: arrays are the store's own, read-only. Containers are copied."""
        with self._observed("get", meta.partition) as probe:
            part = self._partition(meta.partition)
            found: list[dict[str, Any]] = [{} for _ in meta.ids]
            for name in _selected(meta, fields):
                values = part.values(meta.ids, name)
                probe.bytes += sum(map(nbytes, values))
                for row, value in zip(found, map(clone, values) if part.is_object(name) else values, strict=True):
                    row[name] = value
            probe.rows = len(meta)
            return found

    def meta(self, partition: str, ids: Sequence[str] | None = None) -> BatchMeta:
        """These rows (all, without `ids`), with every field that all of them have. KeyError for one that is not there."""
        part = self._partition(partition)
        return part.meta(part.ids() if ids is None else ids)

    def consumption(self, partition: str, task: str) -> tuple[int, int]:
        """(rows that the task has claimed, rows) of the partition."""
        with self._observed("consumption", partition):
            part = self._partition(partition)
            return len(part.consumed(task)), len(part)

    def clear(self, partition: str, ids: Iterable[str] | None = None) -> int:
        """Forget these rows (all, without `ids`); their ids may be used again. Returns how many.

        Errors: KeyError where one of them is not there; then none is cleared.
        """
        with self._observed("clear", partition) as probe:
            part = self._partition(partition)
            names = part.ids() if ids is None else tuple(dict.fromkeys(ids))
            probe.bytes = part.clear(names)
            probe.rows = len(names)
            return len(names)

    def statistics(self) -> StoreStatistics:
        rows, size = self._totals()
        return StoreStatistics(
            rows=rows,
            bytes=size,
            most_rows=self._most_rows,
            most_bytes=self._most_bytes,
            largest_row=self._largest_row,
            operations=dict(self._operations),
            errors=dict(self._errors),
            observer_failures=self._observer_failures,
            observer_failure=self._observer_failure,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _partition(self, name: str) -> Partition:
        if self._closed:
            raise LifecycleError("the store is closed")
        if name not in self._partitions:
            raise KeyError(f"the store has no partition {name!r}; registered are {list(self._partitions)}")
        return self._partitions[name]

    def _totals(self) -> tuple[int, int]:
        parts = self._partitions.values()
        return sum(len(part) for part in parts), sum(part.bytes for part in parts)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @contextmanager
    def _observed(self, op: str, partition: str) -> Iterator[_Probe]:
        if self._closed:
            raise LifecycleError("the store is closed")
        probe, started = _Probe(), self._clock()
        status: Status = "ok"
        try:
            yield probe
        except TimeoutError:
            status = "timeout"
            raise
        except BaseException:
            status = "error"
            raise
        finally:
            self._operations[op] += 1
            if status != "ok":
                self._errors[op] += 1
                probe = _Probe()  # it moved nothing
            seconds = self._clock() - started
            self._tell(StoreEvent(op, partition, probe.rows, probe.bytes, seconds, status, *self._totals()))

    def _tell(self, event: StoreEvent) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception as error:  # to look on is no reason to break what is looked at
                self._observer_failures += 1
                self._observer_failure = f"{type(error).__name__}: {error}"


def _selected(meta: BatchMeta, fields: Sequence[str] | None) -> Sequence[str]:
    names = meta.fields if fields is None else fields
    if isinstance(names, str) or not names:
        raise DataError(f"get from {meta.partition!r}: name the fields; the batch knows of {list(meta.fields)}")
    return names
