"""The types of the recorder's results: causes, trace events, intervals, waits, windows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

# Why a lane (the thread that owns a device) is idle. If several waits are active at one moment, the uppermost of their causes in
# this list counts. For example, if training waits for a group while scoring waits for a reward, the cause is `reward`.
Cause: TypeAlias = Literal[
    "handoff",  # an idle lane has not started a submitted closure yet
    "loop",  # the event loop is late, or runs other code
    "start",  # the run is starting or ending
    "reward",  # a task waits for a reward worker
    "checkpoint",  # training waits for a checkpoint
    "publish",  # a task waits until an engine has the new weights
    "evaluate",  # training waits for an evaluation
    # The run waits for an environment, a tool, a producer or the program that runs asyncrl, and the engine has no request.
    "environment",
    "group",  # a task waits for a group, or for room in a queue
    "slots",  # generation waits for the permission to start a group
    "requests",  # an engine has no requests
]
CAUSES: tuple[str, ...] = get_args(Cause)


class TraceEvent(NamedTuple):
    """One event of the trace. `phase`, as in the Chrome trace format: X for a span, i for an event without duration."""

    phase: Literal["X", "i"]
    name: str
    track: str
    start: float  # seconds on the recorder's clock
    duration: float  # seconds
    args: dict[str, Any] | None


class Interval(NamedTuple):
    """Busy or idle time, in seconds on the recorder's clock. `lane` is None for idle time of all lanes."""

    label: str  # busy: the name of the closure; idle: the cause
    lane: str | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """An active wait: `who` waits for `what` from `on`."""

    who: str
    what: str
    on: str
    cause: str  # a `Cause`; empty: the wait is not idle time
    since: float  # on the recorder's clock
    # The waiting task of a `Recorder.watch`, whose stack shows where the task waits. None for other waits.
    task: asyncio.Task[Any] | None = None

    def describe(self, now: float) -> str:
        """A sentence for error messages. `now`: seconds on the recorder's clock."""
        return f"{self.who} waits for {self.what} from {self.on} for {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class Window:
    """The intervals and bounds of one step. An interval may begin before `start`. Intervals of other processes may end after `end`.
    If an activity has not ended at `end`, its interval is cut off at `end`. The next window repeats the interval from its start."""

    start: float
    end: float
    lanes: tuple[str, ...]
    busy: list[Interval]
    idle: list[Interval]
