"""From runs of `bench transport` to medians, ratios, goals, tables, JSON and a plot. Pure but for the writing.

`ours` is the ring in uvloop. Ratios are between both sides in one repetition: at full speed of groups per second and of CPU time,
paced of the medians of the time until a group is in hand and until it is packed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plots import markdown, plot

OURS = "ring uvloop"
FACTORS = {"queue": 5, "ray": 15, "transferqueue": 50, "atropos": 1000}  # sooner in hand
P50_US, P50_TOKENS = 100.0, 2048
WRITE_SHARE, WRITE_FROM = 0.7, 4_000_000
READ_SPREAD = 1.5  # the dearest read over the cheapest one, each to a small one's: "independent of size"
FIGURES = ("hand_us", "p50_us", "p99_us", "groups_per_s", "cpu_us")
PARTS = ("write_us", "wake_us", "way_us")  # from put to microbatch through a ring, each a median of its own
RATIOS = {
    "groups_per_s": "full",
    "cpu_us": "full",
    "hand_us": "paced",
    "p50_us": "paced",
}  # figure -> the mode that it is of
COSTS = ("write_us", "memcpy_us", "write_gb_s", "memcpy_gb_s", "write_share_of_memcpy", "read_us", "read_to_small")
OTHER_ENDS = {("groups_per_s", "memcpy"), ("hand_us", "local")}  # no microbatch; no hand-over
SAID = {
    "groups_per_s": "microbatches per second",
    "cpu_us": "CPU time of a group",
    "hand_us": "time until in hand, p50,",
    "p50_us": "time until packed, p50,",
}
MODES = (
    (
        "paced",
        "One group a millisecond at most, and one at a time. Microseconds from put on.",
        (("hand_us", "in hand, p50", ",.0f"), ("p50_us", "microbatch, p50", ",.0f"), ("p99_us", "p99", ",.0f")),
    ),
    (
        "full",
        "As fast as it goes, three groups between put and clear. CPU time of all processes of a side.",
        (("groups_per_s", "groups/s", ",.1f"), ("gb_per_s", "GB/s", ".3f"), ("cpu_us", "CPU us a group", ",.0f")),
    ),
)
Rows = Sequence[Mapping[str, Any]]


def name(run: Mapping[str, Any]) -> str:
    return f"{run['side']} {run['loop']}".strip()


def medians(runs: Rows) -> list[dict[str, Any]]:
    """One row per size, mode and side, in the order of the first repetition."""
    rows = []
    for tokens, mode, side in dict.fromkeys((run["tokens"], run["mode"], name(run)) for run in runs):
        same = [run for run in runs if (run["tokens"], run["mode"], name(run)) == (tokens, mode, side)]
        row = {"tokens": tokens, "bytes": same[0]["bytes"], "mode": mode, "side": side, "runs": len(same)}
        known = [each for each in (*FIGURES, *PARTS) if each in same[0]]
        row |= {each: statistics.median(run[each] for run in same) for each in known}
        rows.append(row | {"gb_per_s": row["groups_per_s"] * row["bytes"] / 1e9})
    return rows


def cost_medians(costs: Rows) -> list[dict[str, Any]]:
    rows = []
    for tokens in dict.fromkeys(cost["tokens"] for cost in costs):
        same = [cost for cost in costs if cost["tokens"] == tokens]
        row = {"tokens": tokens, "bytes": same[0]["bytes"], "runs": len(same)}
        rows.append(row | {each: statistics.median(cost[each] for cost in same) for each in COSTS})
    return rows


def ratios(runs: Rows, figure: str = "groups_per_s") -> dict[int, dict[str, float]]:
    """By size and other side: ours over theirs; the median over the repetitions."""
    mode = RATIOS[figure]
    found: dict[int, dict[str, float]] = {}
    each = {
        (run["tokens"], name(run), run["repetition"]): run[figure]
        for run in runs
        if run["mode"] == mode and figure in run and (figure, run["side"]) not in OTHER_ENDS
    }
    for tokens, side in dict.fromkeys((tokens, side) for tokens, side, _ in each if side != OURS):
        pairs = [
            each[tokens, OURS, i] / each[tokens, side, i]
            for t, s, i in each
            if (t, s) == (tokens, side) and (tokens, OURS, i) in each
        ]
        if pairs:
            found.setdefault(tokens, {})[side] = statistics.median(pairs)
    return found


@dataclass(frozen=True, slots=True)
class Goal:
    """What was aimed at, and what was found. `holds` None: not measured here."""

    text: str
    found: float | None
    holds: bool | None


def goals(runs: Rows, costs: Rows) -> list[Goal]:
    found = []
    row = next((r for r in medians(runs) if (r["tokens"], r["mode"], r["side"]) == (P50_TOKENS, "paced", OURS)), None)
    p50 = row["hand_us"] if row else None
    text = "a 16 x 2,048 group in hand within 100 us (p50), one group a millisecond"
    found.append(Goal(text, p50, None if p50 is None else p50 < P50_US))
    sooner, faster = (ratios(runs, figure).get(P50_TOKENS, {}) for figure in ("hand_us", "groups_per_s"))
    for side, factor in FACTORS.items():
        ratio = 1 / sooner[side] if side in sooner else None
        text = f"16 x 2,048 in hand (p50) at least {factor:,} times sooner than {side}"
        found.append(Goal(text, ratio, None if ratio is None else ratio >= factor))
    for side in FACTORS:
        ratio = faster.get(side)
        text = f"more microbatches of 16 x 2,048 per second than {side}"
        found.append(Goal(text, ratio, None if ratio is None else ratio > 1))
    rows = cost_medians(costs)
    large = [row["write_share_of_memcpy"] for row in rows if row["bytes"] >= WRITE_FROM]
    share = min(large) if large else None
    text = "write at 70 % of memcpy or better from 4 MB up"
    found.append(Goal(text, share, None if share is None else share >= WRITE_SHARE))
    reads = [row["read_to_small"] for row in rows]
    spread = max(reads) / min(reads) if len(reads) > 1 else None
    text = f"read cost independent of size (dearest over cheapest, each to a small read right before it, below {READ_SPREAD})"
    found.append(Goal(text, spread, None if spread is None else spread < READ_SPREAD))
    return found


def tables(runs: Rows, costs: Rows) -> list[str]:
    """Markdown, readable as it stands."""
    rows = medians(runs)
    lines: list[str] = []
    for mode, title, figures in MODES:
        shown = [row for row in rows if row["mode"] == mode]
        cells = [
            [*_where(row), *(f"{row[each]:{form}}" if each in row else "" for each, _, form in figures)]
            for row in shown
        ]
        lines += [title, "", *markdown(["group", "side", *(text for _, text, _ in figures)], cells, 2), ""]
    for figure, mode in RATIOS.items():
        for tokens, sides in ratios(runs, figure).items():
            text = ", ".join(f"{_short(ratio)} x {side}" for side, ratio in sides.items())
            lines += [f"{SAID[figure]} of {OURS}, 16 x {tokens:,}, {mode}: {text}", ""]
    parts = [
        [*_where(row), *(f"{row[each]:,.0f}" for each in PARTS)]
        for row in rows
        if PARTS[0] in row and row["mode"] == "paced"
    ]
    if parts:
        titles = ["paced, p50 of the parts, us", "side", "written", "rung, woken, leased", "up to the microbatch"]
        lines += [*markdown(titles, parts, 2), ""]
    if costs:
        titles = ["group", "MB", "write GB/s", "memcpy GB/s", "write / memcpy", "read us", "read / read of 16 x 64"]
        speeds = dict.fromkeys(("write_gb_s", "memcpy_gb_s", "write_share_of_memcpy"), ".2f")
        forms = (speeds | {"read_us": ".0f", "read_to_small": ".2f"}).items()
        paid = [
            [f"16 x {row['tokens']:,}", f"{row['bytes'] / 1e6:.2f}", *(format(row[key], form) for key, form in forms)]
            for row in cost_medians(costs)
        ]
        lines += [*markdown(titles, paid, 1), ""]
    said = {None: "not measured", True: "yes", False: "no"}
    aims = [
        [goal.text, "" if goal.found is None else f"{goal.found:,.2f}", said[goal.holds]] for goal in goals(runs, costs)
    ]
    return [*lines, *markdown(["goal", "found", ""], aims)]


def _short(ratio: float) -> str:
    return f"{ratio:,.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _where(row: Mapping[str, Any]) -> list[str]:
    return [f"16 x {row['tokens']:,}", row["side"]]


def document(runs: Rows, costs: Rows) -> dict[str, Any]:
    return {
        "versions": {run["side"]: run["versions"] for run in runs},
        "goals": [{"goal": goal.text, "found": goal.found, "holds": goal.holds} for goal in goals(runs, costs)],
        "ratios": {figure: ratios(runs, figure) for figure in RATIOS},
        "summary": medians(runs),
        "costs": cost_medians(costs),
        "runs": [{key: value for key, value in run.items() if key != "versions"} for run in runs],
        "cost_runs": list(costs),
    }


def draw(path: Path, runs: Rows, costs: Rows) -> None:
    """p50 to the microbatch paced, groups per second at full speed, and the costs, over the bytes of a group."""
    panels, rows = 2 + bool(costs), medians(runs)
    with plot(path, 4.7 * panels, 4.2, panels) as axes:
        for number, side in enumerate(dict.fromkeys(row["side"] for row in rows)):
            style = "--" if side == "local" else "o-"
            for each, mode, figure in ((axes[0], "paced", "p50_us"), (axes[1], "full", "groups_per_s")):
                same = [row for row in rows if (row["side"], row["mode"]) == (side, mode) and figure in row]
                if not same or (side == "memcpy" and figure == "groups_per_s"):
                    continue  # of another end: its group is in no microbatch
                places = [row["bytes"] / 1e6 for row in same]
                each.plot(places, [row[figure] for row in same], style, color=f"C{number}", label=side, markersize=4)
        axes[0].set(ylabel="us from put to microbatch, p50", title="one group a millisecond")
        axes[1].set(ylabel="groups/s", title="full speed")
        if costs:
            _draw_costs(axes[2], cost_medians(costs))
        for each in axes:
            if each.get_lines():  # a run of `memcpy` alone has no microbatch
                each.set(xscale="log", yscale="log", xlabel="MB of a group")
                each.legend(frameon=False, fontsize=7)


def _draw_costs(axes: Any, costs: Rows) -> None:
    places = [row["bytes"] / 1e6 for row in costs]
    drawn = (("write_us", "put", "o-"), ("memcpy_us", "memcpy of the same", "--"), ("read_us", "read", "s-"))
    for key, label, style in drawn:
        axes.plot(places, [row[key] for row in costs], style, label=label, markersize=4)
    axes.set(ylabel="us", title="what each side's process pays")
