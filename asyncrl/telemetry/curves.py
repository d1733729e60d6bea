"""The lines of `metrics.jsonl` as curves of bounded size: in a long run a point is the mean of many steps."""

from __future__ import annotations

import math
from array import array
from typing import Any

MOST_POINTS = 4_000  # of a curve: more than a screen has columns
# With this many curves only shares of the time get another curve: environments and producers may invent any number of names.
MOST_NAMES = 1_000


def is_share(name: str) -> bool:
    """Whether the metric is a share of the time: `busy/*` or `idle/*`."""
    return name.startswith(("busy/", "idle/"))


def _accounted(name: str) -> str:
    """The metric whose count of lines (or seconds) divides the sum of `name`: for a share, the lane's `idle/unexplained`, which
    is in each line with shares of the lane; for another metric, `name` itself."""
    lane = name.partition("/")[2].rpartition("/")[0]
    return "/".join(["idle", *filter(None, [lane]), "unexplained"]) if is_share(name) else name


class Curves:
    """Sums over `lines_per_point` lines for each point; the last may have fewer lines.

    Shares of the time are weighted by the seconds of their lines. A share that is missing in a line is 0 there.
    """

    def __init__(self, lines: int, most_points: int = MOST_POINTS) -> None:
        """`lines`: how often `add` is called, at most."""
        self.lines_per_point = max(1, -(-lines // most_points))
        self._points = -(-lines // self.lines_per_point)
        self._lines = 0
        # The first metric without a curve, if there are more than `MOST_NAMES` metrics.
        self.first_omitted: str | None = None
        self.steps: list[int] = []  # the last step of each point
        self.weights: list[float] = []  # seconds of each point
        self._sums: dict[str, array[float]] = {}  # [points]
        self._counts: dict[str, array[float]] = {}  # number of lines; for shares of the time, seconds

    def add(self, row: dict[str, Any], seconds: float) -> None:
        """Add a line of metrics of a step that took `seconds`."""
        point = self._lines // self.lines_per_point
        self._lines += 1
        if point == len(self.steps):
            self.steps.append(0)
            self.weights.append(0.0)
        self.steps[point] = row["step"]
        self.weights[point] += seconds
        for name, value in row.items():
            number = finite(value)
            if number is None or name in ("step", "time"):
                continue
            if name not in self._sums:
                if len(self._sums) >= MOST_NAMES and not is_share(name):
                    self.first_omitted = self.first_omitted or name
                    continue
                self._sums[name], self._counts[name] = (array("d", bytes(8 * self._points)) for _ in range(2))
            weight = seconds if is_share(name) else 1.0
            self._sums[name][point] += number * weight
            self._counts[name][point] += weight

    def series(self) -> dict[str, list[float | None]]:
        """Name -> mean of each point; None if no line of the point has the metric."""
        return {
            name: [
                total / count if count else None
                for total, count in zip(sums, self._counts[_accounted(name)], strict=True)
            ]
            for name, sums in sorted(self._sums.items())
        }

    def seconds(self, name: str) -> float:
        """Seconds of a share over all lines."""
        return math.fsum(self._sums[name])

    def names(self) -> list[str]:
        """Names of all metrics with a finite value, sorted."""
        return sorted(self._sums)


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
