"""The ledger in one process: admits groups to the run, and gives them places in training steps. Callers wait here; the
books (`reservation.py`) never wait. In a run of several ranks, this ledger is on rank 0. Other ranks ask rank 0 (`line_ledger.py`).

    rollout pump --admit--> [slots, FIFO] --> live --claim--> claimed --commit--> held --release--> trained
                                               `------------ end --------------------------------> dropped, failed

Only `admit` and `wait_changed` wait; the other methods change the books without an await, so no task sees half a change. Waiting
calls of `admit` get slots in call order, so prompts enter in order. If ranks have shares of the slots (`by_rank`), each rank
has its own order. If a waiting caller was granted a slot and is cancelled before it runs, the slot goes to the next caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..concurrency.shield import record_wait
from ..errors import LedgerError, LifecycleError
from ..types import ClaimState, LedgerStatistics, Ticket
from .reservation import Reservation

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder


class Changes:
    """Counts the changes of a ledger's books. The ledger adds 1 to `number`, then calls `wake`. Only for the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._waiters: set[asyncio.Future[None]] = set()

    async def wait(self, seen: int) -> int:
        """Wait until `number` is above `seen`, and return `number`. Errors: the error of a `wake` during the wait."""
        while self.number <= seen:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.number

    @property
    def awaited(self) -> bool:
        """Whether a task is in `wait`."""
        return bool(self._waiters)

    def wake(self, error: BaseException | None = None) -> None:
        """Wake all waiters. Each waiter raises `error`; with None it checks `number` again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error) if error is not None else waiter.set_result(None)


@dataclass(slots=True, eq=False)
class _Applicant:
    group_id: int
    oldest: int | None
    rank: int
    answer: asyncio.Future[Ticket | None]


class LocalLedger:
    """See `ports.Ledger`. `async with` is optional. Its exit closes the ledger, so waiters raise LifecycleError."""

    def __init__(self, books: Reservation, recorder: Recorder | None = None) -> None:
        """`books`: new, or those of an earlier ledger. If they have several ranks, callers pass their rank to the methods."""
        # Other modules read the books, but do not change them.
        self.books = books
        self._recorder = recorder
        self.first_turn = books.turn
        self._changes = Changes()
        # Waiting admissions. With shares each rank has a queue, so that no rank blocks another. Without shares all are in queue 0.
        self._queues: dict[int, deque[_Applicant]] = {}
        self.on_change: Callable[[], None] | None = None  # called after each change
        self._closed = False

    async def __aenter__(self) -> LocalLedger:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """From now on `admit`, `claim`, `commit` and `wait_changed` raise LifecycleError, in waiters too. Other methods work."""
        if self._closed:
            return
        self._closed = True
        closed = LifecycleError("the ledger was closed while a task waited for it")
        for queue in self._queues.values():
            for applicant in queue:
                if not applicant.answer.done():
                    applicant.answer.set_exception(closed)
            queue.clear()
        self._changes.wake(closed)

    @property
    def turn(self) -> int:
        return self.books.turn

    @property
    def changes(self) -> int:
        return self._changes.number

    @property
    def finished(self) -> bool:
        """Whether `exhaust` was called for every rank and no group is left to train."""
        return self.books.finished()

    async def admit(self, group_id: int, oldest: int | None = None, rank: int = 0) -> Ticket | None:
        """See `ports.Ledger.admit`. Errors: LedgerError if the group is admitted already, or if `rank` is lost; LifecycleError."""
        self._check_open("admit")
        queue = self._queues.setdefault(rank if self.books.by_rank else 0, deque())
        if not queue:
            decided, ticket = self.books.admit(group_id, oldest, rank)
            if decided:
                self._changed()
                return ticket
        applicant = _Applicant(group_id, oldest, rank, asyncio.get_running_loop().create_future())
        queue.append(applicant)
        with record_wait(self._recorder, "a slot", "publish pump", "slots"):
            try:
                return await applicant.answer
            except asyncio.CancelledError:
                if applicant.answer.cancelled():
                    if applicant in queue:
                        queue.remove(applicant)
                        self._serve_and_wake()  # the next applicant may be admissible
                # The slot was granted, but this task was cancelled before it ran: give the slot back.
                elif applicant.answer.exception() is None and applicant.answer.result() is not None:
                    self.withdraw(group_id, rank)
                raise

    def withdraw(self, group_id: int, rank: int = 0) -> None:
        """Undo the admission of a group of `rank` whose caller was cancelled. Does nothing if the group is not live."""
        entry = self.books.entries.get(group_id)
        if entry is not None and entry.rank == rank and not entry.claimed:
            self.books.withdraw(entry.ticket)
            self._changed()

    async def exhaust(self, rank: int = 0) -> None:
        """`rank` admits no more groups. After a call for each rank, a step whose last live group was claimed counts as full."""
        self.books.exhausted[rank] = True
        self._changed()

    async def claim(self, ready: Sequence[Ticket], rank: int = 0) -> tuple[ClaimState, Ticket | None]:
        """See `ports.Ledger.claim`. Also FULL once prompts are exhausted and every remaining group has a place."""
        self._check_open("claim")
        ticket = self.books.claim(ready, rank)
        if ticket is not None:
            self._changed()
            return ClaimState.GRANTED, ticket
        return (ClaimState.FULL if self.books.step_complete() else ClaimState.WAIT), None

    async def assign(self, ticket: Ticket, tokens: int) -> int:
        return self.books.assign(ticket, tokens)

    async def arrive(self, ticket: Ticket, sender: int, rank: int = 0) -> bool:
        return self.books.arrive(ticket, sender, rank)

    def may_end(self, ticket: Ticket, rank: int) -> bool:
        """Whether the group is live and `rank` may end it. Rank 0 may end any group, another rank only its own groups."""
        entry = self.books.entries.get(ticket.group_id)
        return entry is not None and entry.ticket == ticket and rank in (0, entry.rank) and not entry.claimed

    async def wait_changed(self, seen: int) -> int:
        """See `ports.Ledger.wait_changed`. Errors: LifecycleError once the ledger is closed."""
        self._check_open("wait_changed")
        return await self._changes.wait(seen)

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        """See `ports.Ledger.end`. Counts `groups/OUTCOME/REASON`. Errors: LedgerError for a group that is not live."""
        self.books.end(ticket, outcome)
        if self._recorder is not None:
            self._recorder.count(f"groups/{outcome}/{reason}")
        self._changed()

    async def commit(self) -> int:
        """See `ports.Ledger.commit`. Errors: LedgerError for a step without groups, or if a live group would then be too old."""
        self._check_open("commit")
        turn = self.books.commit()
        self._changed()
        return turn

    def unclaim(self, tickets: Sequence[Ticket], rank: int) -> None:
        """Undo a claim of `rank` whose caller was cancelled: the claimed groups of `tickets` lose their places."""
        for ticket in tickets:
            entry = self.books.entries.get(ticket.group_id)
            if entry is not None and entry.claimed and entry.rank == rank and entry.ticket == ticket:
                self.books.unclaim(entry)
                self._changed()

    async def rollback(self, rank: int | None = None) -> list[Ticket]:
        tickets = self.books.rollback(rank)
        if tickets:
            self._changed()
        return tickets

    async def release(self, turn: int, rank: int = 0) -> None:
        """See `ports.Ledger.release`. The release of a turn releases all earlier turns, too."""
        if self.books.release(turn, rank):
            self._changed()

    def lose_generator(self, rank: int) -> list[int]:
        """See `Reservation.lose_generator`. Waiting admissions get the slots that become free."""
        lost = self.books.lose_generator(rank)
        self._changed()
        return lost

    async def begin(self, turn: int, rank: int = 0) -> bool:
        began = self.books.begin(turn, rank)
        self._changed()
        return began

    def expired(self) -> list[Ticket]:
        """Live groups past their deadline, for the caller to drop; always empty with `late="wait"`."""
        return self.books.expired()

    def live_groups(self, *, everywhere: bool = False) -> list[Ticket]:
        """Live and claimed groups of all ranks, sorted by id. A checkpoint stores them, so that a resumed run skips no prompt."""
        return sorted((e.ticket for e in self.books.entries.values()), key=lambda t: t.group_id)

    def due(self) -> int:
        """Always 0. Only a run with one rank calls this method, and such a run has no shares."""
        return 0

    def last_step(self, rank: int) -> list[int]:
        return [group_id for group_id, owner in self.books.last_step.items() if owner == rank]

    def statistics(self) -> LedgerStatistics:
        return self.books.statistics()

    def describe(self) -> str:
        return f"{self.books.describe()}; {sum(map(len, self._queues.values()))} groups wait for a slot"

    def remote_cause(self) -> str | None:
        """Always None. Only a run with one rank calls this method, and such a run has no other rank."""
        return None

    def _changed(self) -> None:
        self._changes.number += 1
        self._serve_and_wake()

    def _serve_and_wake(self) -> None:
        if not self._closed:
            self._serve_applicants()
        self._changes.wake()
        if self.on_change is not None:
            self.on_change()
        if self._recorder is not None:
            self._recorder.gauge("queue/slots/depth", self.books.slots_taken)

    def _serve_applicants(self) -> None:
        for queue in self._queues.values():
            while queue:
                applicant = queue[0]
                if not applicant.answer.done():
                    try:
                        decided, ticket = self.books.admit(applicant.group_id, applicant.oldest, applicant.rank)
                    except LedgerError as exc:
                        applicant.answer.set_exception(exc)
                    else:
                        if not decided:
                            break
                        applicant.answer.set_result(ticket)
                        self._changes.number += 1
                queue.popleft()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise LifecycleError(f"the ledger is closed: it cannot {what}")
