"""How many groups a rank plays at once if several ranks generate.

A step waits for its oldest groups, also for those of slow ranks. So a slow rank that plays as many groups as a fast rank would
delay every step. Each rank compares the duration of its groups with the mean duration on the other ranks. If its groups take more
than `SLACK` times the mean, the rank's limit of groups falls; if less, it rises. So groups take equally long on all ranks.

If groups take too long even one at a time, the rank pauses, then plays one group. If no rank admits groups, the pause ends early.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

# A group that takes at most this many times the mean delays no step: finished groups wait in the store for up to half a step.
SLACK = 1.25
# Exponent in `Pace.end`. Small, because one long group does not prove that the rank is slow.
GAIN = 0.25
# The limit is at most this many times `max_playing`. Only many long groups bring it below `max_playing`, where it takes effect.
RESERVE = 64.0
MIN_LIMIT = 0.5  # a rank with a lower limit pauses
# A pause takes this many times as long as the group that was too slow. The factor doubles with each pause, up to the largest.
_FIRST_FACTOR, _LARGEST_FACTOR = 4.0, 64.0
logger = logging.getLogger("asyncrl.pumps")


class Pace:
    """See the module docstring."""

    def __init__(self, max_playing: int, admitted: Callable[[], int]) -> None:
        """`max_playing`: the most groups that this rank may play at once. `admitted()`: number of admitted groups of all ranks."""
        self.others_mean_s = 0.0  # 0: unknown, then the limit does not change
        self._max_playing, self.limit = max_playing, RESERVE * max_playing
        self._admitted = admitted
        self._playing = 0
        self._played_s: list[float] = []
        self._pause_factor = _FIRST_FACTOR
        self._resumes_at = self._poll_s = 0.0
        self._ended = anyio.Event()

    def set_max_playing(self, max_playing: int) -> None:
        """Change `max_playing`, and the limit in proportion. Needed after another rank was lost or has joined."""
        if max_playing != self._max_playing:
            self.limit, self._max_playing = self.limit * max_playing / self._max_playing, max_playing

    def take_played(self) -> list[float]:
        """The seconds of each group that was played since the last call."""
        played_s, self._played_s = self._played_s, []
        return played_s

    async def begin(self) -> None:
        """Wait until this rank may play one more group."""
        while self._playing + 1 > max(1.0, min(self.limit, self._max_playing)):
            await self._ended.wait()
        # If no rank admitted a group since the previous poll, the pause ends: the other ranks may wait for this rank.
        seen = -1
        while (pause_s := self._resumes_at - anyio.current_time()) > 0 and self._admitted() != seen:
            seen = self._admitted()
            await anyio.sleep(min(pause_s, self._poll_s))
        self._playing += 1

    def end(self, seconds: float) -> None:
        """A group has ended after `seconds`. 0: the group has failed, so its time does not count."""
        self._playing -= 1
        if seconds > 0:
            self._played_s.append(seconds)
        if seconds > 0 and self.others_mean_s > 0:
            self.limit = min(RESERVE * self._max_playing, self.limit * (SLACK * self.others_mean_s / seconds) ** GAIN)
            if seconds <= SLACK * self.others_mean_s:
                self._pause_factor = _FIRST_FACTOR
            if self.limit < MIN_LIMIT:
                self._start_pause(seconds)
        self._ended.set()
        self._ended = anyio.Event()

    def _start_pause(self, seconds: float) -> None:
        self.limit = MIN_LIMIT
        if (now := anyio.current_time()) >= self._resumes_at:
            pause_s = self._pause_factor * seconds
            words = (
                "this rank pauses for %.0f s: a group took %.1f s here, and on other ranks %.1f s in the mean, so steps would wait "
                "for this rank"
            )
            logger.warning(words, pause_s, seconds, self.others_mean_s)
            self._resumes_at, self._poll_s = now + pause_s, seconds
            self._pause_factor = min(2 * self._pause_factor, _LARGEST_FACTOR)
