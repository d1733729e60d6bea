"""What each metric is: the table `assets/metrics.md`, for people, for `asyncrl explain` and for the report."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple

_NAMED = re.compile(r"<[^>]+>")  # stands for a name of the run


class Metric(NamedTuple):
    """A row of the table."""

    name: str  # `reward/<component>/mean`: of many metrics
    unit: str
    meaning: str
    bad: str  # what a bad value looks like


@cache
def metrics() -> dict[str, Metric]:
    """Every row by its name."""
    text = (resources.files(__package__) / "assets" / "metrics.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: Metric(*row) for row in rows[2:]}


def metric(name: str) -> Metric | None:
    """The row of a metric by the name that a run writes; of several that fit, the one that says most."""
    if name in metrics():
        return metrics()[name]
    many = [each for each in metrics().values() if _NAMED.search(each.name)]
    fitting = [each for each in many if re.fullmatch(_NAMED.sub(".+", re.escape(each.name)), name)]
    return max(fitting, key=lambda each: len(_NAMED.sub("", each.name)), default=None)
