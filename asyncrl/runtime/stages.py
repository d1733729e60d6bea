"""What the watchdog looks at from the first moment of a run: the stages of its start and its end, its lanes, the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.concurrency.offload import where
from asyncrl.concurrency.watchdog import Standing
from asyncrl.distributed.heartbeat import Heartbeat


class Stages:
    """One stage after another, so that one that never ends has a name.

    Told by the loop's thread and by threads that load; read by the watchdog's.
    """

    def __init__(self) -> None:
        self._now = ""  # "": nothing is starting or ending, the pumps run
        self._told = 0  # how often something was said: it moves
        self._show: Callable[[str], None] | None = None
        self.lanes: list[Any] = []
        self.heartbeat: Heartbeat | None = None  # where there are several ranks, once they have met

    def show_on(self, show: Callable[[str], None]) -> None:
        """What is said is for people, too, from now on."""
        self._show = show

    def say(self, text: str) -> None:
        """A stage begins, or one that goes on has moved: a stage, a colon and counts. While the pumps run it is none, as of a
        worker that is started again: nobody would end it."""
        if self._now:
            self.begin(text)
        if self._show is not None:
            self._show(text)

    def begin(self, text: str) -> None:
        """As `say`, for the watchdog alone."""
        self._now = text
        self._told += 1

    def end(self) -> None:
        """From now on it is for the pumps to move."""
        self._now = ""

    def silent_ranks(self, longest_s: float | None) -> list[str]:
        """A few words for each; `longest_s`: only for those that were silent for longer than that."""
        return [] if self.heartbeat is None else self.heartbeat.silent(longest_s)

    def standing(self, limit_s: float) -> Standing | None:
        """None while the pumps run."""
        stage = self._now
        if not stage:
            return None
        return Standing((self._told,), limit_s, f"the run stands still at {stage!r}", where)
