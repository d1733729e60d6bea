"""`report.html`: one self-contained page about a run, built from the files in its directory.

Reads `metrics.jsonl`, `trace.json` (its end only), `rollouts/` and `config.yaml`; each may be missing. Everything that
the model or the user wrote goes into the page as JSON data (the name of the run also as the title) and onto the screen as text,
never as markup.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from .budget import kind_of
from .curves import MOST_NAMES, Curves, finite, is_share
from .explained import metric
from .recorder import LANE_PREFIX
from .reward_signal import Warnings
from .sinks import each_row, read_jsonl
from .trace import read_tail

_TIMELINE_STEPS = 3
# The times of this many last steps are kept, because the trace may have ended long before the run.
_KEPT_STEP_ENDS = 10_000
_TIMELINE_SPANS = 12_000
_TIMELINE_ROWS_PER_TRACK = 6
_SAMPLED_STEPS = 10
_SAMPLES_PER_STEP = 5
_TEXT_LIMIT = 6_000
_CONFIG_LIMIT = 100_000
_ASSETS = "charts.js", "timeline.js", "report.js"


def write_report(run_dir: Path, *, name: str | None = None, result: str | None = None) -> Path:
    """Write `report.html` into the run directory, atomically, and return its path.

    `result` is a few words ("finished", "stopped by SIGTERM", "StallError: ..."). Takes up to seconds for a long run, so do
    not call it on the event loop. Errors: OSError.
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
    # "<" only occurs inside JSON strings, where its escape means the same: no text can end the script element.
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
    """The data of the page. All values are finite, or None if a metric is missing or was NaN."""
    curves, warnings, trained = Curves(), Warnings(), 0
    step_ends: deque[tuple[float, int]] = deque(maxlen=_KEPT_STEP_ENDS)  # Unix seconds, step
    started, ended = math.inf, 0.0
    for row in each_row(run_dir / "metrics.jsonl"):
        if not isinstance(row.get("step"), int):
            continue
        ended = float(row.get("time") or 0.0)
        # The line of an evaluation before the first step has no duration: the next line's duration includes the evaluation.
        seconds = finite(row.get("time/accounted", row.get("time/step"))) or 0.0
        started = min(started, ended - seconds)
        curves.add(row, seconds)
        warnings.add(row)
        step_ends.append((ended, row["step"]))
        trained += "time/step" in row
    rollouts, reward_range = _rollouts(run_dir / "rollouts")
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
        "timeline": _timeline(run_dir / "trace.json", step_ends),
        "rollouts": rollouts,
        "reward_range": reward_range,
        "warnings": [*warnings.finish(), *_omissions(curves)],
        "config": _text(run_dir / "config.yaml"),
    }


def _omissions(curves: Curves) -> list[str]:
    steps = curves.lines_per_point
    lines = [] if steps == 1 else [f"A long run: each point of a curve is the mean of {steps} steps."]
    if curves.first_omitted:
        lines.append(
            f"More than {MOST_NAMES:,} metrics: further metrics have no curves (the first of them is {curves.first_omitted})."
        )
    return lines


def _text(path: Path) -> str | None:
    return path.read_text("utf-8", errors="replace")[:_CONFIG_LIMIT] if path.exists() else None


def _account(curves: Curves) -> dict[str, dict[str, float]]:
    """Seconds over the run by kind and cause: `all` lanes together, and each lane where there are several."""
    account: dict[str, dict[str, float]] = {}
    for name in filter(is_share, curves.names()):
        section, _, rest = name.partition("/")
        lane, _, label = rest.rpartition("/")
        account.setdefault(lane or "all", {})[f"{section}/{label}"] = curves.seconds(name)
    return {lane: account[lane] for lane in sorted(account, key=lambda lane: (lane != "all", lane))}


def _timeline(path: Path, step_ends: Iterable[tuple[float, int]]) -> dict[str, Any] | None:
    """The spans of the last steps that the trace covers, by row; times in microseconds since the trace started."""
    if not path.exists():
        return None
    other, names, events = read_tail(path)
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        return None
    end = max(event["ts"] + event["dur"] for event in spans)
    marks = [((time - other["started_unix"]) * 1e6, step) for time, step in step_ends]
    covered = [mark for mark in marks if 0 <= mark[0] <= end]
    start = covered[-1 - _TIMELINE_STEPS][0] if len(covered) > _TIMELINE_STEPS else 0.0
    shown = [event for event in spans if event["ts"] + event["dur"] >= start]
    shown.sort(key=lambda event: event["ts"] + event["dur"])
    if len(shown) > _TIMELINE_SPANS:
        shown = shown[-_TIMELINE_SPANS:]
        start = max(start, shown[0]["ts"])
    start = max(start, min(event["ts"] for event in shown))
    rows, table, hidden = _timeline_rows(shown, names, start)
    lead = "What every lane and every pump did during the last steps that the trace covers."
    if other.get("dropped_events"):
        lead += f" The trace was full before the run ended: {other['dropped_events']:,} later events were not stored."
    if hidden:
        lead += f" {hidden} further rows of overlapping spans are in trace.json."
    shown_marks = [[moment, step] for moment, step in marks if start < moment <= end + 1e3]
    return {"start": start, "end": end, "rows": rows, "names": table, "steps": shown_marks, "lead": lead}


def _timeline_rows(
    events: list[dict[str, Any]], names: dict[int, str], start: float
) -> tuple[list[dict[str, Any]], list[str], int]:
    """Rows with spans `[start, duration, index of name, colour key, detail]`, the names, and the number of omitted rows."""
    table: dict[str, int] = {}
    by_row: dict[int, list[list[Any]]] = {}
    for event in events:
        name = event["name"]
        args = event.get("args") or {}
        is_wait = event.get("cat") == "wait"
        key = f"idle/{args.get('cause')}" if is_wait else kind_of(name)
        detail = f"on {args.get('on')} ({args.get('cause') or 'no cause'})" if is_wait else ""
        begin = max(event["ts"], start)
        duration = round(event["ts"] + event["dur"] - begin, 1)
        span = [round(begin, 1), duration, table.setdefault(name, len(table)), key, detail]
        by_row.setdefault(event["tid"], []).append(span)
    rows, hidden = [], 0
    for tid in sorted(by_row):
        name = names.get(tid, f"row {tid}")
        # `write_trace` names the further rows of a track "NAME #2", "NAME #3".
        further_row = re.fullmatch(r".* #(\d+)", name)
        if further_row and int(further_row.group(1)) > _TIMELINE_ROWS_PER_TRACK:
            hidden += 1
            continue
        # An outer span must be painted before those inside it.
        spans = sorted(by_row[tid], key=lambda span: (span[0], -span[1]))
        rows.append({"name": name if further_row else name.removeprefix(LANE_PREFIX), "spans": spans})
    return rows, list(table), hidden


def _rollouts(directory: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Samples of some steps, first and last included, and the range of their rewards."""
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
    """Up to `limit` of the indices below `size`, evenly spaced, with the first and the last."""
    count = min(limit, size)
    return sorted({round(number * (size - 1) / max(1, count - 1)) for number in range(count)})


def _sampled_steps(directory: Path) -> list[int]:
    """Numbers of up to `_SAMPLED_STEPS` steps with a file, the newest first. Keeps no paths, because a run may have a million."""
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
