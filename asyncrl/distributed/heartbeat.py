"""Signs of life of every rank in the shared store, so that a rank that stands still is named by the others.

    each rank, on a thread of its own, every `every_s`   set(rank, how many times it has)     read what the others have set

A stopped process, one whose GIL is held and one whose host is gone all fall silent; one that ends says so. No clock is compared
with another machine's: a rank is silent for as long as this one has seen the same number.
"""

from __future__ import annotations

import threading
import time

from ..errors import AsyncrlError
from .sealed import SealedStore

_BYE = b"bye"
_STORE = "the ranks' store, which rank 0 holds,"


class Heartbeat:
    """`with Heartbeat(...)`. Closing waits for the call of the store in progress, at most a second."""

    def __init__(self, store: SealedStore, rank: int, ranks: int, every_s: float = 2.0) -> None:
        """`store`: a connection of its own, with keys of its own (`World.store`)."""
        self._store = store
        self._rank = rank
        self._others = [each for each in range(ranks) if each != rank]
        self._every_s = every_s
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> what it set, since when
        self._missed: dict[int, int] = {}  # rank -> how often this one has looked since, and found the same
        self._answered = self._looked = time.monotonic()  # when the store did so; when this rank asked whether it had
        # The answer that was the last one at that look, and how long nothing but it has been seen.
        self._unanswered = (self._answered, 0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="asyncrl-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def silent(self) -> list[str]:
        """A few words for each rank that should have been heard of and was not; none once this is closed. From any thread."""
        if self._stop.is_set():
            return []
        now, longest = time.monotonic(), 3 * self._every_s
        if now - self._answered > longest:
            return [
                f"{_STORE} has not answered for {now - self._answered:.0f} s (stopped, wedged, or its machine is gone)"
            ]
        return [
            f"rank {rank} has given no sign of life for {now - since:.0f} s (stopped, wedged, or its machine is gone)"
            for rank, (value, since) in sorted(self._heard.items())
            if now - since > longest and value != _BYE
        ]

    def lost(self, longest_s: float) -> list[str]:
        """The ranks that were silent for so long while this one has looked: time in which it was stopped itself does not count.
        None once this is closed. From one thread, which looks again and again."""
        if self._stop.is_set():
            return []
        if (unanswered := self._without_answer()) > max(longest_s, 5 * self._every_s):
            return [f"{_STORE} has not answered for {unanswered:.0f} s"]
        missed = {rank: count * self._every_s for rank, count in sorted(self._missed.items())}
        longest_s = max(longest_s, 5 * self._every_s)
        return [
            f"rank {rank} has been silent for {seconds:.0f} s"
            for rank, seconds in missed.items()
            if seconds > longest_s
        ]

    def _without_answer(self) -> float:
        now, (answer, seconds) = time.monotonic(), self._unanswered
        seconds = seconds + min(now - self._looked, 5 * self._every_s) if answer == self._answered else 0.0
        self._unanswered, self._looked = (self._answered, seconds), now
        return seconds

    def _beat(self) -> None:
        keys = [str(rank) for rank in self._others]
        beats = 0
        complete = False  # every rank has set its key: before that, reading one would block
        try:
            while True:
                beats += 1
                self._store.set(str(self._rank), str(beats))
                complete = complete or self._store.check(keys)
                said = self._store.multi_get(keys) if complete else []
                self._answered = time.monotonic()
                for rank, value in zip(self._others, said, strict=False):
                    self._missed[rank] = 0 if value == _BYE else self._missed.get(rank, 0) + 1
                    if self._heard.get(rank, (b"",))[0] != value:
                        self._heard[rank], self._missed[rank] = (value, self._answered), 0
                if self._stop.wait(self._every_s):
                    return self._store.set(str(self._rank), _BYE.decode())
        except (RuntimeError, AsyncrlError):  # the store is gone, or forged: whoever needs it says so
            return
