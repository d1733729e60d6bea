"""How many groups a rank plays at once if several ranks generate.

A step waits for its oldest groups, wherever they are played. So a slow rank with as many groups as the others would hold up all of
them. Each rank compares the seconds of its groups with `usual_s`, the mean of the other ranks. Its limit falls while its groups
take more than `SLACK` times as long, and rises otherwise. So groups take about as long on all ranks, and a slow rank plays few.

A rank whose groups take too long even one by one pauses. It tries one group again after the pause, or sooner if no rank admits
groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

# Groups of healthy ranks wait in the store for up to half a step, so a group that takes this much longer delays no step.
SLACK = 1.25
GAIN = 0.25  # small: one long group does not prove that the rank is slow
# The limit is at most this many times `most`. So after a few long groups it is still above `most`.
RESERVE = 64.0
LEAST = 0.5  # a rank with a lower limit pauses
# A pause takes this many times as long as the group that was too slow. Each further such group doubles the factor.
_FIRST_PAUSE, _LONGEST_PAUSE = 4.0, 64.0
logger = logging.getLogger("asyncrl.pumps")


class Pace:
    """See the module docstring."""

    def __init__(self, most: int, admitted: Callable[[], int]) -> None:
        """`most`: groups that this rank plays at once at most. `admitted()`: groups that all ranks have admitted."""
        self.usual_s = 0.0  # 0: unknown, the limit stays
        self._most, self.limit = most, RESERVE * most
        self._admitted = admitted
        self._playing = 0
        self._played_s: list[float] = []
        self._pause = _FIRST_PAUSE
        self._resumes_at = self._poll_s = 0.0
        self._ended = anyio.Event()

    def set_most(self, most: int) -> None:
        """Change `most`, and the limit in proportion: another rank was lost or has joined."""
        if most != self._most:
            self.limit, self._most = self.limit * most / self._most, most

    def take_played(self) -> list[float]:
        """The seconds of the groups that ended since the last call."""
        played_s, self._played_s = self._played_s, []
        return played_s

    async def begin(self) -> None:
        """Wait until this rank may play one more group."""
        while self._playing + 1 > max(1.0, min(self.limit, self._most)):
            await self._ended.wait()
        before = -1
        while (left := self._resumes_at - anyio.current_time()) > 0 and self._admitted() != before:
            before = self._admitted()
            await anyio.sleep(min(left, self._poll_s))
        self._playing += 1

    def end(self, seconds: float) -> None:
        """A group was played in this time. 0: the group has failed, which says nothing about the speed."""
        self._playing -= 1
        if seconds > 0:
            self._played_s.append(seconds)
        if seconds > 0 and self.usual_s > 0:
            self.limit = min(RESERVE * self._most, self.limit * (SLACK * self.usual_s / seconds) ** GAIN)
            if seconds <= SLACK * self.usual_s:
                self._pause = _FIRST_PAUSE
            if self.limit < LEAST:
                self._start_pause(seconds)
        self._ended.set()
        self._ended = anyio.Event()

    def _start_pause(self, seconds: float) -> None:
        self.limit = LEAST
        if (now := anyio.current_time()) >= self._resumes_at:
            logger.warning(
                "this rank pauses for %.0f s: a group took %.1f s here and %.1f s elsewhere, so steps would wait for this rank",
                self._pause * seconds,
                seconds,
                self.usual_s,
            )
            self._resumes_at, self._poll_s = now + self._pause * seconds, seconds
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
