"""Heartbeats of every rank in the shared store. With heartbeats each rank can name a rank that hangs.

A thread of each rank sets, every `every_s` seconds, the key of its rank to a counter, and reads the keys of the other ranks. The
counter of a rank stops if its process is stopped, its GIL is held, or its machine is lost. A rank that ends sets its key to "bye".
Each rank measures silence by its own clock, as the time in which a counter did not change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..concurrency import awake
from ..errors import AsyncrlError

if TYPE_CHECKING:
    from .ranks_store import RankStore

_BYE = b"bye"


class Heartbeat:
    """`with Heartbeat(...)` runs the thread. The exit waits at most a second for a call of the store."""

    def __init__(self, store: RankStore, rank: int, ranks: Iterable[int], every_s: float = 2.0) -> None:
        """`store`: a connection that nobody else uses (`World.store`). `ranks`: the ranks that are watched."""
        self._store = store
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._every_s = every_s
        self._values: dict[int, bytes] = {}  # rank -> last value of its key
        # Rank -> number of beats in which the value did not change.
        self._missed: dict[int, int] = {}
        self._answered_at = awake.now()  # last answer of the store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="asyncrl-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def silent(self, longest_s: float | None = None) -> list[str]:
        """A sentence for each rank that was silent for `longest_s` and for at least 5 beats, or without `longest_s` for 3 beats.

        Empty after the exit of the context. Thread-safe."""
        if self._stop.is_set():
            return []
        longest = 3 * self._every_s if longest_s is None else max(longest_s, 5 * self._every_s)
        silences = [
            (f"rank {rank} has given no sign of life", count * self._every_s)
            for rank, count in list(self._missed.items())
        ]
        if (unanswered := awake.now() - self._answered_at) > longest:
            silences = [("the ranks' store, which rank 0 holds, has not answered", unanswered)]
        return [
            f"{sentence} for {seconds:.0f} s (stopped, blocked, or its machine is gone)"
            for sentence, seconds in sorted(silences)
            if seconds > longest
        ]

    def _beat(self) -> None:
        keys = [str(rank) for rank in self._others]
        beats = 0
        # Whether every rank has set its key. A read of a missing key blocks.
        complete = False
        try:
            while True:
                beats += 1
                self._store.set(str(self._rank), str(beats))
                complete = complete or self._store.check(keys)
                values = self._store.multi_get(keys) if complete else []
                self._answered_at = awake.now()
                for rank, value in zip(self._others, values, strict=False):  # no values before `complete`
                    missed = value != _BYE and value == self._values.get(rank)
                    self._missed[rank] = self._missed[rank] + 1 if missed else 0
                    self._values[rank] = value
                if self._stop.wait(self._every_s):
                    return self._store.set(str(self._rank), _BYE.decode())
        except (RuntimeError, AsyncrlError):  # the store is lost or forged: the ledger raises the error
            return
