"""Reads the table of all metrics, `assets/metrics.md`, for `asyncrl explain` and for the report."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple

_PLACEHOLDER = re.compile(r"<[^>]+>")


class Metric(NamedTuple):
    """One row of the table of metrics."""

    name: str  # may have placeholders: `reward/<component>/mean`
    unit: str
    meaning: str
    bad: str  # a description of bad values


@cache
def metrics() -> dict[str, Metric]:
    """All rows of the table, by name."""
    text = (resources.files(__package__) / "assets" / "metrics.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: Metric(*row) for row in rows[2:]}


def metric(name: str) -> Metric | None:
    """The row for a name in metrics.jsonl; None if no row matches. If several rows match: the row with the longest fixed text."""
    if name in metrics():
        return metrics()[name]
    patterns = [row for row in metrics().values() if _PLACEHOLDER.search(row.name)]
    matching = [row for row in patterns if re.fullmatch(_PLACEHOLDER.sub(".+", re.escape(row.name)), name)]
    return max(matching, key=lambda row: len(_PLACEHOLDER.sub("", row.name)), default=None)
