"""The thread that hears of the other ranks' changes: it waits, without polling, for the announcement of the next one.

    rank 0 --compare_set--> books (change 41 -> 42) --set "change/42"--> watchers of ranks 0, 1, 2 ... --> their loops

No announcement that a watcher may still wait for is removed (`shared_books.py`), so one that is hundreds of changes behind finds
the next one there, and with it the newest books. A change that was heard late all the same (its writer was stopped before it
announced it, this thread got no processor, the network stood still) is told: the announcement says when it was made.
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
from .shared_books import BOOKS, Hear, announcement, lost, read

LATE_S = 1.0  # from when on a change was heard late
# At the latest; only a writer that died before it announced its change lets somebody wait for this.
_LOOK_AGAIN_S = 60.0


class Watch:
    """store: a connection that nobody else uses. seen: the change that this rank has heard of.

    All are called on the watching thread: `hear` with a new state, `late` with (change, the rank that made it, seconds), `ended`
    once, with the error that ended it.
    """

    def __init__(
        self,
        store: SealedStore,
        rank: int,
        seen: int,
        hear: Hear,
        late: Callable[[int, int, float], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        # The change whose announcement it waits for; only ever grows.
        self.awaited = seen + 1
        self._store, self._rank = store, rank
        self._hear, self._late, self._ended = hear, late, ended
        self._ending = False
        # By rank: the least that a change of it was ever behind. It has the difference of two machines' clocks in it.
        self._least: dict[int, float] = {}
        self._thread = threading.Thread(None, self._run, "ledger-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """At the next change, at the latest: who ends it makes one."""
        self._ending = True

    def join(self) -> None:
        """Wait for its end: see `end`."""
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            # Asked after `awaited` was set: who ends it reads that afterwards.
            while not self._ending:
                number, books = self._next()
                if books is not None:
                    self._hear(number, books)
                self.awaited = number + 1
        except Exception as broken:  # every waiter must hear it, whatever it was
            gone = isinstance(broken, RuntimeError) and not isinstance(broken, AsyncrlError)
            error = lost(self._rank, broken) if gone else broken
        finally:
            self._ended(error)

    def _next(self) -> tuple[int, Reservation | None]:
        """The newest change and its books; no books where there is nothing new after a long time."""
        key, away = announcement(self.awaited), awake.suspended_s()
        try:
            self._store.wait([key], timedelta(seconds=_LOOK_AGAIN_S))
        except RuntimeError:
            # After a time-out too: its writer may have died before it announced it.
            state = read(self._store.get(BOOKS), self.awaited - 1)
            made = state["by"], state["at"]
        else:
            stamp, found = self._store.multi_get([key, BOOKS])
            by, at = stamp.split()
            state = read(found, self.awaited - 1)
            if state["change"] < self.awaited:
                raise LedgerError(
                    f"change {self.awaited} of the shared ledger was announced, but it is at {state['change']}: somebody else "
                    "writes into the ranks' store; keep others from its port"
                )
            made = int(by), float(at)
        if state["change"] < self.awaited:
            return self.awaited - 1, None
        self._measure(*made, awake.suspended_s() - away)
        return state["change"], Reservation.from_state(state["books"])

    def _measure(self, by: int, at: float, away: float) -> None:
        """`away`: seconds in which nobody here ran, though the change may have been made then."""
        behind = time.time() - at - away
        self._least[by] = min(behind, self._least.get(by, behind))
        if behind - self._least[by] > LATE_S:
            self._late(self.awaited, by, behind - self._least[by])
