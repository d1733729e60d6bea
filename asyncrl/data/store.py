"""The store holds the rows of every whole group until the group is trained or dropped.

    put ──▶ rows of a whole group ──▶ score ──▶ ready ──▶ claim ──▶ write advantages, log-probs ──▶ packed ──▶ clear
             and its leases           rewards             ▲   unclaim (the step was aborted)  │                rows, leases
                                                          └──────────────────────────────────┘

A row is a trajectory. A column holds one value per row. Stages of the run write the columns `REWARDS`, `ADVANTAGES`,
`TURN_ADVANTAGES`, `REFERENCE` and `OLD`.

Guarantees
* A group is ready as soon as its rows have rewards. `ready` lists groups in the order in which they became ready. The groups of
  an aborted step become ready again, after the other ready groups.
* `put` and `score` copy arrays, because a caller may write to the arrays later. `put` does not copy arrays with a lease: these are
  views of shared memory, and the lender does not change this memory before the release of the lease.
* `clear` removes the rows and columns of a group, and releases its leases.

Only for the thread of the event loop. No method awaits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group, Ticket, Trajectory

TOKEN_DTYPES = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "sampled_logprobs": np.float32,
    "versions": np.int32,
}
# Arrays that a trajectory may lack. They need not have the shape of `tokens`.
OPTIONAL = ("routed_experts", "branches", "turns")
# Names of columns. Shapes: G members of the group, s scored tokens of a member, t replies of a member.
# [G] final rewards, each a float or None.
REWARDS = "rewards"
ADVANTAGES = "advantages"  # [G] float64
# G arrays [t] float64: with `algorithm.credit: discounted` the advantage of each reply. `ADVANTAGES` then holds each member's mean.
TURN_ADVANTAGES = "turn_advantages"
# G arrays [s] float32: log-probs of the scored tokens under the reference model.
REFERENCE = "reference_logprobs"
# G arrays [s] float32: log-probs of the scored tokens under the policy before the first update of the step.
OLD = "old_logprobs"
Column: TypeAlias = Sequence[Any] | npt.NDArray[Any]  # one value per member


class Lease(Protocol):
    """The right to read memory that belongs to a lender, such as a ring. Arrays of rows may be views of this memory."""

    def release(self) -> None:
        """Give the memory back to the lender. The store calls this after it has cleared the rows. A second call does nothing."""
        ...


@dataclass(slots=True)
class Rows:
    """The rows of one group, in member order."""

    group: Group
    columns: dict[str, Column] = field(default_factory=dict)
    leases: tuple[Lease, ...] = ()
    claimed: bool = False

    @property
    def group_id(self) -> int:
        """The id of the group, from its ticket."""
        return self.group.group_id


class StoreStatistics(NamedTuple):
    """Numbers of rows at present. `rows`: all rows. `claimed`: rows of claimed groups."""

    rows: int
    claimed: int


class Store:
    """The rows of all groups: see the module docstring."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """`recorder`: gets the gauge `queue/store/depth`, which counts rows."""
        self._recorder = recorder
        self._stored: dict[int, Rows] = {}  # by group id
        self._ready: dict[int, Ticket] = {}  # by group id, in the order of `ready`
        self._row_count = 0

    def close(self) -> None:
        """Remove all rows, so that no view of shared memory is left. Their leases are not released."""
        self._stored.clear()
        self._ready.clear()
        self._count(-self._row_count)

    def put(self, group: Group, leases: Sequence[Lease] = ()) -> Group:
        """Store the rows of a whole group. Returns the stored group. With `leases` only arrays of another dtype are copied.

        Errors: DataError for a group that is already stored, or arrays of a member with different lengths.
        """
        if group.group_id in self._stored:
            raise DataError(f"group {group.group_id} is in the store already; clear the group first")
        members = tuple(_checked(t, group.group_id, copy=not leases) for t in group.trajectories)
        rows = self._stored[group.group_id] = Rows(replace(group, trajectories=members), {}, tuple(leases))
        self._count(len(members))
        return rows.group

    def score(self, group: Group) -> None:
        """Replace a stored group by `group`, the same group with final rewards and components.

        If an array of a member is not the stored array, the member's arrays are copied: user code may change that array later.
        Errors: KeyError for a group that is not stored, DataError for another number of members.
        """
        rows = self.rows(group.group_id)
        if len(group.trajectories) != len(rows.group.trajectories):
            raise DataError(
                f"group {group.group_id} was scored with {len(group.trajectories)} members, and is stored with "
                f"{len(rows.group.trajectories)}; score every member"
            )
        pairs = zip(group.trajectories, rows.group.trajectories, strict=True)
        members = tuple(t if _same_arrays(t, old) else _checked(t, group.group_id, copy=True) for t, old in pairs)
        rows.group = replace(group, trajectories=members)
        rows.columns[REWARDS] = [t.reward for t in members]
        self._update_ready(rows)

    def write(self, group_id: int, column: str, values: Column) -> None:
        """Write or replace a column. `values`: one per member. The store does not copy `values`, so do not change them later.

        Errors: KeyError for a group that is not stored, DataError for another number of values.
        """
        rows = self.rows(group_id)
        members = len(rows.group.trajectories)
        if len(values) != members:
            found = f"{len(values)} values of {column} for {members} members"
            raise DataError(f"group {group_id}: {found}; give one value per member")
        rows.columns[column] = values

    def ready(self) -> list[Ticket]:
        """Tickets of the groups that are ready and not claimed, in the order in which they became ready."""
        return list(self._ready.values())

    def claim(self, group_id: int) -> Rows:
        """Take a ready group for a step. Errors: KeyError for a group that is not ready."""
        del self._ready[group_id]
        rows = self._stored[group_id]
        rows.claimed = True
        return rows

    def unclaim(self, group_id: int) -> None:
        """Make a group ready again after its step was aborted. Of the step's columns only `REFERENCE` is kept. Errors: KeyError."""
        rows = self.rows(group_id)
        for column in (ADVANTAGES, TURN_ADVANTAGES, OLD):
            rows.columns.pop(column, None)
        rows.claimed = False
        self._update_ready(rows)

    def clear(self, group_ids: Iterable[int], *, release: bool = True) -> int:
        """Remove the rows of these groups and release their leases. Returns the number of removed rows.

        Groups that are not stored are skipped. `release=False` releases no leases: lenders must keep groups that were not trained.
        """
        cleared = [rows for group_id in group_ids if (rows := self._stored.pop(group_id, None)) is not None]
        count = sum(len(rows.group.trajectories) for rows in cleared)
        self._count(-count)
        for rows in cleared:
            self._ready.pop(rows.group_id, None)
        # The stack releases all leases, even if a release fails. It calls the last callback first, so the list is reversed.
        with ExitStack() as stack:
            for lease in reversed([lease for rows in cleared for lease in rows.leases] if release else []):
                stack.callback(lease.release)
        return count

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._stored

    def rows(self, group_id: int) -> Rows:
        """The rows of a group. Errors: KeyError for a group that is not stored."""
        if group_id not in self._stored:
            raise KeyError(f"group {group_id} is not in the store")
        return self._stored[group_id]

    def statistics(self) -> StoreStatistics:
        claimed = sum(len(rows.group.trajectories) for rows in self._stored.values() if rows.claimed)
        return StoreStatistics(self._row_count, claimed)

    def _update_ready(self, rows: Rows) -> None:
        if not rows.claimed and REWARDS in rows.columns:
            self._ready.setdefault(rows.group_id, rows.group.ticket)

    def _count(self, change: int) -> None:
        self._row_count += change
        if self._recorder is not None:
            self._recorder.gauge("queue/store/depth", self._row_count)


def copy_group(group: Group) -> Group:
    """A group with copies of all arrays, which stay valid after the release of the group's leases."""
    return replace(group, trajectories=tuple(replace(t, **copy_arrays(t)) for t in group.trajectories))


def copy_arrays(trajectory: Trajectory) -> dict[str, Any]:
    """Copies of the arrays of a trajectory, by field name."""
    arrays = {name: getattr(trajectory, name) for name in (*TOKEN_DTYPES, *OPTIONAL)}
    return {name: array.copy() for name, array in arrays.items() if array is not None}


def _same_arrays(a: Trajectory, b: Trajectory) -> bool:
    return all(getattr(a, name) is getattr(b, name) for name in (*TOKEN_DTYPES, *OPTIONAL))


def _checked(trajectory: Trajectory, group_id: int, *, copy: bool) -> Trajectory:
    """The trajectory with arrays of TOKEN_DTYPES. Copied arrays are read-only. Errors: DataError for different shapes."""
    columns: dict[str, Any] = {}
    for name, dtype in TOKEN_DTYPES.items():
        array = getattr(trajectory, name)
        if np.shape(array) != np.shape(trajectory.tokens):
            raise DataError(
                f"group {group_id}, member {trajectory.member}: {name} has shape {np.shape(array)}, tokens "
                f"{np.shape(trajectory.tokens)}; expected one shape"
            )
        if copy or array.dtype != dtype:
            columns[name] = np.array(array, dtype=dtype)
            columns[name].flags.writeable = False
    for name in OPTIONAL if copy else ():
        if (array := getattr(trajectory, name)) is not None:
            columns[name] = array.copy()
            columns[name].flags.writeable = False
    return replace(trajectory, **columns) if columns else trajectory
