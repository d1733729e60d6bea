"""The stash keeps the trajectories of a group until the group is whole. Trajectories of several groups may interleave.

    add(trajectory) --> [ waiting groups, by (epoch, group id) ] --> `StashedGroup` of a whole group, members 0..G-1
                               |  timeout · too old · epoch over · discard
                               `--> `StashedGroup` with the members that arrived, to be trained (PARTIAL) or released

Guarantees
* At most `max_groups` groups wait. Each waiting group leaves the stash once, as a `StashedGroup` with its members in order.
* The key of a group is (epoch, group id). A producer that restarts uses a new epoch, so groups of its new epoch never mix
  with incomplete groups of an old epoch.
* A second, equal trajectory of a member is a DUPLICATE and changes nothing. A trajectory that contradicts its group is
  refused by `StashRefused` and changes nothing.
* A trajectory of an ended group is LATE and changes nothing. The stash remembers the newest `TOMBSTONES` ended groups.

Not thread-safe. Only `wait_expired` awaits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import anyio

from asyncrl.errors import DataError, StallError
from asyncrl.types import Trajectory

C = TypeVar("C")
MIN_PARTIAL = 2  # members that an incomplete group needs to be trained
# Ended groups that the stash remembers: more than are ever in flight.
TOMBSTONES = 65_536


class GroupKey(NamedTuple):
    """Each start of a producer has a new `epoch`, because the producer may reuse group ids. Epoch 0: a group of this process."""

    epoch: int
    group_id: int


class Ending(StrEnum):
    """Why a group left the stash."""

    WHOLE = "whole"
    PARTIAL = "partial"  # timeout, and the group is trained with its present members
    TIMEOUT = "timeout"
    STALE = "stale"  # a token is too old
    EPOCH = "epoch over"  # the producer ended
    DISCARDED = "discarded"  # by the caller


class Status(StrEnum):
    """The result of `Stash.add` for a trajectory that ends no group."""

    WAITING = "waiting"
    DUPLICATE = "duplicate"
    LATE = "late"  # the group had already left the stash


class StashRefused(DataError):
    """A trajectory was refused, and the stash did not change."""

    def __init__(self, message: str) -> None:
        super().__init__(f"stash: {message}")


@dataclass(frozen=True, slots=True)
class StashedGroup(Generic[C]):
    """A group that left the stash. `leases` has one lease per trajectory, in the same order."""

    key: GroupKey
    ending: Ending
    context: C  # of the trajectory that arrived first
    size: int
    trajectories: tuple[Trajectory, ...]  # by member; a whole group has 0..size-1
    leases: tuple[Any, ...]

    @property
    def trainable(self) -> bool:
        """Whether the group is whole, or is trained without its missing members."""
        return self.ending in (Ending.WHOLE, Ending.PARTIAL)


@dataclass(slots=True)
class _Entry(Generic[C]):
    context: C
    size: int
    began: float  # arrival of the first trajectory, on `clock`
    members: dict[int, tuple[Trajectory, Any]] = field(default_factory=dict)


class Stash(Generic[C]):
    """Collects the trajectories of groups: see the module docstring. `C` is the type of the caller's data for a group."""

    def __init__(
        self,
        max_groups: int,
        *,
        timeout_s: float | None = None,
        on_timeout: Literal["drop", "partial", "error"] = "drop",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_groups: limit of waiting groups. A trajectory of a further group is refused.

        timeout_s: seconds on `clock` from the first trajectory of a group to its timeout. on_timeout: `drop` ends the group as
        TIMEOUT. `partial` ends a group as PARTIAL if at least `MIN_PARTIAL` members are present, as TIMEOUT if fewer are present.
        `error` raises StallError.
        """
        self._max_groups, self._clock = max_groups, clock
        self._timeout, self._on_timeout = timeout_s, on_timeout
        self._waiting: dict[GroupKey, _Entry[C]] = {}  # in order of first arrival
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._oldest_allowed = 0
        self._new_group = anyio.Event()

    def add(
        self, trajectory: Trajectory, context: C, *, lease: Any = None, epoch: int = 0, group: int | None = None
    ) -> Status | StashedGroup[C]:
        """Add one trajectory. Returns a Status if its group goes on or had ended. Returns the group if this trajectory ends it.

        `group`: the producer's id of the group, if `trajectory.group_id` is another id. `lease`: for `StashedGroup.leases`. With
        DUPLICATE or LATE, or after an error, the caller must release `lease`.
        Errors: StashRefused if the trajectory contradicts its group, or belongs to a group beyond `max_groups`.
        """
        key = GroupKey(epoch, trajectory.group_id if group is None else group)
        if key in self._ended:
            return Status.LATE
        entry = self._waiting.get(key)
        member, size = trajectory.member, trajectory.group_size
        name = f"member {member} of {_name(key)}"
        if entry is not None and size != entry.size:
            raise StashRefused(f"{name} has group size {size}; the group began with size {entry.size}")
        if not 0 <= member < size:
            raise StashRefused(f"{name} is out of range: the group has size {size}, so members are 0 to {size - 1}")
        if entry is not None and member in entry.members:
            if same_trajectory(entry.members[member][0], trajectory):
                return Status.DUPLICATE
            raise StashRefused(f"{name} arrived twice with different contents; the first is kept")
        if entry is None:
            if len(self._waiting) >= self._max_groups:
                raise StashRefused(f"{_name(key)} exceeds the limit of {self._max_groups} waiting groups; retry later")
            entry = self._waiting[key] = _Entry(context, size, self._clock())
            self._new_group.set()
            self._new_group = anyio.Event()
        entry.members[member] = (trajectory, lease)
        if self._too_old(trajectory):
            return self._end(key, Ending.STALE)
        return self._end(key, Ending.WHOLE) if len(entry.members) == entry.size else Status.WAITING

    def _too_old(self, trajectory: Trajectory) -> bool:
        # Without a sampled token of a known version `oldest_version` is -1.
        return self._oldest_allowed > 0 and 0 <= trajectory.oldest_version < self._oldest_allowed

    def expire(self) -> list[StashedGroup[C]]:
        """End the groups whose timeout has passed, oldest first. Errors: StallError with `on_timeout="error"`."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= self._clock():
            key, entry = next(iter(self._waiting.items()))
            if self._on_timeout == "error":
                missing = [m for m in range(entry.size) if m not in entry.members]
                raise StallError(
                    f"stash: {_name(key)} waited {self._timeout} s for its members {missing} of {entry.size}; the producer "
                    "ended or is too slow: set a longer door.timeout_s, or door.on_timeout to drop or partial"
                )
            partial = self._on_timeout == "partial" and len(entry.members) >= MIN_PARTIAL
            expired.append(self._end(key, Ending.PARTIAL if partial else Ending.TIMEOUT))
        return expired

    def next_deadline(self) -> float | None:
        """The time on `clock` of the next timeout. None without a timeout or without waiting groups."""
        if self._timeout is None or not self._waiting:
            return None
        return next(iter(self._waiting.values())).began + self._timeout

    async def wait_expired(self) -> list[StashedGroup[C]]:
        """Wait until `expire()` ends a group. `clock` must run at the speed of real time. Errors: StallError."""
        while True:
            new_group = self._new_group
            if expired := self.expire():
                return expired
            deadline = self.next_deadline()
            if deadline is None:
                await new_group.wait()
            else:
                await anyio.sleep(max(0.0, deadline - self._clock()))

    def evict_stale(self, version: int, max_staleness: int) -> list[StashedGroup[C]]:
        """End the groups with a token older than `version - max_staleness`. From now on `add` ends a group with such a token, too.

        Tokens of future or unknown versions are never too old.
        """
        self._oldest_allowed = max(self._oldest_allowed, version - max_staleness)
        waiting = self._waiting.items()
        stale = [key for key, entry in waiting if any(self._too_old(t) for t, _ in entry.members.values())]
        return [self._end(key, Ending.STALE) for key in stale]

    def end_epoch(self, epoch: int) -> list[StashedGroup[C]]:
        """End all groups of an epoch, because its producer ended and the groups can never be whole."""
        return [self._end(key, Ending.EPOCH) for key in list(self._waiting) if key.epoch == epoch]

    def discard(self, group_id: int, epoch: int = 0) -> StashedGroup[C] | None:
        """End one group. Its later members are LATE. Returns None if no member of the group was waiting."""
        key = GroupKey(epoch, group_id)
        if key in self._waiting:
            return self._end(key, Ending.DISCARDED)
        self._remember_ended(key)
        self._ended.move_to_end(key)  # the group may have ended before
        return None

    def _end(self, key: GroupKey, ending: Ending) -> StashedGroup[C]:
        entry = self._waiting.pop(key)
        self._remember_ended(key)
        trajectories, leases = zip(*[entry.members[member] for member in sorted(entry.members)], strict=True)
        return StashedGroup(key, ending, entry.context, entry.size, trajectories, leases)

    def _remember_ended(self, key: GroupKey) -> None:
        # A plain tuple equals the GroupKey, and the garbage collector does not track a tuple of integers.
        self._ended[key.epoch, key.group_id] = None
        if len(self._ended) > TOMBSTONES:
            self._ended.popitem(last=False)


def same_trajectory(a: Trajectory, b: Trajectory) -> bool:
    """Whether arrays, rewards, temperature, prompt length and finish reason of two trajectories are bitwise equal, also NaN."""
    return _contents(a) == _contents(b)


def _contents(t: Trajectory) -> list[Any]:
    columns = (t.tokens, t.mask, t.logprobs, t.sampled_logprobs, t.versions, t.routed_experts, t.branches, t.turns)
    arrays = [None if column is None else (column.dtype, column.shape, column.tobytes()) for column in columns]
    numbers = [
        None if value is None else float(value).hex() for value in (t.temperature, t.reward, *(t.turn_rewards or ()))
    ]
    return [t.prompt_length, str(t.finish_reason), *numbers, *arrays]


def _name(key: GroupKey) -> str:
    return f"group {key.group_id}" + (f" of epoch {key.epoch}" if key.epoch else "")
