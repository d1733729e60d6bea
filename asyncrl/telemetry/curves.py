"""The lines of `metrics.jsonl` as curves of bounded size: in a long run a point is the mean of many steps."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

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
    """Sums over `lines_per_point` lines for each point; the last may have fewer lines. Beyond `most_points`, points merge in pairs.

    Shares of the time are weighted by the seconds of their lines. A share that is missing in a line is 0 there.
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self.lines_per_point = 1
        self._lines = 0
        # The first metric without a curve, if there are more than `MOST_NAMES` metrics.
        self.first_omitted: str | None = None
        self.steps: list[int] = []  # the last step of each point
        self.weights: list[float] = []  # seconds of each point
        self._sums: dict[str, array[float]] = {}
        self._counts: dict[str, array[float]] = {}  # number of lines; for shares of the time, seconds

    def add(self, row: dict[str, Any], seconds: float) -> None:
        """Add a line of metrics of a step that took `seconds`."""
        if self._lines % self.lines_per_point == 0 and len(self.steps) == self._most_points:
            self._halve()
        if self._lines % self.lines_per_point == 0:
            self.steps.append(0)
            self.weights.append(0.0)
            for name in self._sums:
                self._sums[name].append(0.0)
                self._counts[name].append(0.0)
        self._lines += 1
        self.steps[-1] = row["step"]
        self.weights[-1] += seconds
        for name, value in row.items():
            number = finite(value)
            if number is None or name in ("step", "time"):
                continue
            if name not in self._sums:
                if len(self._sums) >= MOST_NAMES and not is_share(name):
                    self.first_omitted = self.first_omitted or name
                    continue
                self._sums[name] = array("d", bytes(8 * len(self.steps)))
                self._counts[name] = array("d", bytes(8 * len(self.steps)))
            weight = seconds if is_share(name) else 1.0
            self._sums[name][-1] += number * weight
            self._counts[name][-1] += weight

    def series(self) -> dict[str, list[float | None]]:
        """Name -> mean of each point, None where no line of the point has the metric."""
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

    def _halve(self) -> None:
        self.lines_per_point *= 2
        self.steps = self.steps[1::2]
        self.weights = [a + b for a, b in zip(self.weights[::2], self.weights[1::2], strict=True)]
        self._sums = {name: array("d", _pairs(values).tobytes()) for name, values in self._sums.items()}
        self._counts = {name: array("d", _pairs(values).tobytes()) for name, values in self._counts.items()}


def _pairs(values: array[Any]) -> np.ndarray[Any, Any]:
    """The sum of each two neighbours."""
    added = np.array(values)
    return added[::2] + added[1::2]  # type: ignore[no-any-return]  # numpy types the sum of two arrays as Any


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
