"""Stand-ins for the parts that a rank does not have, because of its role (`distributed.roles`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from asyncrl.errors import LifecycleError
from asyncrl.ports import WeightSink
from asyncrl.pumps.dispatch import Dispatch
from asyncrl.pumps.follow import Remote


class Absent:
    """Stands in for the engine, the environment and the rewards on a rank that only trains."""

    weights: Mapping[str, float]
    calls_at_once = 1

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: name of a reward component -> weight."""
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


class VersionSender:
    """The sink of a dry run with roles. There are no weights to send, so rank 0 sends each version's number."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def update_weights(self, version: int) -> None:
        await self._dispatch.send_version(version)


class SentVersions:
    """The versions of a dry run's engine on a rank that only generates."""

    def __init__(self, remote: Remote, version: int) -> None:
        """`version`: the version at the start."""
        self._remote = remote
        self.version = version
        self.engine: WeightSink | None = None  # set later: making the engine needs this object
        self._next_was_called = False

    async def next(self) -> int:
        if self._next_was_called:
            self.version = await self._remote.wait_sent_version(self.version + 1)
        self._next_was_called = True
        assert self.engine is not None
        await self.engine.update_weights(self.version)
        return self.version
