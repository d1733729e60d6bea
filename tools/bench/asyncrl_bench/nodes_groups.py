"""Groups from one process to another over the line, beside multiprocessing.Queue and Ray: the part of `asyncrl bench nodes` about
groups. The sides are those of `asyncrl bench transport` (there is what they do), at full speed: three groups between put and clear.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .command import Place, option, positive
from .plots import markdown
from .processes import peer_python, recipe_is_ready
from .transport import repetition_of

SIDES = ("line", "queue", "ray")
OPTIONS = (
    option("--tokens", [256, 2048], "of each of the 16 trajectories of a group", [256], nargs="+", type=positive),
    option("--groups", 300, "groups that travel in a run", 40),
    option("--ray", False, "make Ray's environment if it is not in the cache (some minutes, once)"),
)


def measure_groups(place: Place) -> tuple[list[dict[str, Any]], list[str]]:
    """The runs, and the tables. `place.options` has `OPTIONS`, `repeats`, and `seconds` of a run. Errors: `BenchError`."""
    options, lines = place.options, list[str]()
    with_ray = options.ray or recipe_is_ready("ray", place.cache)
    options.sides = SIDES if with_ray else SIDES[:-1]
    pythons = {"ray": peer_python("ray", place.cache)} if with_ray else {}
    if not with_ray:
        lines = ["Ray is left out: its environment is not in the cache; `--ray` makes it.", ""]
    runs = [
        run for repetition in range(options.repeats) for run in repetition_of(place, pythons, repetition, {"full": 0.0})
    ]
    return runs, [*lines, *table(runs)]


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians by size and side. The ratios are between runs of one repetition."""
    rows = []
    for tokens, side in dict.fromkeys((run["tokens"], run["side"]) for run in runs):
        same = [run for run in runs if (run["tokens"], run["side"]) == (tokens, side)]
        line = {run["repetition"]: run for run in runs if (run["tokens"], run["side"]) == (tokens, "line")}
        found = [f"16 x {tokens:,}", side]
        for figure in ("groups_per_s", "cpu_us"):
            ratio = statistics.median(line[run["repetition"]][figure] / run[figure] for run in same)
            found += [f"{statistics.median(run[figure] for run in same):,.1f}", f"{ratio:.2f}"]
        rows.append(found)
    return markdown(["group", "side", "groups/s", "line / side", "CPU us a group", "line / side"], rows)
