"""The ledger of many ranks. Rank 0 has the books (`ledger.py`), and other ranks send rank 0 a request for every transition.

    "ledger"   [operation, rank, arguments] --> [state of the books for this rank, result]. Rank 0 calls its `LocalLedger` itself
    "watch"    --> the state after the next change. A rank asks while one of its tasks waits for a change. For its watchdog the
               rank also asks once a second, if groups do not travel between ranks. If groups travel, rank 0 watches all groups

A rank keeps its own tickets and the newest state. So a question about its own groups needs no message.

If the calling task is cancelled, `admit` and `claim` are undone, and every other operation is completed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from ..concurrency.shield import record_wait, wait_shielded
from ..errors import LedgerError, LifecycleError
from ..types import ClaimState, LedgerStatistics, Ticket
from .ledger import Changes, LocalLedger
from .line import LineClient, LineServer
from .reservation import Reservation, describe_step, first_by_deadline

if TYPE_CHECKING:
    from ..telemetry.recorder import Recorder

_SETTINGS = ("groups_per_step", "max_staleness", "late", "warmup", "by_rank")
_IDLE_WATCH_S = 1.0  # between two "watch" of a rank that waits for no change
# Rank 0 answers a "watch" after a pause: this time, multiplied by the number of ranks that ask. So answers take at most a tenth
# of the time of rank 0's event loop.
_PAUSE_PER_RANK_S = 0.001
# [number of the change, statistics, finished, due], and in answers to "watch" also the group that the open step waits for, as
# [rank, ticket] or None. Answers to operations omit this group, because finding it takes longer than an operation.
State: TypeAlias = Sequence[Any]


class LedgerServer:
    """The books at rank 0, and the operations of all ranks on these books."""

    def __init__(self, line: LineServer, books: Reservation) -> None:
        self.ledger = LocalLedger(books)
        # Ranks whose last claim was answered with WAIT, and that `notify_claimants` has not woken since.
        self._refused = set[int]()
        # Per rank: set when `notify_claimants` removes the rank from `_refused`; cleared by the next answer to its "watch".
        self._claimable = defaultdict[int, asyncio.Event](asyncio.Event)
        line.on("ledger", self._answer)
        line.on("watch", self._watch)

    def state(self, rank: int) -> State:
        """The answer to a "watch" of `rank`."""
        first = self.ledger.books.first_live()
        return *self._counts(rank), None if first is None else (first.rank, _plain(first.ticket))

    def _counts(self, rank: int) -> State:
        books = self.ledger.books
        s = books.statistics()
        counts = s.turn, s.live, s.claimed, s.held, s.admitted, s.trained, s.dropped, s.failed, s.slots
        return self.ledger.changes, counts, books.finished(), books.due(rank) or 0

    async def run(self, operation: str, rank: int, *arguments: Any) -> Any:
        """Run an operation of a rank. Errors: LedgerError."""
        ledger = self.ledger
        match operation, arguments:
            case "admit", (group_id, oldest):
                ticket = await ledger.admit(group_id, oldest, rank)
                return None if ticket is None else _plain(ticket)
            case "claim", (turn, tickets):
                if ledger.turn > turn:
                    return ClaimState.FULL.name, None
                state, ticket = await ledger.claim([Ticket(*each) for each in tickets], rank)
                (self._refused.add if state is ClaimState.WAIT else self._refused.discard)(rank)
                return state.name, None if ticket is None else _plain(ticket)
            case "assign", (ticket, tokens):
                return await ledger.assign(Ticket(*ticket), tokens)
            case "arrive", (ticket, sender):
                return await ledger.arrive(Ticket(*ticket), sender, rank)
            case "end", (ticket, outcome):
                # A group that `rank` has sent to another rank may have a place there, so `rank` must not end the group.
                if not ledger.books.trainers or ledger.may_end(Ticket(*ticket), rank):
                    await ledger.end(Ticket(*ticket), outcome, "")
            case "commit", (turn,):
                if ledger.turn == turn:
                    await ledger.commit()
            case "rollback", ():
                return [_plain(ticket) for ticket in await ledger.rollback(rank)]
            case "release", (turn,):
                await ledger.release(turn, rank)
            case "begin", (turn,):
                return await ledger.begin(turn, rank)
            case "exhaust", ():
                await ledger.exhaust(rank)
            case "join", (settings,):
                for name, theirs in zip(_SETTINGS, settings, strict=True):
                    if (ours := getattr(ledger.books, name)) != theirs:
                        raise LedgerError(f"rank {rank}: {name} is {theirs!r}, but {ours!r} on rank 0; use one value")
            case _:
                self.undo(operation, rank, *arguments)
        return None

    def undo(self, operation: str, rank: int, *arguments: Any) -> None:
        """For a cancelled caller: `withdraw` undoes its `admit`, `unclaim` undoes its `claim`. Ignores other operations."""
        match operation, arguments:
            case "withdraw", (group_id,):
                self.ledger.withdraw(group_id, rank)
            case "unclaim", (turn, tickets) if turn == self.ledger.turn:
                self.ledger.unclaim([Ticket(*each) for each in tickets], rank)

    async def _answer(self, peer: str, request: Sequence[Any], buffers: object) -> tuple[Any, tuple[()]]:
        operation, rank, *arguments = request
        result = await self.run(operation, rank, *arguments)
        return (self._counts(rank), result), ()

    async def _watch(self, peer: str, request: Sequence[int], buffers: object) -> tuple[State, tuple[()]]:
        rank, seen = request
        await self.ledger.wait_changed(seen)
        # Ranks that do not train ask only at the end of a run. So they do not count in the pause of a rank that trains and claims.
        trainers = self.ledger.books.trainers
        with anyio.move_on_after(_PAUSE_PER_RANK_S * (len(trainers) if rank in trainers else self.ledger.books.ranks)):
            await self._claimable[rank].wait()
        self._claimable[rank].clear()
        return self.state(rank), ()

    def notify_claimants(self) -> None:
        """After a change, end the pause of refused ranks: of all if the step is full, else of those in `books.claimants()`."""
        books = self.ledger.books
        if self._refused:
            for rank in self._refused.intersection(self._refused if books.step_complete() else books.claimants()):
                self._refused.discard(rank)
                self._claimable[rank].set()


class LineLedger:
    """A `ports.Ledger` like `LocalLedger`, for many ranks. Every rank must use the same settings. `async with` is required.

    line: the server of rank 0, or this rank's client of that server. books: on rank 0 the books of the run; other ranks read only
    the settings and the turn. The constructor registers the handlers: rank 0 must make its ledger before other ranks can connect.
    """

    def __init__(
        self,
        line: LineServer | LineClient,
        books: Reservation,
        rank: int,
        *,
        recorder: Recorder | None = None,
        follows: bool = False,
    ) -> None:
        """`follows`: this rank trains groups that are at another rank, its leader (`roles.py`)."""
        self._line, self._rank, self._recorder = line, rank, recorder
        self._settings = [getattr(books, name) for name in _SETTINGS]
        # The number of steps that this rank has committed. Another rank may have committed one step more.
        self._turn = self.first_turn = books.turn
        self._travels = bool(books.trainers)
        self._trains = follows or not books.trainers or rank in books.trainers
        self._live: dict[int, Ticket] = {}  # groups of this rank without a place
        # Groups of this rank with a place in the step that this rank commits next.
        self._placed: dict[int, Ticket] = {}
        self._server = LedgerServer(line, books) if isinstance(line, LineServer) else None
        self._changes = Changes()
        self._statistics = books.statistics()
        self._finished, self._due = False, 0
        self._earliest: tuple[int, Ticket] | None = None  # (rank, ticket) of the group with the earliest deadline
        self._admit_lock = asyncio.Lock()  # this rank admits in the order of the calls
        self._admitting: asyncio.Future[Any] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()  # set: a task waits for a change
        self._opened = self._closed = False
        self._thread = threading.get_ident()
        self._stale = False  # on rank 0: the books changed after `_refresh`
        self._lost: Exception | None = None  # set by `lose`
        if self._server is not None:
            self._server.ledger.on_change = self._on_change

    async def __aenter__(self) -> LineLedger:
        self._opened = True
        await self._request("join", self._settings)
        if isinstance(self._line, LineClient):
            self._watching = asyncio.get_running_loop().create_task(self._watch(self._line))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
        if self._watching is not None:
            await asyncio.wait([self._watching])

    def close(self) -> None:
        """Fail every waiter with LifecycleError. A second call does nothing. Rank 0 goes on answering the other ranks."""
        if not self._closed:
            self._closed = True
            if self._watching is not None:
                self._watching.cancel()
            self._wake(LifecycleError("the ledger was closed while a task waited for a change; open a new ledger"))

    def lose(self, error: Exception) -> None:
        """The run cannot go on, most often because a rank is lost: every waiter, and every further `admit`, `claim` and
        `wait_changed` raises `error`. A step that was applied can still be committed, and groups can be ended."""
        self._lost = self._lost or error
        self._wake(error)

    def _wake(self, error: Exception) -> None:
        self._changes.wake(error)
        if self._admitting is not None:
            self._admitting.cancel()

    @property
    def turn(self) -> int:
        """The number of steps that this rank has committed. Another rank may have committed one step more. On a rank that
        only generates: the highest number of all ranks."""
        return self._turn if self._trains else self.statistics().turn

    @property
    def changes(self) -> int:
        """The number of the newest change, by any rank, of which this rank knows."""
        return self._changes.number

    @property
    def finished(self) -> bool:
        """Whether every rank called `exhaust`, no rank has a group to train, and this rank committed every step."""
        self._refresh()
        return self._finished and self.turn == self._statistics.turn

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        """See `ports.Ledger.admit`. Group ids must be unique over all ranks."""
        async with self._admit_lock:
            self._check_open("admit")
            self._admitting = asyncio.ensure_future(self._request("admit", group_id, oldest))
            try:
                with record_wait(self._recorder, "a slot", "publish pump", "slots"):
                    granted = await self._admitting
            except asyncio.CancelledError:
                self._admitting.cancel()
                self._post("withdraw", group_id)
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    # `close` or `lose` cancelled only the request, not this task: raise their error instead.
                    self._check_open("admit")
                raise
            finally:
                self._admitting = None
        if granted is None:
            return None
        ticket = self._live[group_id] = Ticket(*granted)
        return ticket

    async def exhaust(self) -> None:
        """This rank admits no more groups. After a call on every rank, a step without further live groups counts as full."""
        await self._complete("exhaust")

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        """See `ports.Ledger.claim`. The state is FULL, too, if another rank has already committed the step."""
        self._check_open("claim")
        tickets = [_plain(ticket) for ticket in first_by_deadline(ready)]
        try:
            state, granted = await self._request("claim", self._turn, tickets)
        except asyncio.CancelledError:
            self._post("unclaim", self._turn, tickets)
            raise
        if granted is None:
            return ClaimState[state], None
        ticket = Ticket(*granted)
        self._live.pop(ticket.group_id, None)
        self._placed[ticket.group_id] = ticket
        return ClaimState[state], ticket

    async def assign(self, ticket: Ticket, tokens: int) -> int:
        """See `ports.Ledger.assign`. The group leaves `live_groups` of this rank. If it arrives here, `arrive` adds it again."""
        rank: int = await self._complete("assign", _plain(ticket), tokens)
        self._live.pop(ticket.group_id, None)
        return rank

    async def arrive(self, ticket: Ticket, sender: int) -> bool:
        """See `ports.Ledger.arrive`. If the result is True, the group is in `live_groups` of this rank from now on."""
        if kept := bool(await self._complete("arrive", _plain(ticket), sender)):
            self._live[ticket.group_id] = ticket
        return kept

    async def wait_changed(self, seen: int) -> int:
        """As `ports.Ledger.wait_changed`, for changes by any rank. Errors: LifecycleError after `close`; the error of `lose`."""
        self._check_open("wait_changed")
        self._wanted.set()
        return await self._changes.wait(seen)

    async def _watch(self, line: LineClient) -> None:
        try:
            while True:
                if not self._changes.awaited:
                    self._wanted.clear()
                    with anyio.move_on_after(None if self._travels else _IDLE_WATCH_S):
                        await self._wanted.wait()
                state, _ = await line.ask("watch", [self._rank, self._changes.number])
                self._set_state(state)
                # Let the woken tasks run, so that `awaited` is true only if a task waits again.
                await asyncio.sleep(0)
        except LifecycleError:
            # This rank closes its line.
            return
        except Exception as error:
            # Nothing else would wake the waiters.
            self.lose(error)

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        await self._complete("end", _plain(ticket), outcome)
        if self._recorder is not None:
            self._recorder.count(f"groups/{outcome}/{reason}")

    async def commit(self) -> int:
        """See `ports.Ledger.commit`. Every rank that trains must commit each step once. The first commit changes the books."""
        self._check_open("commit")
        await self._complete("commit", self._turn)
        return self._turn

    async def rollback(self) -> list[Ticket]:
        """See `ports.Ledger.rollback`. Only for the groups of this rank: every rank must roll back its own groups."""
        return await self._complete("rollback")  # type: ignore[no-any-return]  # `run` made tickets

    async def release(self, turn: int) -> None:
        """See `ports.Ledger.release`, for the engines of this rank. The slots are free after the release of every rank."""
        await self._complete("release", turn)

    def lose_generator(self, rank: int) -> list[int]:
        """On rank 0: a rank that only generates is lost. Returns the ids of its dropped groups. Other ranks play them again."""
        assert self._server is not None
        lost = self._server.ledger.lose_generator(rank)
        if self._recorder is not None and lost:
            self._recorder.count("groups/dropped/rank lost", len(lost))
        return lost

    def loads(self) -> Counter[int]:
        """On rank 0: rank -> number of its groups without a place."""
        assert self._server is not None
        entries = self._server.ledger.books.entries.values()
        return Counter(entry.rank for entry in entries if not entry.claimed)

    async def begin(self, turn: int) -> bool:
        return bool(await self._complete("begin", turn))

    def expired(self) -> list[Ticket]:
        """Live groups of this rank past their deadline. Always empty with `late="wait"`."""
        self._refresh()
        return [ticket for ticket in self._live.values() if ticket.deadline < self._statistics.turn]

    def live_groups(self, *, everywhere: bool = False) -> list[Ticket]:
        """The admitted groups of this rank that this rank has not committed, sorted by id. Another rank may have committed their
        step already. On rank 0 `everywhere` adds the groups of other ranks."""
        live = self._live | self._placed
        if everywhere and self._server is not None:
            books = self._server.ledger.books
            live |= {group_id: entry.ticket for group_id, entry in books.entries.items()}
            if books.turn > self._turn:
                # The books no longer have these tickets. Only the ids matter.
                live |= {group_id: Ticket(group_id, -1, -1) for group_id in books.last_step if group_id not in live}
        return [ticket for _, ticket in sorted(live.items())]

    def due(self) -> int:
        """See `ports.Ledger.due`. After an `admit` the admitted group is no longer due."""
        self._refresh()
        return self._due

    def last_step(self, rank: int) -> list[int]:
        """See `ports.Ledger.last_step`. Only rank 0 has the books."""
        if self._server is None:
            raise LifecycleError("rank 0 has the books of the last step, and only rank 0 may ask for them")
        return self._server.ledger.last_step(rank)

    def statistics(self) -> LedgerStatistics:
        """Statistics over all ranks, from the newest known state."""
        self._refresh()
        return self._statistics

    def describe(self) -> str:
        s = self.statistics()
        unknown = "rank 0 knows the earliest deadline" if s.live else "no group is live"
        return describe_step(s, self._settings[0], self._earliest, unknown)

    def remote_cause(self) -> str | None:
        self._refresh()
        if self._earliest is None or self._earliest[0] == self._rank:
            return None
        rank, ticket = self._earliest
        return f"the open step waits for group {ticket.group_id} of rank {rank}; see the output of that rank"

    async def _request(self, operation: str, *arguments: Any) -> Any:
        """Run an operation on the books. Errors: those of the operation; RankLost if rank 0 is lost."""
        if self._server is not None:
            return await self._server.run(operation, self._rank, *arguments)
        assert isinstance(self._line, LineClient)
        (state, result), _ = await self._line.ask("ledger", [operation, self._rank, *arguments])
        self._set_state(state)
        return result

    async def _complete(self, operation: str, *arguments: Any) -> Any:
        """Run an operation to its end, even if this task is cancelled."""

        async def run() -> Any:
            result = await self._request(operation, *arguments)
            # Update this rank's groups here, because a cancelled caller does not run on after the answer.
            if operation == "commit":
                self._turn += 1
                self._placed.clear()
            elif operation == "end":
                self._live.pop(arguments[0][0], None)
            elif operation == "rollback":
                result = [Ticket(*each) for each in result]
                for ticket in result:
                    if (mine := self._placed.pop(ticket.group_id, None)) is not None:
                        self._live[mine.group_id] = mine
            return result

        request = asyncio.ensure_future(run())
        if (cancelled := await wait_shielded(request)) is not None:
            if not request.cancelled():
                # Read the error, because asyncio logs errors that nobody reads.
                request.exception()
            raise cancelled
        return request.result()

    def _post(self, operation: str, *arguments: Any) -> None:
        """Start the undoing of an operation, without waiting for its end."""
        if self._server is not None:
            self._server.undo(operation, self._rank, *arguments)
        elif isinstance(self._line, LineClient):
            self._line.post("ledger", [operation, self._rank, *arguments])

    def _on_change(self) -> None:
        """On rank 0: called after each change of the books."""
        if not self._stale:
            self._stale = True
            # Read the books once for all changes of this iteration of the loop.
            asyncio.get_running_loop().call_soon(self._refresh)
        assert self._server is not None
        self._server.notify_claimants()
        self._changes.number = self._server.ledger.changes
        self._changes.wake()

    def _refresh(self) -> None:
        # Another thread (the watchdog's) gets the last known state: the books may be in the middle of a change.
        if self._stale and self._server is not None and threading.get_ident() == self._thread:
            self._stale = False
            self._set_state(self._server.state(self._rank))

    def _set_state(self, state: State) -> None:
        number, statistics, finished, due, *earliest = state
        if number < self._changes.number:
            return
        self._statistics, self._finished, self._due = LedgerStatistics(*statistics), finished, due
        for group in earliest:
            self._earliest = None if group is None else (group[0], Ticket(*group[1]))
        if number > self._changes.number:
            self._changes.number = number
            self._changes.wake()
        if self._recorder is not None:
            s = self._statistics
            self._recorder.gauge("queue/slots/depth", s.live + s.claimed + s.held)

    def _check_open(self, method: str) -> None:
        if self._closed or not self._opened:
            state = "closed" if self._closed else "not open"
            raise LifecycleError(f"the ledger is {state}: call `{method}` inside `async with`")
        if self._lost is not None and method != "commit":
            raise self._lost


def _plain(ticket: Ticket) -> tuple[int, int, int]:
    return ticket.group_id, ticket.oldest, ticket.deadline
