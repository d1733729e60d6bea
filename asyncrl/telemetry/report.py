"""`report.html`: one self-contained page about a run, built from the files in its directory.

Reads `metrics.jsonl`, `rollouts/` and `config.yaml`; each may be missing. Texts of the model and of the user are JSON data in the
page (the name of the run is also the page's title). The page shows these texts as text, never as markup.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from .explained import metric
from .reward_signal import Warnings
from .sinks import each_row, read_jsonl

_SAMPLED_STEPS = 10
_SAMPLES_PER_STEP = 5
_TEXT_LIMIT = 6_000
_CONFIG_LIMIT = 100_000
MOST_POINTS = 4_000  # of a curve; a screen has fewer columns
# With this many curves, further metrics get a curve only if they are shares of the time: users may invent any number of names.
MOST_NAMES = 1_000
_ASSETS = "charts.js", "report.js"


def write_report(run_dir: Path, *, name: str | None = None, result: str | None = None) -> Path:
    """Write `report.html` into the run directory, atomically, and return its path.

    `result`: how the run ended, in a few words ("finished", "stopped by SIGTERM", "StallError: ..."). Takes seconds for a long
    run, so call it outside the event loop. Errors: OSError.
    """
    page = render(collect(run_dir, name=name, result=result))
    path = run_dir / "report.html"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def render(data: dict[str, Any]) -> str:
    """The HTML of the page, with its data inside."""
    assets = resources.files(__package__) / "assets"
    # Without this escape a text of the model with "</script>" would end the script element. JSON has "<" only inside strings.
    json = orjson.dumps(data).decode().replace("<", "\\u003c")
    title = re.sub(r"[<>&]", " ", str(data["name"]))
    parts = {
        "@TITLE@": title,
        "@CSS@": (assets / "report.css").read_text("utf-8"),
        "@JS@": "\n".join((assets / name).read_text("utf-8") for name in _ASSETS),
        "@DATA@": json,
    }
    page = (assets / "report.html").read_text("utf-8")
    # In one pass, so that a placeholder inside the data is not replaced.
    return re.sub("|".join(parts), lambda found: parts[found.group(0)], page)


def collect(run_dir: Path, *, name: str | None = None, result: str | None = None) -> dict[str, Any]:
    """The data of the page. All values are finite, or None if a metric is missing or is not finite."""
    metrics = run_dir / "metrics.jsonl"
    # The file is read twice, because the lines of a long run do not fit into memory. Lines that are written meanwhile are ignored.
    lines = sum(isinstance(row.get("step"), int) for row in each_row(metrics))
    curves, warnings, trained = Curves(lines), Warnings(), 0
    started, ended = math.inf, 0.0
    for row in islice((row for row in each_row(metrics) if isinstance(row.get("step"), int)), lines):
        ended = float(row.get("time") or 0.0)
        # The line of an evaluation before the first step has no duration: the next line's duration includes the evaluation.
        seconds = finite(row.get("time/accounted", row.get("time/step"))) or 0.0
        started = min(started, ended - seconds)
        curves.add(row, seconds)
        warnings.add(row)
        trained += "time/step" in row
    rollouts, reward_range = _rollouts(run_dir / "rollouts")
    config = run_dir / "config.yaml"
    return {
        "name": name or run_dir.resolve().name,
        "result": result,
        "started": started if curves.steps else None,
        "duration": ended - started if curves.steps else 0.0,
        "trained": trained,
        "steps": curves.steps,
        "series": curves.series(),
        "about": {name: about[1:] for name in curves.names() if (about := metric(name))},
        "weights": curves.weights,
        "account": _account(curves),
        "rollouts": rollouts,
        "reward_range": reward_range,
        "warnings": [*warnings.finish(), *_omissions(curves)],
        "config": config.read_text("utf-8", errors="replace")[:_CONFIG_LIMIT] if config.exists() else None,
    }


def _omissions(curves: Curves) -> list[str]:
    steps = curves.lines_per_point
    lines = [] if steps == 1 else [f"A long run: each point of a curve is the mean of {steps} steps."]
    if curves.first_omitted:
        lines.append(
            f"More than {MOST_NAMES:,} metrics: further metrics have no curves (the first of them is {curves.first_omitted})."
        )
    return lines


def _account(curves: Curves) -> dict[str, dict[str, float]]:
    """Lane -> {`busy/KIND` or `idle/CAUSE`: seconds over the run}. `all`: the mean over the lanes. One lane: only `all`."""
    account: dict[str, dict[str, float]] = {}
    for name in filter(is_share, curves.names()):
        section, _, rest = name.partition("/")
        lane, _, label = rest.rpartition("/")
        account.setdefault(lane or "all", {})[f"{section}/{label}"] = curves.seconds(name)
    return {lane: account[lane] for lane in sorted(account, key=lambda lane: (lane != "all", lane))}


def _rollouts(directory: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Samples of some steps, and [lowest, highest] reward of all rollouts of these steps. Reads the files of rank 0 only."""
    sets: list[dict[str, Any]] = []
    low, high = math.inf, -math.inf
    for step in _sampled_steps(directory):
        rows = read_jsonl(directory / f"step_{step}.jsonl")
        rewards = [reward for row in rows if (reward := finite(row.get("reward"))) is not None]
        low, high = min([low, *rewards]), max([high, *rewards])
        rows.sort(key=lambda row: (finite(row.get("reward")) is None, -(finite(row.get("reward")) or 0.0)))
        chosen = [_sample(rows[index]) for index in _spread(len(rows), _SAMPLES_PER_STEP)]
        sets.append({"step": step, "total": len(rows), "rows": chosen})
    return sets, [low, high] if low <= high else [0.0, 0.0]


def _spread(size: int, limit: int) -> list[int]:
    """Up to `limit` evenly spaced indices from 0 to `size` - 1, both included."""
    count = min(limit, size)
    return sorted({round(number * (size - 1) / max(1, count - 1)) for number in range(count)})


def _sampled_steps(directory: Path) -> list[int]:
    """The numbers of up to `_SAMPLED_STEPS` steps that have a file, spread evenly over the run, newest first."""
    if not directory.exists():
        return []
    with os.scandir(directory) as files:
        matches = (re.fullmatch(r"step_(\d+)\.jsonl", file.name) for file in files)
        steps = sorted(int(match[1]) for match in matches if match)
    return [steps[index] for index in reversed(_spread(len(steps), _SAMPLED_STEPS))]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in ("metadata", "rendered_prompt")}
    kept["prompt"] = _shorten(_plain(row.get("rendered_prompt", row.get("prompt", ""))))
    kept["completion"] = _shorten(_plain(row.get("completion", "")))
    return kept


def _plain(text: Any) -> str:
    """A string unchanged; a list of messages as lines `role: content`."""
    if not isinstance(text, list):
        return str(text)
    parts = []
    for message in text:
        if isinstance(message, dict):
            content = message.get("content")
            parts.append(f"{message.get('role', '?')}: {content if isinstance(content, str) else message}")
        else:
            parts.append(str(message))
    return "\n".join(parts)


def _shorten(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - _TEXT_LIMIT:,} characters left out ...]\n{text[-half:]}"


def is_share(name: str) -> bool:
    """Whether the metric is a share of the time: `busy/*` or `idle/*`."""
    return name.startswith(("busy/", "idle/"))


def _divisor_of(name: str) -> str:
    """The metric whose count divides the sum of the metric `name`, for the mean. For a share of the time: `idle/unexplained` of the
    same lane. That metric is in every line that has shares of the lane, so its count is all seconds of the lane."""
    lane = name.partition("/")[2].rpartition("/")[0]
    return "/".join(["idle", *filter(None, [lane]), "unexplained"]) if is_share(name) else name


class Curves:
    """The curves of all metrics. A point of a curve is the mean of `lines_per_point` lines; the last point may have fewer lines.

    Shares of the time are weighted by the seconds of their lines. A share that is missing in a line is 0 there.
    """

    def __init__(self, lines: int, most_points: int = MOST_POINTS) -> None:
        """`lines`: how often `add` is called, at most."""
        self.lines_per_point = max(1, -(-lines // most_points))
        self._points = -(-lines // self.lines_per_point)
        self._added = 0
        # The first metric without a curve, if there are more than `MOST_NAMES` metrics.
        self.first_omitted: str | None = None
        self.steps: list[int] = []  # the last step of each point
        self.weights: list[float] = []  # seconds of each point
        self._sums: dict[str, array[float]] = {}  # [points]
        self._counts: dict[str, array[float]] = {}  # number of lines; for shares of the time, seconds

    def add(self, row: dict[str, Any], seconds: float) -> None:
        """Add a line of metrics of a step that took `seconds`."""
        point = self._added // self.lines_per_point
        self._added += 1
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
        """Name -> the value of each point; None if no line of the point has the metric (for a share: any share of its lane)."""
        return {
            name: [
                total / count if count else None
                for total, count in zip(sums, self._counts.get(_divisor_of(name), self._counts[name]), strict=True)
            ]
            for name, sums in sorted(self._sums.items())
        }

    def seconds(self, name: str) -> float:
        """Seconds of a share of the time, over all lines."""
        return math.fsum(self._sums[name])

    def names(self) -> list[str]:
        return sorted(self._sums)


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
