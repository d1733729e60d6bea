"""The data plane: the rows of every group, from the moment it is whole until it was trained or dropped.

    put ──▶ rows of a whole group ──▶ score ──▶ ready ──▶ claim ──▶ write advantages, log-probs ──▶ packed ──▶ clear
             a lease beside them      rewards             ▲   unclaim (the step was aborted)  │                rows, lease
                                                          └──────────────────────────────────┘

A row is a trajectory; a column holds one value a row. A stage reads the columns that it needs and writes those that it makes
(`REWARDS`, `ADVANTAGES`, `REFERENCE`, `OLD`).

Guarantees
* Presence is readiness: a group can be claimed once its rows have every required column, once, in the order in which they
  became ready. A step that was aborted gives its groups back, behind the others.
* What a caller may still write to is copied in. Rows under a lease are not: their arrays are views of shared memory, which
  stay as they are until the lease ends.
* One `clear` ends rows, columns and leases. Afterwards nothing of the group is held here.
* One event an operation to every observer, errors included; an observer that fails is counted and breaks nothing.

Used from the loop's thread only; nothing waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError, LifecycleError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group, Ticket, Trajectory

TOKEN_DTYPES = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "sampled_logprobs": np.float32,
    "versions": np.int32,
}
# [G] float or None; there once the group is scored, shaped and through the filters.
REWARDS = "rewards"
ADVANTAGES = "advantages"  # [G] float64
# [G] of [s] float32: of the scored tokens, under the reference.
REFERENCE = "reference_logprobs"
# [G] of [s] float32: of the scored tokens, under the policy before the batch's first update.
OLD = "old_logprobs"
Column: TypeAlias = Sequence[Any] | npt.NDArray[Any]  # one value a member
Status: TypeAlias = Literal["ok", "error"]


class Lease(Protocol):
    """Somebody else's memory, in which rows lie."""

    def release(self) -> None:
        """The rows were cleared: the memory may be used again. The store calls it once."""
        ...


@dataclass(slots=True)
class Rows:
    """The rows of one group, members in order."""

    group: Group
    columns: dict[str, Column] = field(default_factory=dict)
    leases: tuple[Lease, ...] = ()
    claimed: bool = False
    # Of the per-token columns of the trajectories, and of what was written; the store keeps it.
    bytes: int = 0

    @property
    def group_id(self) -> int:
        """The id of the group."""
        return self.group.group_id

    def measured(self) -> int:
        """What `bytes` is, counted anew."""
        return sum(nbytes(t) for t in self.group.trajectories) + sum(map(_bytes, self.columns.values()))


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One operation of the store, as observers hear of it when it is over."""

    op: str  # put, score, write, claim, unclaim, clear, close
    group_id: int  # -1: of several
    rows: int
    bytes: int  # of the rows that the operation touched
    seconds: float
    status: Status
    held_rows: int  # in the store, after it
    held_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the store holds now, and how its observers fared."""

    rows: int
    bytes: int
    claimed: int  # rows
    observer_failures: int
    observer_failure: str | None  # the last one


class Store:
    """See the module docstring. A context manager, which closes it."""

    def __init__(
        self,
        observers: Sequence[Callable[[StoreEvent], None]] = (),
        *,
        required: Sequence[str] = (REWARDS,),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`required`: the columns without which a group cannot be claimed."""
        self._observers = list(observers)
        self._required = frozenset(required)
        self._clock = clock
        self._held: dict[int, Rows] = {}  # by group id
        self._ready: dict[int, Ticket] = {}  # of those that can be claimed, in order
        self._rows = self._bytes = 0
        self._closed = False
        self._observer_failures = 0
        self._observer_failure: str | None = None

    def close(self) -> None:
        """Forget everything; leases are not ended. Closing twice is fine."""
        if not self._closed:
            with self._observed("close", -1, self._rows, self._bytes):
                self._held.clear()
                self._ready.clear()
                self._rows = self._bytes = 0
            self._closed = True

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- in ----------------------------------------------------------------------------------------------------------

    def put(self, group: Group, leases: Sequence[Lease] = ()) -> Group:
        """The rows of a whole group, and the group as it lies here. With `leases` its arrays are not copied.

        Errors: DataError for a group that is here, or a column that is not as long as its tokens.
        """
        with self._observed("put", group.group_id) as touched:
            if group.group_id in self._held:
                raise DataError(f"group {group.group_id} is in the store already")
            members = tuple(_checked(t, group.group_id, copy=not leases) for t in group.trajectories)
            rows = self._held[group.group_id] = Rows(replace(group, trajectories=members), {}, tuple(leases))
            rows.bytes = rows.measured()
            touched(rows)
            self._rows += len(members)
            self._bytes += rows.bytes
            return rows.group

    def score(self, group: Group) -> None:
        """Rewards and components are final: `group` takes the place of what was put. Arrays that are not those that lie here
        (of a user's own code, which may keep them) are copied in. Errors: KeyError, DataError."""
        with self._observed("score", group.group_id) as touched:
            rows = self._of(group.group_id)
            if len(group.trajectories) != len(rows.group.trajectories):
                raise DataError(f"group {group.group_id}: another number of members was scored than was put")
            pairs = zip(group.trajectories, rows.group.trajectories, strict=True)
            members = tuple(t if _same_arrays(t, here) else _checked(t, group.group_id, copy=True) for t, here in pairs)
            with self._accounted(rows):
                rows.group = replace(group, trajectories=members)
                rows.columns[REWARDS] = [t.reward for t in members]
            touched(rows)
            self._look(rows)

    def write(self, group_id: int, column: str, values: Column) -> None:
        """One value a member, which are the store's from here on; a column that is there is replaced. Errors: KeyError,
        DataError."""
        with self._observed("write", group_id) as touched:
            rows = self._of(group_id)
            if len(values) != len(rows.group.trajectories):
                raise DataError(
                    f"group {group_id}: {len(values)} values of {column} for {len(rows.group.trajectories)} members"
                )
            with self._accounted(rows):
                rows.columns[column] = values
            touched(rows)
            self._look(rows)

    # -- out ---------------------------------------------------------------------------------------------------------

    def ready(self) -> list[Ticket]:
        """Of the groups that have every required column and are not claimed, in the order in which they became ready."""
        return list(self._ready.values())

    def claim(self, group_id: int) -> Rows:
        """Errors: KeyError for a group that is not ready."""
        with self._observed("claim", group_id) as touched:
            del self._ready[group_id]
            rows = self._held[group_id]
            rows.claimed = True
            touched(rows)
            return rows

    def unclaim(self, group_id: int) -> None:
        """Its step was aborted: what the step wrote is forgotten, and the group is ready again. Errors: KeyError."""
        with self._observed("unclaim", group_id) as touched:
            rows = self._of(group_id)
            with self._accounted(rows):
                for column in (ADVANTAGES, OLD):
                    rows.columns.pop(column, None)
            rows.claimed = False
            touched(rows)
            self._look(rows)

    def clear(self, group_ids: Iterable[int], *, release: bool = True) -> int:
        """Forget the rows of these groups, those that are here, and end their leases; `release` False: only forget, the
        owner of the memory keeps what nobody trained. Returns how many rows."""
        found = [rows for group_id in group_ids if (rows := self._held.pop(group_id, None)) is not None]
        if not found:
            return 0
        count, size = sum(len(rows.group.trajectories) for rows in found), sum(rows.bytes for rows in found)
        with self._observed("clear", found[0].group_id if len(found) == 1 else -1, count, size):
            self._rows -= count
            self._bytes -= size
            for rows in found:
                self._ready.pop(rows.group_id, None)
            if release:
                _end([lease for rows in found for lease in rows.leases])
        return count

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._held

    def rows(self, group_id: int) -> Rows:
        """Raises KeyError where the store does not hold that group."""
        return self._of(group_id)

    def statistics(self) -> StoreStatistics:
        claimed = sum(len(rows.group.trajectories) for rows in self._held.values() if rows.claimed)
        return StoreStatistics(self._rows, self._bytes, claimed, self._observer_failures, self._observer_failure)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _of(self, group_id: int) -> Rows:
        if group_id not in self._held:
            raise KeyError(f"group {group_id} is not in the store")
        return self._held[group_id]

    def _look(self, rows: Rows) -> None:
        if not rows.claimed and self._required <= rows.columns.keys():
            self._ready.setdefault(rows.group_id, rows.group.ticket)

    @contextmanager
    def _accounted(self, rows: Rows) -> Iterator[None]:
        try:
            yield
        finally:
            before, rows.bytes = rows.bytes, rows.measured()
            self._bytes += rows.bytes - before

    @contextmanager
    def _observed(self, op: str, group_id: int, rows: int = 0, size: int = 0) -> Iterator[Callable[[Rows], None]]:
        if self._closed:
            raise LifecycleError("the store is closed")
        started = self._clock()
        status: Status = "ok"
        moved = [rows, size]

        def touched(found: Rows) -> None:
            moved[:] = len(found.group.trajectories), found.bytes

        try:
            yield touched
        except BaseException:
            status, moved[:] = "error", (0, 0)
            raise
        finally:
            seconds = self._clock() - started
            self._tell(StoreEvent(op, group_id, moved[0], moved[1], seconds, status, self._rows, self._bytes))

    def _tell(self, event: StoreEvent) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception as error:  # to look on is no reason to break what is looked at
                self._observer_failures += 1
                self._observer_failure = f"{type(error).__name__}: {error}"


def owned(group: Group) -> Group:
    """With arrays of its own: for whoever keeps a group longer than its lease."""
    return replace(group, trajectories=tuple(replace(t, **copied(t)) for t in group.trajectories))


def copied(trajectory: Trajectory) -> dict[str, Any]:
    """Its per-token columns, each an array of its own."""
    columns = {name: getattr(trajectory, name).copy() for name in TOKEN_DTYPES}
    routes = trajectory.routed_experts
    return columns if routes is None else columns | {"routed_experts": routes.copy()}


def nbytes(trajectory: Trajectory) -> int:
    """Bytes of its per-token columns."""
    t = trajectory
    routes = 0 if t.routed_experts is None else t.routed_experts.nbytes
    return t.tokens.nbytes + t.mask.nbytes + t.logprobs.nbytes + t.sampled_logprobs.nbytes + t.versions.nbytes + routes


def _end(leases: Sequence[Lease]) -> None:
    """In this order, each of them also where one fails."""
    with ExitStack() as ending:
        for lease in reversed(leases):
            ending.callback(lease.release)


def _same_arrays(a: Trajectory, b: Trajectory) -> bool:
    return all(getattr(a, name) is getattr(b, name) for name in (*TOKEN_DTYPES, "routed_experts"))


def _checked(trajectory: Trajectory, group_id: int, *, copy: bool) -> Trajectory:
    """With the dtypes of `types.Trajectory`, read-only where it is a copy."""
    columns: dict[str, Any] = {}
    for name, kind in TOKEN_DTYPES.items():
        given = getattr(trajectory, name)
        if np.shape(given) != np.shape(trajectory.tokens):
            raise DataError(
                f"group {group_id}, member {trajectory.member}: {name} has shape {np.shape(given)}, tokens "
                f"{np.shape(trajectory.tokens)}"
            )
        if copy or given.dtype != kind:
            columns[name] = np.array(given, dtype=kind)
            columns[name].flags.writeable = False
    if copy and trajectory.routed_experts is not None:
        columns["routed_experts"] = trajectory.routed_experts.copy()
        columns["routed_experts"].flags.writeable = False
    return replace(trajectory, **columns) if columns else trajectory


def _bytes(column: Column) -> int:
    if isinstance(column, np.ndarray):
        return column.nbytes
    return sum(value.nbytes if isinstance(value, np.ndarray) else 8 for value in column)


def store_metrics(recorder: Recorder) -> Callable[[StoreEvent], None]:
    """An observer that puts every operation into the metrics of the step."""

    def observe(event: StoreEvent) -> None:
        recorder.gauge("queue/store/depth", event.held_rows)
        recorder.observe("store/bytes", event.held_bytes, reduce="max")
        recorder.observe(f"store/{event.op}_ms", 1e3 * event.seconds)
        if event.status != "ok":
            recorder.count(f"store/{event.op}_{event.status}")

    return observe
