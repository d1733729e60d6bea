"""The types of the recorder's results: causes, trace events, intervals, waits, windows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

# Why a lane is idle. If several waits are active at one moment, the earliest cause of this list counts. For example, the train pump
# waits for a group while the score pump waits for a reward: the cause is `reward`.
Cause: TypeAlias = Literal[
    "handoff",  # an idle lane has not started a submitted closure yet
    "loop",  # the event loop is late, or runs other code
    "start",  # the run is starting or ending
    "reward",  # a task waits for a reward worker
    "checkpoint",  # training waits for a checkpoint
    "publish",  # a task waits until an engine has the new weights
    "evaluate",  # training waits for an evaluation
    # An environment, a tool, a producer or the embedding program must act, and the engine has no request.
    "environment",
    "group",  # a pump waits for a group, or for room in a queue
    "slots",  # the rollout pump waits for a slot
    "requests",  # an engine has no requests
]
CAUSES: tuple[str, ...] = get_args(Cause)


class TraceEvent(NamedTuple):
    """One stored event. `phase` is that of the Chrome trace format: X for a span, i for an instant."""

    phase: Literal["X", "i"]
    name: str
    track: str
    start: float  # seconds on the recorder's clock
    duration: float  # seconds
    args: dict[str, Any] | None


class Interval(NamedTuple):
    """Busy or idle time. `lane` is None for a wait, which counts for every lane."""

    label: str  # the name of the closure, or the cause
    lane: str | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """An active wait: `who` waits for `what` from `on`."""

    who: str
    what: str
    on: str
    cause: str
    since: float  # on the recorder's clock
    # The waiting task, if its stack may show the reason.
    task: asyncio.Task[Any] | None = None

    def describe(self, now: float) -> str:
        """A sentence for error messages. `now`: seconds on the recorder's clock."""
        return f"{self.who} waits for {self.what} from {self.on} for {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class Window:
    """The intervals of one step. An interval that is still open ends at `end` here; the next window has it from its start on."""

    start: float
    end: float
    lanes: tuple[str, ...]
    busy: list[Interval]
    idle: list[Interval]
