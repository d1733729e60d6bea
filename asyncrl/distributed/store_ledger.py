"""The ledger of many ranks: the same books, kept in the store that the ranks share.

Rule and proof: `reservation.py`. How the books are kept and changed there: `shared_books.py`. Store calls block, so they run
on a lane of their own. A second thread with a connection of its own hears of the others' changes (`watch.py`), and tells the
loop.

A rank that has died keeps its groups; it is torchrun that notices and ends the attempt. Until then `describe()` names
the rank which the open step waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from ..concurrency.lane import ThreadLane
from ..errors import LedgerError, LifecycleError, RankLost, StoreForged
from ..types import ClaimState, LedgerStatistics, Ticket
from .changes import Changes, waiting_for_slot
from .reservation import Late, Reservation
from .sealed import SealedStore
from .shared_books import SharedBooks
from .watch import Watch

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder

R = TypeVar("R")

logger = logging.getLogger("asyncrl.distributed")


class StoreLedger:
    """See `ports.Ledger` and `LocalLedger`; every rank opens one with the same numbers. `async with` is required.

    store: a connection that nobody else uses (`World.store("ledger")`); it is cloned once for the watching thread.
    rank, ranks: this one, and how many share the books.
    timeout_s: how long one transition may fight for the books.
    """

    def __init__(
        self,
        store: SealedStore,
        books: Reservation,
        rank: int,
        *,
        recorder: Recorder | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not 0 <= rank < books.ranks:
            raise ValueError(f"rank {rank} of {books.ranks} ranks")
        self._store, self._rank = store, rank
        self._recorder = recorder
        self.first_turn = books.turn
        self._turn = books.turn  # of this rank: the steps that it has committed itself
        # Of this rank, in the step that it has not committed: another one may have.
        self._open: dict[int, Ticket] = {}
        self._books = books  # as last heard; replaced, never changed
        self._changes = Changes()
        self._shared = SharedBooks(store, rank, timeout_s, lambda: self._awaited, self._tell)
        self._lane = ThreadLane("ledger", close_timeout_s=timeout_s)
        self._watch: Watch | None = None
        self._watch_ended: asyncio.Future[None] | None = None
        self._order = anyio.Lock()  # admissions of this rank wait in line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken: BaseException | None = None  # why the watching thread ended
        self._was_late = False
        self._closed = False

    @classmethod
    def over(
        cls,
        store: SealedStore,
        groups_per_step: int,
        max_staleness: int,
        late: Late = "wait",
        turn: int = 0,
        *,
        rank: int = 0,
        ranks: int = 1,
        warmup: int = 0,
        by_rank: bool = False,
        recorder: Recorder | None = None,
    ) -> StoreLedger:
        """The usual constructor: numbers as for `LocalLedger`, `groups_per_step` counted over all ranks."""
        books = Reservation(groups_per_step, max_staleness, late, turn, ranks, warmup, by_rank)
        return cls(store, books, rank, recorder=recorder)

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> StoreLedger:
        if self._loop is not None or self._closed:
            raise LifecycleError("the ledger was opened twice")
        self._loop = asyncio.get_running_loop()
        self._watch_ended = self._loop.create_future()
        await self._lane.__aenter__()
        try:
            self._changes.number, self._books = await self._lane.run(
                lambda: self._shared.join(self._books), name="open the books"
            )
            connection = await self._lane.run(self._store.clone, name="connect the watcher")
        except BaseException:
            self._closed = True
            await self._lane.aclose()
            raise
        soon = self._call_soon
        self._watch = Watch(
            connection,
            self._rank,
            self._changes.number,
            self._tell,
            lambda *late: soon(self._late, *late),
            lambda error: soon(self._watch_over, error),
        )
        self._watch.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Fail every waiter with LifecycleError, end both threads. Closing twice is fine."""
        if self._closed or self._watch is None or self._watch_ended is None:
            self._closed = True
            return
        self._closed = True
        self._watch.end()
        self._changes.wake(LifecycleError("the ledger was closed while somebody waited for it"))
        with anyio.CancelScope(shield=True):
            try:
                await self._lane.run(self._shared.leave, name="leave the books")
            except (RankLost, LedgerError, StoreForged) as error:
                # The run is torn down around us, and nobody is left to tell about this rank's groups.
                self._broken = self._broken or error
            finally:
                if (await asyncio.wait([self._watch_ended], timeout=5.0))[0]:  # else: it is a daemon
                    # It has only to return, and must not do so while the interpreter ends.
                    self._watch.join()
                await self._lane.aclose()

    # -- the port ----------------------------------------------------------------------------------------------------

    @property
    def turn(self) -> int:
        """Of this rank: the shared turn may be one further, where another rank committed first."""
        return self._turn

    @property
    def changes(self) -> int:
        """The newest change, by whichever rank, that this one has heard of."""
        return self._changes.number

    @property
    def finished(self) -> bool:
        """Every rank called `exhaust`, no group is left to train on any, and this rank committed every step."""
        return self._books.finished() and self._turn == self._books.turn

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        """See `ports.Ledger.admit`. Group ids are unique over all ranks."""
        done: list[tuple[bool, Ticket | None]] = []
        async with self._order:
            while True:
                self._check_open("admit")
                seen = self._changes.number
                try:
                    decided, ticket = await self._run(lambda b: b.admit(group_id, oldest, self._rank), "admit", done)
                except asyncio.CancelledError:
                    if done and (granted := done[-1][1]) is not None:
                        await self._undo(lambda b: b.withdraw(granted))
                    raise
                if decided:
                    return ticket
                with waiting_for_slot(self._recorder):
                    await self.wait_changed(seen)

    async def exhaust(self) -> None:
        """This rank admits no more. When all have said so, a step whose last live group was claimed counts as full."""

        def mark(books: Reservation) -> None:
            books.exhausted[self._rank] = True

        await self._run(mark, "exhaust")

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        """See `ports.Ledger.claim`. FULL also where the other ranks have committed the step already."""
        self._check_open("claim")
        tickets = tuple(ready)
        done: list[tuple[ClaimState, Ticket | None]] = []
        try:
            state, ticket = await self._run(lambda b: self._claim(b, tickets), "claim", done)
            if ticket is not None:
                self._open[ticket.group_id] = ticket
            return state, ticket
        except asyncio.CancelledError:
            if done and (granted := done[-1][1]) is not None:
                await self._undo(lambda b: b.unclaim(granted))
            raise

    def _claim(self, books: Reservation, tickets: tuple[Ticket, ...]) -> tuple[ClaimState, Ticket | None]:
        if books.turn > self._turn:
            return ClaimState.FULL, None
        ticket = books.claim(tickets)
        if ticket is not None:
            return ClaimState.GRANTED, ticket
        return (ClaimState.FULL if books.step_complete() else ClaimState.WAIT), None

    async def wait_changed(self, seen: int) -> int:
        """As `Ledger.wait_changed`, for changes by any rank. Errors: LifecycleError once closed, LedgerError where the store is
        gone."""
        self._check_open("wait_changed")
        return await self._changes.wait(seen)

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        await self._run(lambda b: b.end(ticket, outcome), "end")
        if self._recorder is not None:
            self._recorder.count(f"groups/{outcome}/{reason}")

    async def commit(self) -> int:
        """See `ports.Ledger.commit`. Every rank calls it once per step; the first one moves the shared turn."""
        self._check_open("commit")

        def change(books: Reservation) -> None:
            if books.turn == self._turn:
                books.commit()

        def closure() -> int:
            self._shared.transact(change)
            # Here and not after the await: a cancelled caller has committed all the same.
            self._turn += 1
            self._open.clear()
            return self._turn

        return await self._lane.run(closure, name="commit")

    async def rollback(self) -> list[Ticket]:
        """As `Ledger.rollback`: this rank's groups alone; the other ranks abort their part themselves."""
        back = await self._run(lambda b: b.rollback(self._rank), "rollback")
        for ticket in back:
            self._open.pop(ticket.group_id, None)
        return back

    async def release(self, turn: int) -> None:
        """See `ports.Ledger.release`: this rank's engines have acknowledged; the slots come free with the last rank."""
        await self._run(lambda b: b.release(turn, self._rank), "release")

    def expired(self) -> list[Ticket]:
        """This rank's live groups past their deadline; always empty with `late="wait"`."""
        return self._books.expired(self._rank)

    def live_groups(self) -> list[Ticket]:
        """This rank's groups that were admitted and not trained, by group id: as of its own turn, though another rank may have
        committed the step that some of them are in."""
        mine = {e.ticket.group_id: e.ticket for e in self._books.entries.values() if e.rank == self._rank}
        return [ticket for _, ticket in sorted((mine | self._open).items())]

    def committed_elsewhere(self) -> list[Ticket]:
        """Those of `live_groups` that are in a step which another rank has committed and this one has not."""
        if self._books.turn <= self._turn:
            return []
        return [ticket for group, ticket in sorted(self._open.items()) if group not in self._books.entries]

    def due(self) -> int:
        """As `Ledger.due`: after an `admit`, of the books that it has changed, or newer ones."""
        return self._books.due(self._rank) or 0

    def last_step(self, rank: int) -> list[int]:
        """As `Ledger.last_step`, as this rank last heard."""
        return [group_id for group_id, of in self._books.last_step.items() if of == rank]

    def statistics(self) -> LedgerStatistics:
        """Over all ranks, as this one last heard."""
        return self._books.statistics()

    def describe(self) -> str:
        """One sentence for error messages: the open step, and whom it waits for."""
        return self._books.describe()

    def elsewhere(self) -> str | None:
        first = self._books.first_live()
        if first is None or first.rank == self._rank:
            return None
        return f"the open step waits for group {first.ticket.group_id} of rank {first.rank}, which says where that is"

    # -- the books, on the lane --------------------------------------------------------------------------------------

    async def _run(self, change: Callable[[Reservation], R], name: str, done: list[R] | None = None) -> R:
        """One transition. `done` receives the result even where the caller is cancelled and cannot."""

        def closure() -> R:
            result = self._shared.transact(change)
            if done is not None:
                done.append(result)
            return result

        return await self._lane.run(closure, name=name)

    async def _undo(self, change: Callable[[Reservation], None]) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._run(change, "undo")
            except LifecycleError:
                return  # the ledger is closed: nobody claims or counts any more

    # -- hearing of changes --------------------------------------------------------------------------------------------

    @property
    def _awaited(self) -> int:
        return 1 if self._watch is None else self._watch.awaited

    def _tell(self, number: int, books: Reservation) -> None:
        self._call_soon(self._heard, number, books)

    def _call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # the loop is closed: nobody waits on it

    def _heard(self, number: int, books: Reservation) -> None:
        if number <= self._changes.number:
            return
        self._books, self._changes.number = books, number
        self._changes.wake()
        if self._recorder is not None:
            self._recorder.gauge("queue/slots/depth", books.slots.held)

    def _late(self, number: int, rank: int, seconds: float) -> None:
        if self._recorder is not None:
            self._recorder.count("ledger/late")
            self._recorder.count("ledger/late_s", seconds)
        if not self._was_late:
            self._was_late = True
            logger.warning(
                "rank %d heard of change %d of the shared ledger %.1f s after rank %d had made it; from now on that is only "
                "counted, as ledger/late",
                self._rank,
                number,
                seconds,
                rank,
            )

    def _watch_over(self, broken: BaseException | None) -> None:
        if self._watch_ended is not None and not self._watch_ended.done():
            self._watch_ended.set_result(None)
        if broken is not None and not self._closed:
            self._broken = broken
            self._changes.wake(self._broken)

    def _check_open(self, what: str) -> None:
        if self._closed or self._loop is None:
            raise LifecycleError(f"the ledger is {'closed' if self._closed else 'not open'}: it cannot {what}")
        if self._broken is not None:
            raise self._broken
