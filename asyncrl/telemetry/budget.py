"""Where the wall time of a step went: busy by kind of closure, idle by recorded cause. Pure functions of a `Window`.

Nothing is found by subtraction except `unexplained`, which is exactly the time in which a lane was idle and nobody had
recorded a wait. For each lane the shares sum to 1.

How an idle moment gets its cause. All recorded waits that cover it are looked at, and the deepest cause wins, that is
the one earliest in `DEPTH`: a train pump that waits for a group while the score pump waits for a reward is idle because
of the reward. The order, and why:

1. `handoff`, `loop`: the work was there; a thread switch or the event loop was late. These name their lane.
2. `start`: nothing can run yet, or any more.
3. `reward`: user code, the end of every chain of waiting.
4. `checkpoint`, `publish`, `evaluate`: the pumps that hold others up on purpose.
5. `environment`: environments, tools, the program or its producers have the next move, and the engine has no request.
6. `group`: training waits for generation, with nothing of the above under way.
7. `slots`, then `requests`: generation waits for permission, and an engine for generation's requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .records import CAUSES, Interval, Window

DEPTH: tuple[str, ...] = (
    "handoff",
    "loop",
    "start",
    "reward",
    "checkpoint",
    "publish",
    "evaluate",
    "environment",
    "group",
    "slots",
    "requests",
)
assert set(DEPTH) == CAUSES
_RANK = {cause: rank for rank, cause in enumerate(DEPTH)}
UNEXPLAINED = "unexplained"

_KINDS: tuple[tuple[str, str], ...] = (
    ("engine/decode", "decode"),
    ("engine/prefill", "prefill"),
    ("engine/weights", "publish"),
    ("engine/bind", "publish"),
    ("engine/outputs", "publish"),
    ("decode", "decode"),
    ("prefill", "prefill"),
    ("train/logprobs", "logprobs"),
    ("admit", "prefill"),
    ("train", "train"),
    ("begin_train", "train"),
    ("finish_train", "train"),
    ("abort_train", "train"),
    ("compute_logprobs", "logprobs"),
    ("logprobs", "logprobs"),
    ("update_weights", "publish"),
    ("publish", "publish"),
    ("evaluate", "evaluate"),
    ("checkpoint", "checkpoint"),
    ("save", "checkpoint"),
)


@dataclass(frozen=True, slots=True)
class LaneBudget:
    """Seconds of one lane in one window, by kind and by cause; together they are `wall`."""

    lane: str
    wall: float
    busy: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)  # causes, and `unexplained` where there is any

    def shares(self) -> dict[str, float]:
        """`busy/{kind}`, `idle/{cause}` and always `idle/unexplained`, summing to 1; all zero in an empty window."""
        scale = 1.0 / self.wall if self.wall > 0 else 0.0
        shares = {f"busy/{kind}": seconds * scale for kind, seconds in self.busy.items()}
        shares[f"idle/{UNEXPLAINED}"] = 0.0
        shares.update({f"idle/{cause}": seconds * scale for cause, seconds in self.idle.items()})
        return shares


def kind_of(name: str) -> str:
    """The kind of a closure: by the table above, else its name up to the first `.`, `:`, `/` or space."""
    for prefix, kind in _KINDS:
        if name.startswith(prefix):
            return kind
    for position, letter in enumerate(name):
        if letter in ".:/ ":
            return name[:position]
    return name


def lane_budget(window: Window, lane: str) -> LaneBudget:
    """Split the window's wall time for one lane. Cost: about 1 us per interval."""
    wall = window.end - window.start
    if wall <= 0:
        return LaneBudget(lane, 0.0)
    idle = [interval for interval in window.idle if interval.lane is None or interval.lane == lane]
    busy = [interval for interval in window.busy if interval.lane == lane]
    idle.sort(key=lambda interval: _RANK[interval.label], reverse=True)
    busy.sort(key=lambda interval: interval.start)  # of nested closures the inner one names the time

    labels: list[str] = [UNEXPLAINED]
    codes: dict[tuple[bool, str], int] = {}
    painted = [*((False, interval.label) for interval in idle), *((True, kind_of(i.label)) for i in busy)]
    code = np.empty(len(painted), np.int64)
    for row, key in enumerate(painted):
        found = codes.get(key)
        if found is None:
            found = codes[key] = len(labels)
            labels.append(key[1])
        code[row] = found
    seconds = _paint([*idle, *busy], code, window.start, window.end, len(labels))

    busy_s: dict[str, float] = {}
    idle_s: dict[str, float] = {}
    if seconds[0] > 0:
        idle_s[UNEXPLAINED] = float(seconds[0])
    for (is_busy, label), number in codes.items():
        if seconds[number] > 0:
            (busy_s if is_busy else idle_s)[label] = float(seconds[number])
    return LaneBudget(lane, wall, busy_s, idle_s)


def _paint(intervals: Sequence[Interval], code: np.ndarray, start: float, end: float, count: int) -> np.ndarray:
    """Seconds per label when the intervals are painted over each other in order, clipped to the window; 0 is bare."""
    bounds = np.array([(interval.start, interval.end) for interval in intervals], np.float64).reshape(-1, 2)
    # Relative to the start: a clock far from zero would cost the last digits of the sum.
    bounds = np.clip(bounds - start, 0.0, end - start)
    edges = np.unique(np.concatenate([bounds.ravel(), [0.0, end - start]]))
    first = np.searchsorted(edges, bounds[:, 0]).tolist()
    last = np.searchsorted(edges, bounds[:, 1]).tolist()
    canvas = np.zeros(edges.size - 1, np.int64)
    for row, number in enumerate(code.tolist()):
        canvas[first[row] : last[row]] = number
    return np.bincount(canvas, weights=np.diff(edges), minlength=count)


def budget(window: Window) -> list[LaneBudget]:
    """One budget for each lane of the window."""
    return [lane_budget(window, lane) for lane in window.lanes]


def total(budgets: Sequence[LaneBudget], lane: str) -> LaneBudget:
    """The sum over windows (or over lanes) as one budget."""
    busy: dict[str, float] = {}
    idle: dict[str, float] = {}
    for each in budgets:
        for kind, seconds in each.busy.items():
            busy[kind] = busy.get(kind, 0.0) + seconds
        for cause, seconds in each.idle.items():
            idle[cause] = idle.get(cause, 0.0) + seconds
    return LaneBudget(lane, sum(each.wall for each in budgets), busy, idle)


def budget_metrics(budgets: Sequence[LaneBudget]) -> dict[str, float]:
    """`busy/{kind}` and `idle/{cause}`: of the one lane, or the mean over lanes plus `busy/{lane}/{kind}` and so on."""
    if not budgets:
        return {}
    metrics = total(budgets, "all").shares()
    if len(budgets) > 1:
        for each in budgets:
            for name, share in each.shares().items():
                section, label = name.split("/", 1)
                metrics[f"{section}/{each.lane}/{label}"] = share
    return metrics


class RunBudget:
    """The account of the whole run: call `step` once a step; `metrics` at the end."""

    def __init__(self) -> None:
        self._lanes: dict[str, LaneBudget] = {}

    def step(self, window: Window) -> dict[str, float]:
        """Account for one window; the metrics of that window alone."""
        budgets = budget(window)
        for each in budgets:
            known = self._lanes.get(each.lane)
            self._lanes[each.lane] = each if known is None else total([known, each], each.lane)
        return budget_metrics(budgets)

    def lanes(self) -> list[LaneBudget]:
        """The account of each lane, over all steps so far."""
        return list(self._lanes.values())

    def metrics(self) -> dict[str, float]:
        """The shares over everything accounted so far."""
        return budget_metrics(self.lanes())
