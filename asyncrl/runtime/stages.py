"""What the start and the end of a run are doing: one stage after another, so that a stage that never ends has a name."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.concurrency.watchdog import Standing

from .offload import where


class Stages:
    """Told by the loop's thread and by threads that load; read by the watchdog's."""

    def __init__(self) -> None:
        self._now = ""  # "": nothing is starting or ending, the pumps run
        self._told = 0  # how often something was said: it moves
        self._show: Callable[[str], None] | None = None

    def show_on(self, show: Callable[[str], None]) -> None:
        """What is said is for people, too, from now on."""
        self._show = show

    def say(self, text: str) -> None:
        """A stage begins, or one that goes on has moved: a stage, a colon and counts."""
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

    def standing(self, limit_s: float) -> Standing | None:
        """None while the pumps run."""
        stage = self._now
        if not stage:
            return None
        return Standing((self._told,), limit_s, f"the run stands still at {stage!r}", where)
