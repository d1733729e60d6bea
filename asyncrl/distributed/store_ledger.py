"""The ledger of many ranks: the same books, kept in the store that torchrun's ranks share.

The books are one JSON value under one key. A transition reads them, changes a copy and writes it back with
`compare_set`; whoever loses the race gets the winner's books in the answer and tries again on those. So some rank
always advances, and every transition is atomic over all ranks. Rule and proof: `reservation.py`.

Store calls block, so they run on a lane of their own. A second thread with a connection of its own waits, without
polling, for the key that announces the next change, and tells the loop.

    rank 0 --compare_set--> books (change 41 -> 42) --set "change/42"--> watchers of ranks 0, 1, 2 ... --> their loops

A rank that has died keeps its groups; it is torchrun that notices and ends the attempt. Until then `describe()` names
the rank which the open step waits for.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from ..concurrency.lane import ThreadLane
from ..errors import LedgerError, LifecycleError
from ..types import ClaimState, LedgerStatistics, Ticket
from .changes import Changes
from .reservation import Late, Reservation

if TYPE_CHECKING:
    from torch.distributed import Store

    from ..telemetry.recorder import Recorder

R = TypeVar("R")

_BOOKS = "books"
_KEPT_CHANGES = 256  # announcements kept for a watcher that is behind; one that is further behind reads the books anew
_LOOK_AGAIN_S = 60.0  # at the latest; only a lost announcement waits for this


class StoreLedger:
    """See `ports.Ledger` and `LocalLedger`; every rank opens one with the same numbers. `async with` is required.

    store: a connection that nobody else uses (`World.store("ledger")`); it is cloned once for the watching thread.
    rank, ranks: this one, and how many share the books.
    timeout_s: how long one transition may fight for the books, and how long the store may take to answer.
    """

    def __init__(
        self,
        store: Store,
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
        self._timeout_s = timeout_s
        self.first_turn = books.turn
        self._turn = books.turn  # of this rank: the steps that it has committed itself
        self._open: dict[int, Ticket] = {}  # of this rank, in the step that it has not committed: another one may have
        self._books = books  # as last heard; replaced, never changed
        self._changes = Changes()
        self._lane = ThreadLane("ledger", close_timeout_s=timeout_s)
        self._watch_ended: asyncio.Future[None] | None = None
        self._order = anyio.Lock()  # admissions of this rank wait in line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken: BaseException | None = None  # why the watching thread ended
        self._awaited = 0  # the number of the change that the watching thread waits for
        self._closed = False

    @classmethod
    def over(
        cls,
        store: Store,
        groups_per_step: int,
        max_staleness: int,
        late: Late = "wait",
        turn: int = 0,
        *,
        rank: int = 0,
        ranks: int = 1,
        warmup: int = 0,
        recorder: Recorder | None = None,
    ) -> StoreLedger:
        """The usual constructor: numbers as for `LocalLedger`, `groups_per_step` counted over all ranks."""
        books = Reservation(groups_per_step, max_staleness, late, turn, ranks, warmup)
        return cls(store, books, rank, recorder=recorder)

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> StoreLedger:
        if self._loop is not None or self._closed:
            raise LifecycleError("the ledger was opened twice")
        self._loop = asyncio.get_running_loop()
        self._watch_ended = self._loop.create_future()
        await self._lane.__aenter__()
        try:
            await self._lane.run(self._join, name="open the books")
            watching = self._store.clone()  # type: ignore[attr-defined]  # not in the stubs
        except BaseException:
            self._closed = True
            await self._lane.aclose()
            raise
        self._thread = threading.Thread(
            None, self._watch, "ledger-watch", (watching, self._changes.number), daemon=True
        )
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Fail every waiter with LifecycleError, end both threads. Closing twice is fine."""
        if self._closed or self._watch_ended is None:
            self._closed = True
            return
        self._closed = True
        self._changes.wake(LifecycleError("the ledger was closed while somebody waited for it"))
        with anyio.CancelScope(shield=True):
            try:
                await self._lane.run(self._leave, name="leave the books")
            except LedgerError:
                # The store is gone: the run is torn down around us, and nobody is left to tell about this rank's groups.
                self._broken = self._broken or LedgerError("the shared ledger is gone")
            finally:
                if (await asyncio.wait([self._watch_ended], timeout=5.0))[0]:  # else: it is a daemon
                    self._thread.join()  # it has only to return, and must not do so while the interpreter ends
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
                with self._waiting():
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
        """As `LocalLedger.end`."""
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
            self._transact(change)
            self._turn += 1  # here and not after the await: a cancelled caller has committed all the same
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

    def statistics(self) -> LedgerStatistics:
        """Over all ranks, as this one last heard."""
        return self._books.statistics()

    def describe(self) -> str:
        """One sentence for error messages: the open step, and whom it waits for."""
        return self._books.describe()

    # -- the books, on the lane --------------------------------------------------------------------------------------

    async def _run(self, change: Callable[[Reservation], R], name: str, done: list[R] | None = None) -> R:
        """One transition. `done` receives the result even where the caller is cancelled and cannot."""

        def closure() -> R:
            result = self._transact(change)
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

    def _join(self) -> None:
        first = self._encode(self._books, 0)
        found = json.loads(self._compare_set("", first))
        theirs = Reservation.from_state(found["books"])
        for name in ("groups_per_step", "max_staleness", "late", "ranks", "warmup"):
            mine, other = getattr(self._books, name), getattr(theirs, name)
            if mine != other:
                raise LedgerError(f"rank {self._rank} has {name} = {mine!r}, but the shared ledger has {other!r}")
        self._books, self._changes.number = theirs, found["change"]

    def _leave(self) -> None:
        """A change without content wakes the watching threads; this rank's then sees that it is to end."""
        self._transact(lambda books: None, force=True)
        # Its writer may have died before it announced the one that this rank waits for.
        self._asked(self._store.set, f"change/{self._awaited}", "1")

    def _transact(self, change: Callable[[Reservation], R], *, force: bool = False) -> R:
        """Apply `change` to the newest books; `force` writes them even where nothing changed."""
        deadline = time.monotonic() + self._timeout_s
        # Read anew, always: an answer from older books than the caller has heard of may let it wait for what has happened.
        found = self._asked(self._store.get, _BOOKS)
        while True:
            state = json.loads(found)
            books = Reservation.from_state(state["books"])
            number = state["change"]
            self._tell(number, Reservation.from_state(state["books"]))
            result = change(books)
            if not force and books.to_state() == state["books"]:
                return result  # nothing to announce: else ranks that wait would wake each other for ever
            written = self._encode(books, number + 1)
            found = self._compare_set(found, written)
            if found == written:
                self._announce(number + 1)
                self._tell(number + 1, books)
                return result
            if time.monotonic() > deadline:
                raise LedgerError(f"rank {self._rank} lost every race for the shared ledger for {self._timeout_s:g} s")

    def _encode(self, books: Reservation, number: int) -> str:
        # The writer's mark makes every value unique, so that a compare_set that finds "its" value did write it.
        mark = f"{self._rank}-{uuid.uuid4().hex[:12]}"
        return json.dumps({"change": number, "by": mark, "books": books.to_state()}, separators=(",", ":"))

    def _compare_set(self, expected: str, desired: str) -> str:
        return self._asked(self._store.compare_set, _BOOKS, expected, desired)

    def _announce(self, number: int) -> None:
        # The one before once more: its writer may have died before it did, and who waits for it would not hear of this one.
        self._asked(self._store.multi_set, [f"change/{number - 1}", f"change/{number}"], ["1", "1"])  # type: ignore[attr-defined]  # no stub
        if number > _KEPT_CHANGES:
            self._asked(self._store.delete_key, f"change/{number - _KEPT_CHANGES}")

    def _asked(self, call: Callable[..., Any], *args: Any) -> str:
        """A call to the store; its bytes as text."""
        try:
            answer = call(*args)
        except RuntimeError as exc:
            raise self._lost(exc) from exc
        return answer.decode() if isinstance(answer, bytes) else ""

    def _lost(self, error: BaseException) -> LedgerError:
        return LedgerError(f"rank {self._rank} lost the shared ledger: {type(error).__name__}: {error}")

    # -- hearing of changes --------------------------------------------------------------------------------------------

    def _watch(self, store: Store, seen: int) -> None:
        """The watching thread: wait for the next change of anybody, read the books, tell the loop."""
        broken: BaseException | None = None
        try:
            self._awaited = seen + 1
            while not self._closed:  # asked after `_awaited` was set: who closes reads that afterwards
                with suppress(RuntimeError):
                    store.wait([f"change/{self._awaited}"], timedelta(seconds=_LOOK_AGAIN_S))
                # After a timeout too: an announcement may have been removed, or its writer may have died before it.
                state = json.loads(store.get(_BOOKS))
                if state["change"] > seen:
                    seen = state["change"]
                    self._tell(seen, Reservation.from_state(state["books"]))
                self._awaited = seen + 1
        except Exception as exc:  # the connection is gone: every waiter must hear it, whatever it was
            broken = exc
        finally:
            self._call_soon(self._watch_over, broken)

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

    def _watch_over(self, broken: BaseException | None) -> None:
        if self._watch_ended is not None and not self._watch_ended.done():
            self._watch_ended.set_result(None)
        if broken is not None and not self._closed:
            self._broken = self._lost(broken)
            self._changes.wake(self._broken)

    def _waiting(self) -> AbstractContextManager[object]:
        if self._recorder is None:
            return nullcontext()
        task = asyncio.current_task()
        return self._recorder.wait(task.get_name() if task else "?", "a slot", on="publish pump", cause="slots")

    def _check_open(self, what: str) -> None:
        if self._closed or self._loop is None:
            raise LifecycleError(f"the ledger is {'closed' if self._closed else 'not open'}: it cannot {what}")
        if self._broken is not None:
            raise self._broken
