"""The book of the groups that are live on this rank, and their rows in the store.

    open ──▶ put into the store ──▶ scored ──claimed──▶ in the open step ──trained──▶ cleared
      `────────────── end ───────────────▶ cleared   ◀──reopen (aborted)──'

It is the one place that gives a group's slot back before training. So every admitted group ends exactly once (invariant 2),
whichever pump notices first that it cannot be trained. Used from the loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from asyncrl.data.store import Column, Rows, Store
from asyncrl.ports import Ledger
from asyncrl.types import Group, Ticket

# That are counted apart: errors of environments may each have a text of their own.
MOST_REASONS = 50
OTHER = "another reason"


class GroupIds:
    """Ids for groups that no prompt of the cursor names: those of this rank, apart from everybody else's."""

    def __init__(self, first: int, stride: int) -> None:
        self.next = first
        self._stride = stride

    def take(self) -> int:
        taken, self.next = self.next, self.next + self._stride
        return taken


class GroupBook:
    """Tickets of the groups that were admitted and are not claimed by a step."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self.store = store
        self._tickets: dict[int, Ticket] = {}
        self._on_ready: list[Callable[[], None]] = []
        self._on_end: list[Callable[[Sequence[int]], None]] = []
        # No step can come any more. The groups that end from then on were not trained: the memory that was lent for them stays
        # with its owner, for another run.
        self.over = False
        # Held while a step moves the weights, and by an evaluation that needs them to stay.
        self.moving = asyncio.Lock()
        self.ended = 0  # groups, and steps
        self.reasons: Counter[str] = Counter()
        self.failed = 0

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back whenever another group can be claimed."""
        self._on_ready.append(callback)

    def when_ended(self, callback: Callable[[Sequence[int]], None]) -> None:
        """Call back, with the ids of the groups, whenever one was dropped or a step committed: places and slots come free."""
        self._on_end.append(callback)

    def open(self, ticket: Ticket) -> None:
        """The ledger admitted this group."""
        self._tickets[ticket.group_id] = ticket

    def write(self, group_id: int, column: str, values: Column) -> None:
        """Write a column of the group's rows. Does nothing where the group has ended."""
        if group_id in self.store:
            self.store.write(group_id, column, values)

    def scored(self, group: Group) -> None:
        """The rewards of the group are final: it can be claimed. Does nothing where the group has ended."""
        if group.group_id in self._tickets:
            self.store.score(group)
            for callback in self._on_ready:
                callback()

    def claimed(self, ticket: Ticket) -> Rows:
        """Returns the rows of a group to which the ledger gave a place in the open step."""
        del self._tickets[ticket.group_id]
        return self.store.claim(ticket.group_id)

    def reopen(self, ticket: Ticket) -> None:
        """The step that had claimed the group was aborted: its rows can be claimed again."""
        self.open(ticket)
        self.store.unclaim(ticket.group_id)

    def trained(self, group_ids: Iterable[int]) -> None:
        """The step of these claimed groups was applied: their rows are cleared, at once, and their leases end."""
        ids = tuple(group_ids)
        self.store.clear(ids)
        self._notify_end(ids)

    async def end(
        self, group_id: int, outcome: Literal["dropped", "failed"], reason: str, *, release: bool = True
    ) -> bool:
        """Give the slot back and clear the rows, and with `release` their leases. False if the group had ended, or was
        claimed, before."""
        ticket = self._tickets.pop(group_id, None)  # before the await: two callers cannot both end it
        if ticket is None:
            return False
        self.store.clear([group_id], release=release and not self.over)
        if f"{outcome}: {reason}" not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = OTHER  # it becomes the name of a metric, too
        self.reasons[f"{outcome}: {reason}"] += 1
        self.failed += outcome == "failed"
        await self._ledger.end(ticket, outcome, reason)
        self._notify_end((group_id,))
        return True

    async def end_all(self, reason: str) -> None:
        """Drop every group that is left."""
        for group_id in list(self._tickets):
            await self.end(group_id, "dropped", reason)

    def _notify_end(self, group_ids: Sequence[int]) -> None:
        self.ended += 1
        for callback in self._on_end:
            callback(group_ids)

    def live(self) -> list[int]:
        """Ids of the groups that no step has claimed, ascending."""
        return sorted(self._tickets)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._tickets
