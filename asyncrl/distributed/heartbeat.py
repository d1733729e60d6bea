"""Signs of life of every rank in the shared store, so that a rank that stands still is named by the others.

    each rank, on a thread of its own, every `every_s`   set(rank, how many times it has)     read what the others have set

A stopped process, one whose GIL is held and one whose host is gone all fall silent; one that ends says so. No clock is compared
with another machine's: a rank is silent for as long as this one has seen the same number.
"""

from __future__ import annotations

import threading

from ..concurrency import awake
from ..errors import AsyncrlError
from .sealed import SealedStore

_BYE = b"bye"


class Heartbeat:
    """`with Heartbeat(...)`. Closing waits for the call of the store in progress, at most a second."""

    def __init__(self, store: SealedStore, rank: int, ranks: int, every_s: float = 2.0) -> None:
        """`store`: a connection of its own, with keys of its own (`World.store`)."""
        self._store = store
        self._rank = rank
        self._others = [each for each in range(ranks) if each != rank]
        self._every_s = every_s
        self._heard: dict[int, bytes] = {}  # rank -> what it set
        # Rank -> how often this one has looked since, and found the same.
        self._missed: dict[int, int] = {}
        self._answered = awake.now()  # when the store did so
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="asyncrl-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def silent(self, longest_s: float | None = None) -> list[str]:
        """A few words for each rank that was silent for so long while this one has looked, for five beats at the least (None: for
        three); none once this is closed. From any thread."""
        if self._stop.is_set():
            return []
        longest = 3 * self._every_s if longest_s is None else max(longest_s, 5 * self._every_s)
        found = [
            (f"rank {rank} has given no sign of life", count * self._every_s)
            for rank, count in list(self._missed.items())
        ]
        if (unanswered := awake.now() - self._answered) > longest:
            found = [("the ranks' store, which rank 0 holds, has not answered", unanswered)]
        return [
            f"{what} for {seconds:.0f} s (stopped, wedged, or its machine is gone)"
            for what, seconds in sorted(found)
            if seconds > longest
        ]

    def _beat(self) -> None:
        keys = [str(rank) for rank in self._others]
        beats = 0
        # Every rank has set its key: before that, reading one would block.
        complete = False
        try:
            while True:
                beats += 1
                self._store.set(str(self._rank), str(beats))
                complete = complete or self._store.check(keys)
                said = self._store.multi_get(keys) if complete else []
                self._answered = awake.now()
                for rank, value in zip(self._others, said, strict=False):
                    same = self._heard.get(rank) == value != _BYE
                    self._heard[rank], self._missed[rank] = value, self._missed[rank] + 1 if same else 0
                if self._stop.wait(self._every_s):
                    return self._store.set(str(self._rank), _BYE.decode())
        except (RuntimeError, AsyncrlError):  # the store is gone, or forged: whoever needs it says so
            return
