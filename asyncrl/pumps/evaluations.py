"""When held-out prompts are evaluated: while nothing else goes on with the weights, or beside the steps that follow.

    at v, the engine can pin it ─▶ a task evaluates v ─────────────────▶ tells v, then v + 1, ... as far as they came
                                   steps; publish v + 1: it waits to tell

Versions are told of in order, so that the lines of a run are in order, and a checkpoint is written once all before it were told of:
who goes on from it misses none. One evaluation at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

import anyio
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import spawn
from asyncrl.ports import Engine, PinnedVersion, PinsVersions

from .evaluate import EvaluatePump

Tell: TypeAlias = Callable[[Mapping[str, float]], Awaitable[None]]


class Evaluations:
    """See the module docstring."""

    def __init__(self, pump: EvaluatePump | None, engine: Engine, sync: Callable[[], Awaitable[None]]) -> None:
        """`pump`: None where there are no held-out prompts. `sync`: gives every engine the newest published weights."""
        self._pump = pump
        self._pins = engine if isinstance(engine, PinsVersions) else None
        self._sync = sync
        self._told = anyio.Event()  # of all versions that came: nothing runs beside
        self._told.set()
        self._later: list[Callable[[], Awaitable[None]]] = []
        self.unfinished: list[int] = []  # versions that are to be evaluated, and were not yet

    @property
    def progress(self) -> tuple[int, int] | None:
        """(completions that are scored, all of them) of the evaluation that runs now."""
        return None if self._pump is None else self._pump.progress

    def owes(self, version: int, last: bool) -> bool:
        """Whether an evaluation that was due until this version is missing; of the `last` version its own is."""
        pump = self._pump
        return pump is not None and any(pump.due(each, last) for each in range(pump.newest + 1, version + 1))

    async def all_told(self) -> None:
        """Wait until every version that came was told of. (Where all were, nothing else runs before the caller goes on: it is shown
        at once that it evaluates.)"""
        if not self._told.is_set():
            await self._told.wait()

    async def at(self, version: int, tell: Tell, *, last: bool, beside: TaskGroup | None) -> None:
        """`tell` gets the metrics of this version, none where it is not due, once all before it were told of. Returns then; with
        `beside`, where a part of the engine can stay at this version, at once. `last`: it is the last version of the run."""
        if self._pump is None or not self._pump.due(version, last):
            if self._told.is_set():
                await tell({})
            else:
                self._later.append(partial(tell, {}))
            return
        self.unfinished.append(version)
        await self.all_told()
        await self._sync()  # what is evaluated is this version, whatever the interval says
        pin = None if beside is None or self._pins is None else await self._pins.pin(version)
        if beside is None or pin is None:
            metrics = await self._pump.run(version)
            self.unfinished.remove(version)
            return await tell(metrics)
        self._told = anyio.Event()
        spawn(beside, f"evaluation of version {version}", self._beside, self._pump, version, pin, tell)

    async def _beside(self, pump: EvaluatePump, version: int, pin: PinnedVersion, tell: Tell) -> None:
        try:
            metrics = await pump.run(version, pin)
        finally:
            pin.end()
        self.unfinished.remove(version)
        await tell(metrics)
        while self._later:
            await self._later.pop(0)()
        self._told.set()
