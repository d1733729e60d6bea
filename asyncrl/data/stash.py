"""The stash: where interleaved trajectories wait until their group is whole, and whole groups until their step is applied.

Guarantees
* a group is yielded exactly once, in completion order, with its members in order 0..G-1, whatever the arrival order;
* a duplicate of the same member is idempotent (counted), a conflicting one is refused: the first is kept;
* a record for a group that already ended is counted as late and goes nowhere;
* the rows of a whole group stay here until `clear` after its step was applied, so an aborted step loses nothing.

Used from the loop thread only; no method waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from asyncrl.errors import DataError
from asyncrl.types import Group, Prompt, Ticket, Trajectory

TOMBSTONES = 65_536  # ended group ids remembered, oldest forgotten first; more than any pipeline holds at once


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    prompt: Prompt
    size: int
    members: dict[int, Trajectory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StashStatistics:
    waiting_groups: int
    waiting_trajectories: int
    whole_groups: int  # yielded, not yet cleared
    duplicates: int
    refused: int
    late: int
    cleared: int


class Stash:
    def __init__(self, max_groups: int) -> None:
        """`max_groups`: the slots of the pipeline; more groups than that here means a slot was lost, which raises."""
        self._max_groups = max_groups
        self._waiting: dict[int, _Entry] = {}
        self._whole: dict[int, Group] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._duplicates = self._refused = self._late = self._cleared = 0

    def add(self, ticket: Ticket, prompt: Prompt, trajectory: Trajectory) -> Group | None:
        """Returns the group if this trajectory made it whole. DataError for a member or size that contradicts the group."""
        group_id = ticket.group_id
        if group_id in self._ended or group_id in self._whole:
            self._late += 1
            return None
        entry = self._waiting.get(group_id)
        if entry is None:
            if len(self._waiting) + len(self._whole) >= self._max_groups:
                raise DataError(
                    f"stash: group {group_id} is one more than the {self._max_groups} groups that have slots"
                )
            entry = self._waiting[group_id] = _Entry(ticket, prompt, trajectory.group_size)
        member = trajectory.member
        if trajectory.group_size != entry.size or not 0 <= member < entry.size:
            self._refused += 1
            raise DataError(
                f"stash: member {member} of group {group_id} says group size {trajectory.group_size}; "
                f"the group has size {entry.size} and members 0..{entry.size - 1}"
            )
        if member in entry.members:
            if _same(entry.members[member], trajectory):
                self._duplicates += 1
                return None
            self._refused += 1
            raise DataError(
                f"stash: member {member} of group {group_id} arrived twice with different tokens; the first is kept"
            )
        entry.members[member] = trajectory
        if len(entry.members) < entry.size:
            return None
        del self._waiting[group_id]
        group = Group(entry.ticket, entry.prompt, tuple(entry.members[m] for m in range(entry.size)))
        self._whole[group_id] = group
        return group

    def discard(self, group_id: int) -> bool:
        """Forget an incomplete or whole group (it was dropped or failed). True if it was here."""
        self._bury(group_id)
        return self._waiting.pop(group_id, None) is not None or self._whole.pop(group_id, None) is not None

    def clear(self, group_ids: Iterable[int]) -> None:
        """The step of these whole groups was applied: free their rows. KeyError for a group that is not here."""
        for group_id in group_ids:
            del self._whole[group_id]
            self._bury(group_id)
            self._cleared += 1

    def incomplete(self) -> list[int]:
        """Group ids that still wait for members."""
        return list(self._waiting)

    def statistics(self) -> StashStatistics:
        return StashStatistics(
            waiting_groups=len(self._waiting),
            waiting_trajectories=sum(len(e.members) for e in self._waiting.values()),
            whole_groups=len(self._whole),
            duplicates=self._duplicates,
            refused=self._refused,
            late=self._late,
            cleared=self._cleared,
        )

    def _bury(self, group_id: int) -> None:
        self._ended[group_id] = None
        if len(self._ended) > TOMBSTONES:
            self._ended.popitem(last=False)


def _same(a: Trajectory, b: Trajectory) -> bool:
    return (
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.mask, b.mask) and np.array_equal(a.logprobs, b.logprobs)
    )
