"""The stash: where interleaved trajectories wait until their group is whole.

    add(trajectory) --> [ waiting groups, by (epoch, group id) ] --> whole, once, members in order 0..G-1
                               |  timeout · too old · epoch over · discard
                               `--> an ended `StashedGroup` with what was here, so that its slot and leases go back

Guarantees
* a group is yielded exactly once, in completion order, with its members in order, whatever the arrival order;
* a group is named by (epoch, group id), never by its prompt: a producer that restarts takes a new epoch, and its
  groups never mix with the half-filled ones of its former life;
* the same member again is idempotent (DUPLICATE); one that contradicts the group is refused (`StashRefused`, with its
  reason): the first is kept and nothing changes;
* a trajectory of a group that ended is LATE and goes nowhere: ended groups are remembered, the oldest forgotten first;
* what is here is bounded in groups; every group that was here leaves through exactly one `StashedGroup`.

Used from one thread; only `wait_expired` waits.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar

import anyio

from asyncrl.errors import DataError, StallError
from asyncrl.records.trajectories import whole_group
from asyncrl.types import RoutesArray, Trajectory

from .store import nbytes

C = TypeVar("C")
MIN_PARTIAL = 2  # members of a group that is trained without the others
# Ended groups remembered; more than any pipeline holds at once.
TOMBSTONES = 65_536


class GroupKey(NamedTuple):
    """`epoch`: the life of the producer that numbers the groups; 0 for this process."""

    epoch: int
    group_id: int


class Ending(StrEnum):
    """How a group left the stash."""

    WHOLE = "whole"
    PARTIAL = "partial"  # its time was up, and the policy takes what there is
    TIMEOUT = "timeout"
    STALE = "stale"  # too old to be trained
    EPOCH = "epoch over"  # its producer is gone
    DISCARDED = "discarded"  # the caller ended it


class Status(StrEnum):
    """What became of a trajectory that was not refused."""

    WAITING = "waiting"
    WHOLE = "whole"  # it completed its group
    DUPLICATE = "duplicate"
    LATE = "late"  # its group had ended
    STALE = "stale"  # too old; it ended its group


class Refusal(StrEnum):
    """What is wrong with a trajectory that the stash refuses."""

    MEMBER = "no such member"
    SIZE = "conflicting group size"
    CONFLICT = "conflicting member"
    GROUPS = "too many groups"


class StashRefused(DataError):
    """A trajectory was refused; the stash is as it was. `reason` is for counters and replies to producers."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(f"stash: {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StashedGroup(Generic[C]):
    """A group that left the stash. `leases` are those of `trajectories`, in the same order."""

    key: GroupKey
    ending: Ending
    context: C  # of its first trajectory
    size: int
    trajectories: tuple[Trajectory, ...]  # ascending members; all of 0..size-1 where whole
    leases: tuple[Any, ...]

    @property
    def trainable(self) -> bool:
        """Whether it is whole, or so nearly that it is trained without the members that are missing."""
        return self.ending in (Ending.WHOLE, Ending.PARTIAL)


@dataclass(frozen=True, slots=True)
class Arrival(Generic[C]):
    """`ended`: its own group, where it was STALE."""

    status: Status
    whole: StashedGroup[C] | None = None
    ended: tuple[StashedGroup[C], ...] = ()


_WAITING: Arrival[Any] = Arrival(Status.WAITING)


@dataclass(frozen=True, slots=True)
class StashStatistics:
    """What waits now, and what came and left since the stash was made."""

    waiting_groups: int
    waiting_trajectories: int
    waiting_bytes: int
    accepted: int  # trajectories
    duplicates: int
    late: int
    stale: int
    refused: dict[Refusal, int]
    endings: dict[Ending, int]


@dataclass(slots=True)
class _Entry(Generic[C]):
    context: C
    size: int
    bytes: int = 0
    members: dict[int, tuple[Trajectory, Any]] = field(default_factory=dict)


class Stash(Generic[C]):
    """See the module docstring. `C` is the type of what a caller keeps with a group, its context."""

    def __init__(
        self,
        max_groups: int,
        *,
        timeout_s: float | None = None,
        on_timeout: Literal["drop", "partial", "error"] = "drop",
        tombstones: int = TOMBSTONES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_groups: that wait here; members of one more are refused.

        timeout_s: seconds on `clock` from the group's first arrival until it counts as incomplete for good: it is dropped,
        yielded with the members that are here (at least `MIN_PARTIAL`, else dropped), or StallError.
        """
        if max_groups < 1 or tombstones < 1:
            raise ValueError(f"stash: max_groups {max_groups} and tombstones {tombstones} must be at least 1")
        self._max_groups = max_groups
        self._timeout, self._on_timeout = timeout_s, on_timeout
        self._tombstones, self._clock = tombstones, clock
        self._waiting: dict[GroupKey, _Entry[C]] = {}  # in order of first arrival
        self._since: OrderedDict[GroupKey, float] = OrderedDict()  # what the timeout counts from, ascending
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._oldest_allowed = 0
        self._bytes = self._accepted = self._duplicates = self._late = self._stale = 0
        self._refused: Counter[Refusal] = Counter()
        self._endings: Counter[Ending] = Counter()
        # WHOLE endings of `add_whole`; in `statistics` with the others.
        self._together = 0
        self._arrived = anyio.Event()

    # -- in ------------------------------------------------------------------------------------------------------

    def add(
        self, trajectory: Trajectory, context: C, *, lease: Any = None, epoch: int = 0, group: int | None = None
    ) -> Arrival[C]:
        """Take one trajectory. `lease` comes back with its group; of a duplicate or late one the caller keeps it.

        `group`: what its producer calls the group, where the trajectory has another id already.

        Errors: StashRefused for a member, a size or a content that contradicts the group, or a cap that is reached.
        """
        key = GroupKey(epoch, trajectory.group_id if group is None else group)
        if key in self._ended:
            self._late += 1
            return Arrival(Status.LATE)
        entry = self._waiting.get(key)
        member, size = trajectory.member, nbytes(trajectory)
        if not 0 <= member < trajectory.group_size or (entry is not None and trajectory.group_size != entry.size):
            self._refuse_member(key, entry, trajectory)
        if entry is not None and member in entry.members:
            return self._again(key, entry, trajectory)
        if entry is None:
            if len(self._waiting) >= self._max_groups:
                name = _name(key)
                self._refuse(Refusal.GROUPS, f"{name} is one more than the {self._max_groups} groups that may wait")
            entry = self._waiting[key] = _Entry(context, trajectory.group_size)
        entry.members[member] = (trajectory, lease)
        entry.bytes += size
        self._bytes += size
        self._accepted += 1
        self._stamp(key)
        if self._too_old(trajectory):
            self._stale += 1
            return Arrival(Status.STALE, ended=(self._end(key, Ending.STALE),))
        if len(entry.members) < entry.size:
            return _WAITING
        return Arrival(Status.WHOLE, self._end(key, Ending.WHOLE))

    def add_whole(
        self,
        trajectories: Sequence[Trajectory],
        context: C,
        *,
        lease: Any = None,
        epoch: int = 0,
        group: int | None = None,
    ) -> StashedGroup[C] | None:
        """All members of one group that came together, as `add` of each would yield them. None, with nothing changed,
        where `add` has to look at each (some wait here, one is too old, a cap counts). Errors: ValueError for several groups."""
        if not whole_group(trajectories):
            return None
        key = GroupKey(epoch, trajectories[0].group_id if group is None else group)
        size = len(trajectories)
        capped = len(self._waiting) >= self._max_groups
        if capped or key in self._ended or key in self._waiting or any(map(self._too_old, trajectories)):
            return None
        self._accepted += size
        self._together += 1
        self._bury(key)
        return StashedGroup(key, Ending.WHOLE, context, size, tuple(trajectories), (lease,) * size)

    def _too_old(self, trajectory: Trajectory) -> bool:
        return self._oldest_allowed > 0 and 0 <= trajectory.oldest_version < self._oldest_allowed

    def _again(self, key: GroupKey, entry: _Entry[C], trajectory: Trajectory) -> Arrival[C]:
        if same(entry.members[trajectory.member][0], trajectory):
            self._duplicates += 1
            return Arrival(Status.DUPLICATE)
        name = f"member {trajectory.member} of {_name(key)}"
        self._refuse(Refusal.CONFLICT, f"{name} arrived twice with different contents; the first is kept")

    def _refuse_member(self, key: GroupKey, entry: _Entry[C] | None, trajectory: Trajectory) -> NoReturn:
        size, name = trajectory.group_size, f"member {trajectory.member} of {_name(key)}"
        if entry is not None and size != entry.size:
            self._refuse(Refusal.SIZE, f"{name} says group size {size}; the group began with size {entry.size}")
        self._refuse(Refusal.MEMBER, f"{name} says group size {size}, so its members are 0 to {size - 1}")

    def _refuse(self, reason: Refusal, message: str) -> NoReturn:
        self._refused[reason] += 1
        raise StashRefused(reason, message)

    def _stamp(self, key: GroupKey) -> None:
        if key in self._since:
            return
        self._since[key] = self._clock()
        self._since.move_to_end(key)
        if self._timeout is not None:
            self._arrived.set()
            self._arrived = anyio.Event()

    # -- out -----------------------------------------------------------------------------------------------------

    def expire(self) -> list[StashedGroup[C]]:
        """Groups whose time is up now, oldest first. Errors: StallError where the policy is `error`; nothing changes."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= self._clock():
            key = next(iter(self._since))
            entry = self._waiting[key]
            if self._on_timeout == "error":
                missing = [m for m in range(entry.size) if m not in entry.members]
                raise StallError(
                    f"stash: {_name(key)} waited {self._timeout} s for its members {missing} of {entry.size}; its producer "
                    "is gone or too slow (a longer timeout_s waits for it, on_timeout=drop or partial goes on without)"
                )
            expired.append(self._end(key, self._incomplete(entry, Ending.TIMEOUT)))
        return expired

    def next_deadline(self) -> float | None:
        """When (on `clock`) the first waiting group's time is up; None if that cannot happen."""
        if self._timeout is None or not self._since:
            return None
        return next(iter(self._since.values())) + self._timeout

    async def wait_expired(self) -> list[StashedGroup[C]]:
        """Wait until `expire()` has something. `clock` must run as the event loop's does. Errors: StallError."""
        while True:
            arrived = self._arrived  # before the look: an arrival after it is not slept over
            if expired := self.expire():
                return expired
            deadline = self.next_deadline()
            if deadline is None:
                await arrived.wait()
            else:
                await anyio.sleep(max(0.0, deadline - self._clock()))

    def evict_stale(self, version: int, max_staleness: int) -> list[StashedGroup[C]]:
        """End the groups that hold a token older than `version - max_staleness`, now and on arrival from here on.

        Tokens of future versions, and groups without a sampled token, are never too old.
        """
        self._oldest_allowed = max(self._oldest_allowed, version - max_staleness)
        stale = []
        for key, entry in self._waiting.items():
            if any(self._too_old(trajectory) for trajectory, _ in entry.members.values()):
                stale.append(key)
        return [self._end(key, Ending.STALE) for key in stale]

    def end_epoch(self, epoch: int) -> list[StashedGroup[C]]:
        """The producer of this epoch is gone: its incomplete groups can never be whole."""
        return [self._end(key, Ending.EPOCH) for key in list(self._waiting) if key.epoch == epoch]

    def discard(self, group_id: int, epoch: int = 0) -> StashedGroup[C] | None:
        """End one group, whether it waits here or not; later members of it are late. What waited of it, or None."""
        key = GroupKey(epoch, group_id)
        if key in self._waiting:
            return self._end(key, Ending.DISCARDED)
        self._bury(key)
        self._ended.move_to_end(key)  # it may have ended before
        return None

    def statistics(self) -> StashStatistics:
        return StashStatistics(
            waiting_groups=len(self._waiting),
            waiting_trajectories=sum(len(entry.members) for entry in self._waiting.values()),
            waiting_bytes=self._bytes,
            accepted=self._accepted,
            duplicates=self._duplicates,
            late=self._late,
            stale=self._stale,
            refused=dict(self._refused),
            endings=dict(self._endings + Counter({Ending.WHOLE: self._together})),
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _incomplete(self, entry: _Entry[C], otherwise: Ending) -> Ending:
        enough = self._on_timeout == "partial" and len(entry.members) >= MIN_PARTIAL
        return Ending.PARTIAL if enough else otherwise

    def _end(self, key: GroupKey, ending: Ending) -> StashedGroup[C]:
        entry = self._waiting.pop(key)
        del self._since[key]
        self._bytes -= entry.bytes
        self._endings[ending] += 1
        self._bury(key)
        trajectories, leases = zip(*[entry.members[member] for member in sorted(entry.members)], strict=True)
        return StashedGroup(key, ending, entry.context, entry.size, trajectories, leases)

    def _bury(self, key: GroupKey) -> None:
        self._ended[key.epoch, key.group_id] = None  # equal to it, and garbage collections stop looking at it
        if len(self._ended) > self._tombstones:
            self._ended.popitem(last=False)


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether two trajectories of one member say the same, bit for bit (so NaN equals NaN)."""
    scalars = [(t.prompt_length, float(t.temperature).hex(), _hex(t.reward), str(t.finish_reason)) for t in (a, b)]
    return (
        scalars[0] == scalars[1]
        and all(
            getattr(a, column).dtype == getattr(b, column).dtype
            and getattr(a, column).tobytes() == getattr(b, column).tobytes()
            for column in ("tokens", "mask", "logprobs", "sampled_logprobs", "versions")
        )
        and _bits(a.routed_experts) == _bits(b.routed_experts)
    )


def _bits(routes: RoutesArray | None) -> tuple[object, ...] | None:
    return None if routes is None else (routes.dtype, routes.shape, routes.tobytes())


def _hex(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def _name(key: GroupKey) -> str:
    return f"group {key.group_id}" + (f" of epoch {key.epoch}" if key.epoch else "")
