"""The values that the recorder hands out: causes, trace events, intervals, waits, windows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

Cause: TypeAlias = Literal[
    "slots",  # the rollout side waits for permission to start a group
    "group",  # the train pump waits for a whole group
    "requests",  # an engine has nothing to sample
    "reward",  # somebody waits for a reward worker
    # environments, tools, the program or its producers have the next move, and the engine has no request.
    "environment",
    # Somebody waits for an engine's acknowledgement of new weights.
    "publish",
    "evaluate",  # training waits for an evaluation
    "checkpoint",  # training waits for a checkpoint
    "start",  # the run is starting or ending
    # A closure was submitted and its idle lane had not started it yet.
    "handoff",
    # A closure had ended and the event loop had not yet got round to what comes next.
    "loop",
]
CAUSES: frozenset[str] = frozenset(get_args(Cause))


class TraceEvent(NamedTuple):
    """One stored event. `phase` as in the Chrome trace format: X a span, i an instant."""

    phase: Literal["X", "i"]
    name: str
    track: str
    start: float  # seconds on the recorder's clock
    duration: float  # seconds
    args: dict[str, Any] | None


class Interval(NamedTuple):
    """A recorded stretch of time. `lane` is None for a wait, which concerns every lane."""

    label: str  # closure name, or cause
    lane: str | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits, right now."""

    who: str
    what: str
    on: str
    cause: str
    since: float  # on the recorder's clock
    # Who waits, where that is a task whose place is worth knowing.
    task: asyncio.Task[Any] | None = None

    def describe(self, now: float) -> str:
        """The sentence for error messages; `now` in seconds, on the recorder's clock."""
        return f"{self.who} waits for {self.what} from {self.on} since {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class Window:
    """The intervals of one step, those that are still open included (ended at `end` here, whole in the next window)."""

    start: float
    end: float
    lanes: tuple[str, ...]
    busy: list[Interval]
    idle: list[Interval]
