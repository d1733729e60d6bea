"""Divides the wall time of a step for each lane (the thread that owns a device): busy time by kind of closure, and idle time by
cause. A closure is a function that the lane's thread runs. `unexplained` is the idle time for which no task had recorded a wait.
If several waits are active at an idle moment, the cause that is first in `records.Cause` counts. The shares of each lane sum to 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .records import CAUSES, Interval, Window

_ORDER_OF = {cause: number for number, cause in enumerate(CAUSES)}
UNEXPLAINED = "unexplained"

# Closures whose kind is not the first part of their name.
KINDS = {
    "engine/decode": "decode",
    "engine/prefill": "prefill",
    "engine/weights": "publish",
    "engine/bind": "publish",
    "engine/outputs": "publish",
    "train/logprobs": "logprobs",
}


@dataclass(frozen=True, slots=True)
class LaneBudget:
    """Busy seconds by kind and idle seconds by cause, of one lane in one window. They sum to `wall`."""

    lane: str
    wall: float
    busy: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """`busy/{kind}`, `idle/{cause}` and always `idle/unexplained`. They sum to 1; in an empty window all are 0."""
        scale = 1.0 / self.wall if self.wall > 0 else 0.0
        shares = {f"busy/{kind}": seconds * scale for kind, seconds in self.busy.items()}
        shares[f"idle/{UNEXPLAINED}"] = 0.0
        shares.update({f"idle/{cause}": seconds * scale for cause, seconds in self.idle.items()})
        return shares


def kind_of(name: str) -> str:
    """The kind of a closure by the table `KINDS`; otherwise its name up to the first slash."""
    return KINDS.get(name) or name.partition("/")[0]


def lane_budget(window: Window, lane: str) -> LaneBudget:
    """Divide the wall time of a window for one lane. Costs about 1 us per interval."""
    wall = window.end - window.start
    if wall <= 0:
        return LaneBudget(lane, 0.0)
    idle = [interval for interval in window.idle if interval.lane is None or interval.lane == lane]
    busy = [interval for interval in window.busy if interval.lane == lane]
    # `_seconds_by_code` prefers the last interval in its list. So busy time comes after idle time, the first cause of `CAUSES`
    # after other causes, and the inner of two nested closures after the outer.
    idle.sort(key=lambda interval: _ORDER_OF[interval.label], reverse=True)
    busy.sort(key=lambda interval: interval.start)
    # A label is (is busy, kind or cause). Each label has a code, from 1. Code 0 is `unexplained`.
    labels = [(False, interval.label) for interval in idle] + [(True, kind_of(interval.label)) for interval in busy]
    codes = {label: code for code, label in enumerate(dict.fromkeys(labels), 1)}
    interval_codes = np.array([codes[label] for label in labels], np.int64)
    seconds = _seconds_by_code([*idle, *busy], interval_codes, window.start, window.end, len(codes) + 1)

    busy_s: dict[str, float] = {}
    idle_s: dict[str, float] = {}
    if seconds[0] > 0:
        idle_s[UNEXPLAINED] = float(seconds[0])
    for (is_busy, label), code in codes.items():
        if seconds[code] > 0:
            (busy_s if is_busy else idle_s)[label] = float(seconds[code])
    return LaneBudget(lane, wall, busy_s, idle_s)


def _seconds_by_code(
    intervals: Sequence[Interval], interval_codes: np.ndarray, start: float, end: float, count: int
) -> np.ndarray:
    """The seconds of each code, [count]. Of overlapping intervals the last in the list counts. Code 0: time without an interval."""
    bounds = np.array([(interval.start, interval.end) for interval in intervals], np.float64).reshape(-1, 2)
    # Subtract the start, because a large clock value would cost the last digits of the sum.
    bounds = np.clip(bounds - start, 0.0, end - start)
    edges = np.unique(np.concatenate([bounds.ravel(), [0.0, end - start]]))
    first = np.searchsorted(edges, bounds[:, 0]).tolist()
    last = np.searchsorted(edges, bounds[:, 1]).tolist()
    code_between_edges = np.zeros(edges.size - 1, np.int64)
    for index, code in enumerate(interval_codes.tolist()):
        code_between_edges[first[index] : last[index]] = code
    return np.bincount(code_between_edges, weights=np.diff(edges), minlength=count)


def sum_budgets(budgets: Sequence[LaneBudget], lane: str) -> LaneBudget:
    """The sum of budgets of several windows or lanes. `lane`: the name in the result."""
    busy, idle = Counter[str](), Counter[str]()
    for part in budgets:
        busy.update(part.busy)
        idle.update(part.idle)
    return LaneBudget(lane, sum(part.wall for part in budgets), busy, idle)


def budget_metrics(budgets: Sequence[LaneBudget]) -> dict[str, float]:
    """`busy/{kind}` and `idle/{cause}`, means over lanes. With several lanes also `busy/{lane}/{kind}`, `idle/{lane}/{cause}`."""
    if not budgets:
        return {}
    metrics = sum_budgets(budgets, "all").shares()
    if len(budgets) > 1:
        for part in budgets:
            for name, share in part.shares().items():
                section, label = name.split("/", 1)
                metrics[f"{section}/{part.lane}/{label}"] = share
    return metrics


class RunBudget:
    """Sums the budgets of all steps of a run. Call `step` once a step, and `metrics` at the end."""

    def __init__(self) -> None:
        self._lanes: dict[str, LaneBudget] = {}

    def step(self, window: Window) -> dict[str, float]:
        """Add one window. Returns the metrics of that window alone."""
        budgets = [lane_budget(window, lane) for lane in window.lanes]
        for added in budgets:
            lane = added.lane
            self._lanes[lane] = sum_budgets([self._lanes[lane], added], lane) if lane in self._lanes else added
        return budget_metrics(budgets)

    def metrics(self) -> dict[str, float]:
        """The metrics over all steps so far."""
        return budget_metrics(list(self._lanes.values()))
