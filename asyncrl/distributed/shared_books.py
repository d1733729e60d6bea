"""The ledger's books as one value in the ranks' store, and announcements of changes.

    key books        JSON: last change (number, rank, time), first kept announcement, [awaited, wrote] per rank, the books
    key change/41    rank and time of change 41; set after the books have change 41

A transition reads the books, changes a copy and writes the copy with `compare_set`. If another rank wrote in the meantime,
`compare_set` returns the books of that rank, and the transition is repeated with these books. So every transition is atomic
over all ranks, and at least one rank advances.

Watchers wait for announcements (`watch.py`). When a rank writes, it stores as `awaited` the announcement that its watcher waits
for. From then on this watcher waits only for this or a later announcement. So announcements below the smallest `awaited` of all
ranks are deleted. Every rank writes at least once per step, so the store keeps the announcements of a step or two.

`wrote` is the number of the last change of a rank. If a rank reads another number, another program restored older books.
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
OnBooks = Callable[[int, Reservation], None]  # (number of a change, books after the change)

BOOKS = "books"
# Limit of deletions per change, because the caller waits. On average a single deletion per change is enough.
_MAX_DELETED = 8
_WROTE = 1  # index in [awaited, wrote]


def announcement(number: int) -> str:
    """The key of the announcement of a change."""
    return f"change/{number}"


def rank_lost(rank: int, error: BaseException) -> RankLost:
    """The error of a run for a failed call of the store."""
    return RankLost(
        f"rank {rank} lost the shared ledger, most likely because rank 0, which holds the ledger, has ended or died; see the "
        f"output of rank 0 ({type(error).__name__}: {error})"
    )


def read_state(value: bytes, newest: int) -> dict[str, Any]:
    """Decode the value of the key `books`. `newest`: a change that the caller knows. Errors: LedgerError for older books."""
    state: dict[str, Any] = orjson.loads(value)
    if state["change"] < newest:
        raise LedgerError(
            f"the shared ledger went back from change {newest} to {state['change']}: another program wrote an old value into the "
            "ranks' store; block other programs from its port"
        )
    return state


class SharedBooks:
    """Reads and changes the shared books. For one thread, with a connection that nobody else uses. Every method blocks.

    awaited: returns the announcement that the watcher of this rank waits for. on_books: called for all books that are read or
    written. timeout_s: limit for one transition, which other ranks may delay.
    """

    def __init__(
        self, store: SealedStore, rank: int, timeout_s: float, awaited: Callable[[], int], on_books: OnBooks
    ) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._awaited, self._on_books = awaited, on_books
        self._newest = 0  # last change that was read or written
        self._wrote = 0  # last change of this rank

    def join(self, books: Reservation) -> tuple[int, Reservation]:
        """Write the first books, or read the books of another rank. Errors: LedgerError if their settings differ."""
        head = {"change": 0, "by": self._rank, "at": time.time(), "kept": 0, "ranks": [[1, 0]] * books.ranks}
        state = read_state(self._compare_set(b"", self._encode(head, books)), 0)
        shared = Reservation.from_state(state["books"])
        for name in ("groups_per_step", "max_staleness", "late", "ranks", "warmup", "by_rank"):
            own, other = getattr(books, name), getattr(shared, name)
            if own != other:
                raise LedgerError(f"rank {self._rank}: {name} is {own!r}, but {other!r} in the ledger; use one value")
        self._newest, self._wrote = state["change"], state["ranks"][self._rank][_WROTE]
        return self._newest, shared

    def leave(self) -> None:
        """Wake the watcher of this rank after `Watch.end`. Errors: as in `transact`."""
        number = self._awaited()
        try:
            self.transact(lambda books: None, force=True)
            # The writer of the awaited change may have died before its announcement, so this rank announces the change again.
            # A change that is not written yet must not be announced: watchers of other ranks would raise an error.
            number = min(self._awaited(), self._newest)
        except (StoreForged, LedgerError):
            # Another program wrote the books. With this announcement the watchers of other ranks read the books, too.
            self._call_store(self._store.set, announcement(self._newest + 1), _stamp(self._rank, time.time()))
            raise
        finally:
            self._call_store(self._store.set, announcement(number), _stamp(self._rank, time.time()))

    def transact(self, change: Callable[[Reservation], R], *, force: bool = False) -> R:
        """Apply `change` to the newest books and return its result. `force`: write books that did not change, too.

        Errors: those of `change`, RankLost, StoreForged, LedgerError.
        """
        deadline = awake.now() + self._timeout_s
        # Read anew: with older books a caller could start to wait for a change that has already happened.
        old_value = self._call_store(self._store.get, BOOKS)
        while True:
            state = self._read(old_value)
            books = Reservation.from_state(state["books"])
            self._on_books(state["change"], Reservation.from_state(state["books"]))
            result = change(books)
            if not force and books.to_state() == state["books"]:
                # No announcement: otherwise ranks that wait would wake each other forever.
                return result
            head = self._head_after(state)
            new_value = self._encode(head, books)
            answer = self._compare_set(old_value, new_value)
            if answer == new_value:
                self._newest = self._wrote = head["change"]
                self._announce(state, head)
                self._on_books(head["change"], books)
                return result
            # For a missing key `compare_set` returns the expected value.
            if answer == old_value:
                raise LedgerError("the shared ledger was removed: another program deletes keys in the store; stop it")
            old_value = answer
            if awake.now() > deadline:
                raise LedgerError(f"rank {self._rank} lost every race for the shared ledger for {self._timeout_s:g} s")

    def _read(self, value: bytes) -> dict[str, Any]:
        state = read_state(value, self._newest)
        if state["ranks"][self._rank][_WROTE] != self._wrote:
            raise LedgerError(
                f"the shared ledger does not hold change {self._wrote} of rank {self._rank}: another program wrote an old value "
                "into the ranks' store; block other programs from its port"
            )
        self._newest = state["change"]
        return state

    def _head_after(self, state: dict[str, Any]) -> dict[str, Any]:
        """The next state without the books."""
        number = state["change"] + 1
        ranks = [*state["ranks"]]
        ranks[self._rank] = [self._awaited(), number]
        # Minus 1, because a slow rank may set the previous announcement again (`_announce`).
        first_needed = min(awaited for awaited, _ in ranks) - 1
        kept = max(state["kept"], min(first_needed, state["kept"] + _MAX_DELETED))
        return {"change": number, "by": self._rank, "at": time.time(), "kept": kept, "ranks": ranks}

    def _encode(self, head: dict[str, Any], books: Reservation) -> bytes:
        # The mark makes every value unique. So a `compare_set` that returns the new value has written this value.
        return orjson.dumps({**head, "mark": uuid.uuid4().hex[:12], "books": books.to_state()})

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        return self._call_store(self._store.compare_set, BOOKS, expected, desired)

    def _announce(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        # The previous change is announced again: its writer may have died before its announcement, and watchers may wait for it.
        stamps = {announcement(state["change"]): _stamp(state["by"], state["at"]) for state in (before, now)}
        self._call_store(self._store.multi_set, stamps)
        for number in range(before["kept"], now["kept"]):
            self._call_store(self._store.delete_key, announcement(number))

    def _call_store(self, call: Callable[..., Any], *args: Any) -> bytes:
        """Call the store. Errors: RankLost for a RuntimeError of the store."""
        try:
            answer = call(*args)
        except RuntimeError as error:
            raise rank_lost(self._rank, error) from error
        return answer if isinstance(answer, bytes) else b""


def _stamp(rank: int, at: float) -> str:
    return f"{rank} {at:.6f}"
