"""The live groups of this rank: their tickets, and their rows in the store.

    add --> Store.put --> mark_ready --> claim --> clear: the step was applied
    end        before `claim`: the group is dropped or failed, and its rows are cleared
    clear      before `claim`: the group was sent to another rank
    unclaim    after `claim`: the step was aborted, and the group can be claimed again

Only `GroupBook.end` releases the slot of an untrained group of this rank. So every admitted group ends exactly once, even if
several pumps find at the same time that the group cannot be trained. Use a `GroupBook` only on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from asyncrl.data.store import Column, Rows, Store
from asyncrl.ports import Ledger
from asyncrl.types import Group, Ticket

# Each reason names a metric. Errors of environments may all differ, so reasons after the first MAX_REASONS become OTHER_REASON.
MAX_REASONS = 50
OTHER_REASON = "another reason"


class GroupIds:
    """Ids for groups that are not made from a prompt of this run: `first`, `first + stride` and so on. `stride` is the number
    of ranks, so that no two ranks use the same id."""

    def __init__(self, first: int, stride: int) -> None:
        self.next = first
        self._stride = stride

    def take(self) -> int:
        group_id, self.next = self.next, self.next + self._stride
        return group_id


class GroupBook:
    """The tickets of this rank's groups that were admitted and are not claimed by a step."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self.store = store
        self.tickets: dict[int, Ticket] = {}
        self.on_ready: Callable[[], None] = lambda: None  # called by `mark_ready`
        # Called with the ids of groups that were dropped, failed, trained, or sent to another rank.
        self.on_end: Callable[[Sequence[int]], None] = lambda group_ids: None
        # If True, `end` keeps the leases of a group (its records in the ring of a producer), so that the next run can train it.
        self.training_ended = False
        # Held while a step changes the weights, and by an evaluation while the weights must not change.
        self.weights_lock = asyncio.Lock()
        self.end_count = 0  # number of calls of `on_end`
        self.reasons: Counter[str] = Counter()  # "outcome: reason" -> number of ended groups
        self.failed = 0  # number of failed groups of this rank

    def add(self, ticket: Ticket) -> None:
        """Add a group that the ledger admitted."""
        self.tickets[ticket.group_id] = ticket

    def remove(self, ticket: Ticket) -> bool:
        """Take a group out of this book, because another rank may get it. Its rows stay. Returns False if the book lacks it."""
        return self.tickets.pop(ticket.group_id, None) is not None

    def write(self, group_id: int, column: str, values: Column) -> None:
        """Write a column of the group's rows. Does nothing if the group has ended."""
        if group_id in self.store:
            self.store.write(group_id, column, values)

    def mark_ready(self, group: Group) -> None:
        """Store the final rewards of the group. The group can then be claimed. Does nothing if the group has ended."""
        if group.group_id in self.tickets:
            self.store.score(group)
            self.on_ready()

    def claim(self, ticket: Ticket) -> Rows:
        """Move a group into the open step, after the ledger gave it a place there. Returns the rows of the group."""
        del self.tickets[ticket.group_id]
        return self.store.claim(ticket.group_id)

    def unclaim(self, ticket: Ticket) -> None:
        """Make a claimed group claimable again, because its step was aborted."""
        self.add(ticket)
        self.store.unclaim(ticket.group_id)

    def clear(self, group_ids: Iterable[int]) -> None:
        """Clear the rows and release the leases of these groups: their step was applied, or another rank has them."""
        ids = tuple(group_ids)
        self.store.clear(ids)
        self._notify_end(ids)

    async def end(
        self, group_id: int, outcome: Literal["dropped", "failed"], reason: str, *, release: bool = True
    ) -> bool:
        """Release the slot of a group and clear its rows. If `release` and not `training_ended`, also release its leases. Does
        nothing and returns False if the group has ended or is claimed by a step."""
        ticket = self.tickets.pop(group_id, None)  # before any await, so that only one caller ends the group
        if ticket is None:
            return False
        self.store.clear([group_id], release=release and not self.training_ended)
        if f"{outcome}: {reason}" not in self.reasons and len(self.reasons) >= MAX_REASONS:
            reason = OTHER_REASON
        self.reasons[f"{outcome}: {reason}"] += 1
        self.failed += int(outcome == "failed")
        await self._ledger.end(ticket, outcome, reason)
        self._notify_end((group_id,))
        return True

    async def end_all(self, reason: str) -> None:
        """Drop every group that no step has claimed."""
        for group_id in list(self.tickets):
            await self.end(group_id, "dropped", reason)

    def _notify_end(self, group_ids: Sequence[int]) -> None:
        self.end_count += 1
        self.on_end(group_ids)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self.tickets
