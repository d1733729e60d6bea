"""The ledger of many ranks. Its books are in the store that the ranks share.

`reservation.py` has the rule and its proof, and `shared_books.py` reads and changes the books. Calls of the store block, so they
run on a lane of their own. A second thread waits for the changes of other ranks and notifies the event loop (`watch.py`).

The groups of a dead rank stay in the books until torchrun notices the death and ends the attempt. Until then `describe()` names
the rank for which the open step waits.
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
    """A `ports.Ledger` like `LocalLedger`, for many ranks. Every rank must use the same settings. `async with` is required.

    store: a connection that nobody else uses (`World.store("ledger")`). A clone of the connection is for the watching thread.
    timeout_s: limit for one transition of the shared books, which other ranks may delay.
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
            raise ValueError(f"rank is {rank} of {books.ranks} ranks; expected 0 to {books.ranks - 1}")
        self._store, self._rank = store, rank
        self._recorder = recorder
        self.first_turn = books.turn
        self._turn = books.turn  # steps that this rank has committed
        # Groups of this rank in the step that this rank has not committed. Another rank may have committed the step.
        self._open: dict[int, Ticket] = {}
        self._books = books  # newest known books: replaced, never changed
        self._changes = Changes()
        self._shared = SharedBooks(store, rank, timeout_s, lambda: self._awaited, self._on_books)
        self._lane = ThreadLane("ledger", close_timeout_s=timeout_s)
        self._watch: Watch | None = None
        self._watch_ended: asyncio.Future[None] | None = None
        self._admit_lock = anyio.Lock()  # this rank admits in the order of the calls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken: BaseException | None = None  # error of the watching thread
        self._warned_of_delay = False
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
        """The usual constructor. Settings as in `LocalLedger`; `groups_per_step` is the sum over all ranks."""
        books = Reservation(groups_per_step, max_staleness, late, turn, ranks, warmup, by_rank)
        return cls(store, books, rank, recorder=recorder)

    async def __aenter__(self) -> StoreLedger:
        if self._loop is not None or self._closed:
            raise LifecycleError("the ledger was opened twice; create a new one")
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
        self._watch = Watch(
            connection,
            self._rank,
            self._changes.number,
            self._on_books,
            lambda *delay: self._call_soon(self._report_delay, *delay),
            lambda error: self._call_soon(self._on_watch_end, error),
        )
        self._watch.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Fail every waiter with LifecycleError, and end both threads. A second call does nothing."""
        if self._closed or self._watch is None or self._watch_ended is None:
            self._closed = True
            return
        self._closed = True
        self._watch.end()
        self._changes.wake(LifecycleError("the ledger was closed while a task waited for a change; open a new ledger"))
        with anyio.CancelScope(shield=True):
            try:
                await self._lane.run(self._shared.leave, name="leave the books")
            except (RankLost, LedgerError, StoreForged) as error:
                # The run ends, so no other rank needs the groups of this rank any more.
                self._broken = self._broken or error
            finally:
                done, _ = await asyncio.wait([self._watch_ended], timeout=5.0)
                # Without the join the thread could still run while the interpreter shuts down. A thread that hangs is a daemon.
                if done:
                    self._watch.join()
                await self._lane.aclose()

    @property
    def turn(self) -> int:
        """The turn of this rank. The shared turn is one higher if another rank has committed the open step."""
        return self._turn

    @property
    def changes(self) -> int:
        """The number of the newest change that this rank knows, by any rank."""
        return self._changes.number

    @property
    def finished(self) -> bool:
        """Every rank called `exhaust`, no rank has a group to train, and this rank committed every step."""
        return self._books.finished() and self._turn == self._books.turn

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        """See `ports.Ledger.admit`. Group ids must be unique over all ranks."""
        results: list[tuple[bool, Ticket | None]] = []
        async with self._admit_lock:
            while True:
                self._check_open("admit")
                seen = self._changes.number
                try:
                    decided, ticket = await self._run(lambda b: b.admit(group_id, oldest, self._rank), "admit", results)
                except asyncio.CancelledError:
                    # The lane may have admitted the group before the cancellation.
                    if results and (granted := results[-1][1]) is not None:
                        await self._undo(lambda b: b.withdraw(granted))
                    raise
                if decided:
                    return ticket
                with waiting_for_slot(self._recorder):
                    await self.wait_changed(seen)

    async def exhaust(self) -> None:
        """This rank admits no more groups. After a call on every rank, a step without further live groups counts as full."""

        def mark(books: Reservation) -> None:
            books.exhausted[self._rank] = True

        await self._run(mark, "exhaust")

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        """See `ports.Ledger.claim`. The state is FULL, too, if another rank has already committed the step."""
        self._check_open("claim")
        tickets = tuple(ready)
        results: list[tuple[ClaimState, Ticket | None]] = []
        try:
            state, ticket = await self._run(lambda b: self._claim(b, tickets), "claim", results)
            if ticket is not None:
                self._open[ticket.group_id] = ticket
            return state, ticket
        except asyncio.CancelledError:
            if results and (granted := results[-1][1]) is not None:
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
        """See `ports.Ledger.wait_changed`; for changes by any rank.

        Errors: LifecycleError if the ledger is closed, RankLost if the store is lost, LedgerError, StoreForged."""
        self._check_open("wait_changed")
        return await self._changes.wait(seen)

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        await self._run(lambda b: b.end(ticket, outcome), "end")
        if self._recorder is not None:
            self._recorder.count(f"groups/{outcome}/{reason}")

    async def commit(self) -> int:
        """See `ports.Ledger.commit`. Every rank must commit once per step. The first commit raises the shared turn."""
        self._check_open("commit")

        def change(books: Reservation) -> None:
            if books.turn == self._turn:
                books.commit()

        def closure() -> int:
            self._shared.transact(change)
            # On the lane, not after the await: the cancellation of the caller does not undo the commit.
            self._turn += 1
            self._open.clear()
            return self._turn

        return await self._lane.run(closure, name="commit")

    async def rollback(self) -> list[Ticket]:
        """See `ports.Ledger.rollback`. Only for the groups of this rank: every rank must roll back its own groups."""
        tickets = await self._run(lambda b: b.rollback(self._rank), "rollback")
        for ticket in tickets:
            self._open.pop(ticket.group_id, None)
        return tickets

    async def release(self, turn: int) -> None:
        """See `ports.Ledger.release`, for the engines of this rank. The slots are free after the release of every rank."""
        await self._run(lambda b: b.release(turn, self._rank), "release")

    def expired(self) -> list[Ticket]:
        """Live groups of this rank past their deadline. Always empty with `late="wait"`."""
        return self._books.expired(self._rank)

    def live_groups(self) -> list[Ticket]:
        """Groups of this rank that were admitted and not trained, by group id.

        Groups of the open step are included until this rank commits, even if another rank has committed the step."""
        live = {e.ticket.group_id: e.ticket for e in self._books.entries.values() if e.rank == self._rank}
        return [ticket for _, ticket in sorted((live | self._open).items())]

    def committed_elsewhere(self) -> list[Ticket]:
        """The part of `live_groups` in a step that another rank has committed and this rank has not."""
        if self._books.turn <= self._turn:
            return []
        return [ticket for group, ticket in sorted(self._open.items()) if group not in self._books.entries]

    def due(self) -> int:
        """See `ports.Ledger.due`. After an `admit` the number includes the change of that call."""
        return self._books.due(self._rank) or 0

    def last_step(self, rank: int) -> list[int]:
        """See `ports.Ledger.last_step`; from the newest known books."""
        return [group_id for group_id, owner in self._books.last_step.items() if owner == rank]

    def statistics(self) -> LedgerStatistics:
        """Statistics over all ranks, from the newest known books."""
        return self._books.statistics()

    def describe(self) -> str:
        """One sentence for error messages: the open step, and the group for which the step waits."""
        return self._books.describe()

    def remote_cause(self) -> str | None:
        first = self._books.first_live()
        if first is None or first.rank == self._rank:
            return None
        return (
            f"the open step waits for group {first.ticket.group_id} of rank {first.rank}; see the output of that rank"
        )

    async def _run(self, change: Callable[[Reservation], R], name: str, results: list[R] | None = None) -> R:
        """Run one transition on the lane. The result is also appended to `results`, even if the caller is cancelled."""

        def closure() -> R:
            result = self._shared.transact(change)
            if results is not None:
                results.append(result)
            return result

        return await self._lane.run(closure, name=name)

    async def _undo(self, change: Callable[[Reservation], None]) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._run(change, "undo")
            except LifecycleError:
                return  # the ledger is closed, so its books are not used any more

    @property
    def _awaited(self) -> int:
        return 1 if self._watch is None else self._watch.awaited

    def _on_books(self, number: int, books: Reservation) -> None:
        """New books, from the lane or from the watching thread."""
        self._call_soon(self._set_books, number, books)

    def _call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # the loop is closed, so no task waits

    def _set_books(self, number: int, books: Reservation) -> None:
        if number <= self._changes.number:
            return
        self._books, self._changes.number = books, number
        self._changes.wake()
        if self._recorder is not None:
            self._recorder.gauge("queue/slots/depth", books.slots.held)

    def _report_delay(self, number: int, rank: int, seconds: float) -> None:
        if self._recorder is not None:
            self._recorder.count("ledger/late")
            self._recorder.count("ledger/late_s", seconds)
        if not self._warned_of_delay:
            self._warned_of_delay = True
            logger.warning(
                "rank %d got change %d of the shared ledger %.1f s after rank %d made the change; further delays are only "
                "counted, as ledger/late",
                self._rank,
                number,
                seconds,
                rank,
            )

    def _on_watch_end(self, error: BaseException | None) -> None:
        if self._watch_ended is not None and not self._watch_ended.done():
            self._watch_ended.set_result(None)
        if error is not None and not self._closed:
            self._broken = error
            self._changes.wake(error)

    def _check_open(self, method: str) -> None:
        if self._closed or self._loop is None:
            state = "closed" if self._closed else "not open"
            raise LifecycleError(f"the ledger is {state}: call `{method}` inside `async with`")
        if self._broken is not None:
            raise self._broken
