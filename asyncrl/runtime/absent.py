"""What stands for the parts that a rank does not have, because of its role (`distributed.roles`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from asyncrl.errors import LifecycleError
from asyncrl.ports import Ledger, WeightSink


class Absent:
    """In place of the engine, the environment and the rewards, on a rank that only trains."""

    weights: Mapping[str, float]
    calls_at_once = 1

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of the reward components."""
        self.weights = weights or {}

    async def __aenter__(self) -> Absent:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    def statistics(self) -> dict[str, float]:
        return {}

    def end_session(self, session: str) -> None:
        return

    async def generate(self, request: Any) -> NoReturn:
        raise LifecycleError(
            "this rank only trains (distributed.roles): it has no engine, no environment and no rewards"
        )

    run = score = generate


class CommittedVersions:
    """The versions of a dry run's engine on a rank that only generates. No weights are sent, so the ledger tells of new versions.
    Implements `pumps.follow.Versions`."""

    def __init__(self, ledger: Ledger, version: int, version_of: Callable[[int], int]) -> None:
        """`version`: at the start. `version_of(turn)`: of the weights after the steps of all turns below `turn`."""
        self._ledger, self._version_of = ledger, version_of
        self.version = version
        self.engine: WeightSink | None = None  # made later: its `version_source` reads `self.version`
        self._first = True

    async def next(self) -> int:
        while not self._first:
            seen = self._ledger.changes
            newest = self._version_of(self._ledger.statistics().turn)
            if newest > self.version:
                self.version = newest
                break
            await self._ledger.wait_changed(seen)
        self._first = False
        assert self.engine is not None
        await self.engine.update_weights(self.version)
        return self.version
