"""When the ranks of a sharded model train together: how they come to the same rounds without asking each other.

Under `distributed.sharding: fsdp` a microbatch is a collective, so a rank that wants to train needs all others there at once.
Round k of a step is due when `k x every` places of the step are claimed, over all ranks. That number is in the shared books,
which every rank hears of and which only grows within a step; so every rank joins every due round, in order, with whatever it
has claimed by then (perhaps nothing: it runs a microbatch of weight 0), and nobody waits for a rank that has no reason to come.

    claimed   0  1  2  3  4  5  6  7  8 = full
    round           1     2     3     4, then the last ones: until every rank says that it is finishing

While a rank waits in a round its lane decodes nothing. That cannot become a circle: another rank comes as soon as its own
lane and its publish of the last step let it, and neither waits for this one's groups. The publish has collectives of its
own, so a rank joins no round before its publish of the last step is through. Who dies or raises closes its connections: the
others' collective fails then, at the latest after its time-out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncrl.ports import Ledger

Round = Callable[[bool], Awaitable[bool]]  # finishing -> every rank is finishing, and nothing is left


class Rounds:
    """Of one rank. Without a trainer that has rounds nothing is ever due."""

    def __init__(self, join: Round | None, ledger: Ledger, every: int | None) -> None:
        """`every`: claimed places, over all ranks, from one round to the next; None: only the last ones, at finish."""
        self._join = join
        self._ledger = ledger
        self._every = every

    def due(self, joined: int) -> bool:
        """Whether round `joined + 1` of the open step is due."""
        if self._join is None or self._every is None:
            return False
        return self._ledger.statistics().claimed >= (joined + 1) * self._every

    async def join(self) -> None:
        """A step must be open. Errors: whatever the collective raises when a rank is gone."""
        assert self._join is not None
        await self._join(False)

    async def last(self) -> None:
        """Rounds until every rank has come here and nothing is left to run."""
        if self._join is not None:
            while not await self._join(True):
                pass
