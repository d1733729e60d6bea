"""A thread that waits, without polling, for the announcement of the next change of the shared books.

    rank 0 --compare_set--> books (change 41 -> 42) --set "change/42"--> watchers of ranks 0, 1, 2 ... --> their event loops

An announcement is not deleted while a watcher may wait for it (`shared_books.py`). So a watcher that is hundreds of changes behind
finds the next announcement, and then reads the newest books. The announcement has the time of the change, so the watcher can
report a delay. Reasons for a delay: the writer was stopped, this thread got no CPU time, or the network was slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from ..concurrency import awake
from ..errors import AsyncrlError, LedgerError
from .reservation import Reservation
from .sealed import SealedStore
from .shared_books import BOOKS, OnBooks, announcement, rank_lost, read_state

LATE_S = 1.0  # a longer delay is reported
# Seconds until the books are read without an announcement. A writer may have died before its announcement.
_REREAD_S = 60.0


class Watch:
    """The thread and its callbacks, which run on the thread.

    store: a connection that nobody else uses. seen: the last change that this rank knows. on_books: called for new books.
    on_late: called with (change, rank of the change, delay in seconds). on_end: called once, with the error or None.
    """

    def __init__(
        self,
        store: SealedStore,
        rank: int,
        seen: int,
        on_books: OnBooks,
        on_late: Callable[[int, int, float], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        # The change whose announcement the thread waits for. This number never falls.
        self.awaited = seen + 1
        self._store, self._rank = store, rank
        self._on_books, self._on_late, self._on_end = on_books, on_late, on_end
        self._ending = False
        # By rank: the smallest age of an announcement, which contains the difference between the clocks of two machines.
        self._min_age: dict[int, float] = {}
        self._thread = threading.Thread(None, self._run, "ledger-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end after the next announcement. The caller must then make a change (`SharedBooks.leave`)."""
        self._ending = True

    def join(self) -> None:
        """Wait for the end of the thread, after `end`."""
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            # `SharedBooks.leave` reads `awaited` after `end`, so this loop must set `awaited` before it checks `_ending`.
            while not self._ending:
                number, books = self._next()
                if books is not None:
                    self._on_books(number, books)
                self.awaited = number + 1
        except Exception as exception:
            # Every error must reach the tasks that wait for a change.
            store_lost = isinstance(exception, RuntimeError) and not isinstance(exception, AsyncrlError)
            error = rank_lost(self._rank, exception) if store_lost else exception
        finally:
            self._on_end(error)

    def _next(self) -> tuple[int, Reservation | None]:
        """(newest change, its books). The books are None if there is no new change after `_REREAD_S`."""
        key, suspended_before = announcement(self.awaited), awake.suspended_s()
        try:
            self._store.wait([key], timedelta(seconds=_REREAD_S))
        except RuntimeError:
            # A timeout, or the store is lost. In the second case `get` raises an error.
            state = read_state(self._store.get(BOOKS), self.awaited - 1)
            rank, made_at = state["by"], state["at"]
        else:
            stamp, value = self._store.multi_get([key, BOOKS])
            by, at = stamp.split()
            rank, made_at = int(by), float(at)
            state = read_state(value, self.awaited - 1)
            if state["change"] < self.awaited:
                raise LedgerError(
                    f"change {self.awaited} of the shared ledger was announced, but the ledger has change {state['change']}: "
                    "another program writes into the ranks' store; block other programs from its port"
                )
        if state["change"] < self.awaited:
            return self.awaited - 1, None
        self._check_delay(rank, time.time() - made_at - (awake.suspended_s() - suspended_before))
        return state["change"], Reservation.from_state(state["books"])

    def _check_delay(self, rank: int, age: float) -> None:
        """`age`: seconds since the change by the two machines' clocks, without seconds in which this machine was suspended."""
        self._min_age[rank] = min(age, self._min_age.get(rank, age))
        if age - self._min_age[rank] > LATE_S:
            self._on_late(self.awaited, rank, age - self._min_age[rank])
