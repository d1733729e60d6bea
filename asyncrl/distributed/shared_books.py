"""The ledger's books as one value in the ranks' store, and the announcements of its changes.

    books        the newest state: number of the change, who made it and when, the books, and of every rank [awaited, wrote]
    change/41    who made change 41, and when: set once the books have it

The books are one JSON value under one key. A transition reads them, changes a copy and writes it back with `compare_set`;
whoever loses the race gets the winner's books in the answer and tries again on those. So some rank always advances, and every
transition is atomic over all ranks.

Announcements are what watchers wait for (`watch.py`), and they are removed again. `awaited` is the announcement that the
watcher of a rank waited for when that rank last wrote: it waits for that one or a later one ever after. What lies below the
least of these over all ranks, nobody will wait for, however far behind he is, and only that is removed. Every rank writes at
least once in each step (its release), so what is kept is the changes of a step or two.

`wrote` is the last change that a rank made. A rank that does not find its own there knows that somebody put an older value back.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from ..concurrency import awake
from ..errors import LedgerError, RankLost, StoreForged
from .reservation import Reservation
from .sealed import SealedStore

R = TypeVar("R")
Hear = Callable[[int, Reservation], None]  # (number of the change, the books after it)

BOOKS = "books"
# Announcements at most that one change removes: its caller waits, and one a change is all that comes.
_REMOVED = 8
_AWAITED, _WROTE = 0, 1


def announcement(number: int) -> str:
    """The key of a change."""
    return f"change/{number}"


def lost(rank: int, error: BaseException) -> RankLost:
    """What a failed call to the store is to a run."""
    return RankLost(
        f"rank {rank} lost the shared ledger, most likely because rank 0, which holds it, has left or died; the output of that "
        f"rank says why ({type(error).__name__}: {error})"
    )


def read(value: bytes, newest: int) -> dict[str, Any]:
    """The state in the books' value. `newest`: a change that this connection has seen. Errors: LedgerError."""
    state: dict[str, Any] = orjson.loads(value)
    if state["change"] < newest:
        raise LedgerError(
            f"the shared ledger went back from change {newest} to {state['change']}: somebody else wrote an old value into the "
            "ranks' store; keep others from its port"
        )
    return state


class SharedBooks:
    """For one thread, over a connection that nobody else uses. Every method blocks.

    awaited: the announcement that this rank's watcher waits for. hear: is told of every state that is read or written.
    timeout_s: how long one transition may fight for the books.
    """

    def __init__(self, store: SealedStore, rank: int, timeout_s: float, awaited: Callable[[], int], hear: Hear) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._awaited, self._hear = awaited, hear
        self._newest = 0  # change that was read or written here
        self._wrote = 0  # change of this rank

    def join(self, mine: Reservation) -> tuple[int, Reservation]:
        """Write the first state, or take what another rank wrote. Errors: LedgerError where its numbers are others."""
        first = {"change": 0, "by": self._rank, "at": time.time(), "kept": 0, "ranks": [[1, 0]] * mine.ranks}
        state = read(self._compare_set(b"", self._encode(first, mine)), 0)
        theirs = Reservation.from_state(state["books"])
        for name in ("groups_per_step", "max_staleness", "late", "ranks", "warmup", "by_rank"):
            own, other = getattr(mine, name), getattr(theirs, name)
            if own != other:
                raise LedgerError(f"rank {self._rank} has {name} = {own!r}, but the shared ledger has {other!r}")
        self._newest, self._wrote = state["change"], state["ranks"][self._rank][_WROTE]
        return self._newest, theirs

    def leave(self) -> None:
        """Wake this rank's watcher, which then sees that it is to end. Errors: as `transact`."""
        number = self._awaited()
        try:
            self.transact(lambda books: None, force=True)
            # The writer of the one that it waits for may have died before it announced it. Never one that is still to come:
            # the watchers of the others would look for it. (After that one, ours looks whether it is to end.)
            number = min(self._awaited(), self._newest)
        except (StoreForged, LedgerError):
            # Somebody else wrote the books: the watchers of the others shall look at them, too. Those that have heard of everything
            # wait for the one after the newest, whatever this rank's own watcher is behind.
            self._asked(self._store.set, announcement(self._newest + 1), _stamp(self._rank, time.time()))
            raise
        finally:
            self._asked(self._store.set, announcement(number), _stamp(self._rank, time.time()))

    def transact(self, change: Callable[[Reservation], R], *, force: bool = False) -> R:
        """Apply `change` to the newest books; `force` writes them even where nothing changed. Errors: of `change`; RankLost,
        StoreForged, LedgerError."""
        deadline = awake.now() + self._timeout_s
        # Read anew, always: an answer from older books than the caller has heard of may let it wait for what has happened.
        found = self._asked(self._store.get, BOOKS)
        while True:
            state = self._read(found)
            books = Reservation.from_state(state["books"])
            self._hear(state["change"], Reservation.from_state(state["books"]))
            result = change(books)
            if not force and books.to_state() == state["books"]:
                # Nothing to announce: else ranks that wait would wake each other for ever.
                return result
            head = self._head_after(state)
            written = self._encode(head, books)
            answer = self._compare_set(found, written)
            if answer == written:
                self._newest = self._wrote = head["change"]
                self._announce(state, head)
                self._hear(head["change"], books)
                return result
            # What the store answers where there is nothing under that key.
            if answer == found:
                raise LedgerError("the shared ledger was removed: somebody else deletes keys in the ranks' store")
            found = answer
            if awake.now() > deadline:
                raise LedgerError(f"rank {self._rank} lost every race for the shared ledger for {self._timeout_s:g} s")

    def _read(self, found: bytes) -> dict[str, Any]:
        state = read(found, self._newest)
        if state["ranks"][self._rank][_WROTE] != self._wrote:
            raise LedgerError(
                f"the shared ledger does not hold change {self._wrote} of rank {self._rank}: somebody else wrote an old value "
                "into the ranks' store; keep others from its port"
            )
        self._newest = state["change"]
        return state

    def _head_after(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of the next state, everything but the books."""
        number = state["change"] + 1
        ranks = [*state["ranks"]]
        ranks[self._rank] = [self._awaited(), number]
        # One more is kept: a writer who is late may announce the change before his own once more (see `_announce`).
        unneeded = min(awaited for awaited, _ in ranks) - 1
        kept = max(state["kept"], min(unneeded, state["kept"] + _REMOVED))
        return {"change": number, "by": self._rank, "at": time.time(), "kept": kept, "ranks": ranks}

    def _encode(self, head: dict[str, Any], books: Reservation) -> bytes:
        # The mark makes every value unique, so that a compare_set that finds "its" value did write it.
        return orjson.dumps({**head, "mark": uuid.uuid4().hex[:12], "books": books.to_state()})

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        return self._asked(self._store.compare_set, BOOKS, expected, desired)

    def _announce(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        # The one before once more: its writer may have died before it did, and who waits for it would not hear of this one.
        stamps = {announcement(state["change"]): _stamp(state["by"], state["at"]) for state in (before, now)}
        self._asked(self._store.multi_set, stamps)
        for number in range(before["kept"], now["kept"]):
            self._asked(self._store.delete_key, announcement(number))

    def _asked(self, call: Callable[..., Any], *args: Any) -> bytes:
        """A call to the store."""
        try:
            answer = call(*args)
        except RuntimeError as error:
            raise lost(self._rank, error) from error
        return answer if isinstance(answer, bytes) else b""


def _stamp(rank: int, at: float) -> str:
    return f"{rank} {at:.6f}"
