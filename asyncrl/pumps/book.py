"""The book of the groups that are live on this rank, and their rows in the store.

    open ──▶ put ──▶ scored ──claimed──▶ in the open step ──trained──▶ cleared
      `─────── end ───────▶ cleared   ◀──reopen (aborted)──'

It is the one place that gives a group's slot back before training, so that every admitted group ends exactly once
whichever pump notices first that it cannot be trained (invariant 2). Used from the loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from asyncrl.data.store import Column, Lease, Rows, Store
from asyncrl.ports import Ledger
from asyncrl.types import Group, Ticket

MOST_REASONS = 50  # kept apart: errors of environments may each have a text of their own
OTHER = "another reason"


class GroupIds:
    """Ids for groups that no prompt of the cursor names: those of this rank, apart from everybody else's."""

    def __init__(self, first: int, stride: int) -> None:
        self.next = first
        self._stride = stride

    def take(self) -> int:
        """The next id."""
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
        self.over = False  # no step can come any more
        self.moving = asyncio.Lock()  # held while a step moves the weights, or by who wants them to stay
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

    def put(self, group: Group, leases: Sequence[Lease] = ()) -> Group:
        """The rows of a whole group; not to be claimed before it is scored. Errors: DataError."""
        return self.store.put(group, leases)

    def write(self, group_id: int, column: str, values: Column) -> None:
        """A column of the group's rows; nothing where the group has ended."""
        if group_id in self.store:
            self.store.write(group_id, column, values)

    def scored(self, group: Group) -> None:
        """Its rewards are final: it can be claimed. Nothing where the group has ended."""
        if group.group_id in self._tickets:
            self.store.score(group)
            for callback in self._on_ready:
                callback()

    def ready(self) -> list[Ticket]:
        """Tickets of the groups that can be claimed, in the order in which they became ready."""
        return self.store.ready()

    def claimed(self, ticket: Ticket) -> Rows:
        """The ledger gave this group a place in the open step; its rows."""
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
        self._tell_end(ids)

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
        self._tell_end((group_id,))
        return True

    async def end_all(self, reason: str) -> int:
        """Drop every group that is left; how many."""
        ended = [await self.end(group_id, "dropped", reason) for group_id in list(self._tickets)]
        return sum(ended)

    def _tell_end(self, group_ids: Sequence[int]) -> None:
        self.ended += 1
        for callback in self._on_end:
            callback(group_ids)

    def no_more_steps(self) -> None:
        """What ends from here on was not trained: memory that was lent for it stays its owner's, for another run."""
        self.over = True

    def live(self) -> list[int]:
        """Ids of the groups that no step has claimed, ascending."""
        return sorted(self._tickets)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._tickets
