"""From runs of `bench transport` to medians, ratios, goals, tables, JSON and a plot. Pure but for the writing.

`ours` is the whole way: the stash in uvloop. Ratios are of groups per second at full speed, both sides in one repetition.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plots import markdown, plot

OURS = "stash uvloop"
FACTORS = {"queue": 5, "ray": 15, "transferqueue": 50, "atropos": 1000}
P50_US, P50_TOKENS = 100.0, 2048
WRITE_SHARE, WRITE_FROM = 0.7, 4_000_000
READ_SPREAD = 1.5  # the dearest read over the cheapest one, each to a small one's: "independent of size"
FIGURES = ("p50_us", "p99_us", "groups_per_s")
PARTS = ("write_us", "wake_us", "cut_us", "stash_us")  # of a hand-over into the stash, each a median of its own
COSTS = ("write_us", "memcpy_us", "write_gb_s", "memcpy_gb_s", "write_share_of_memcpy", "read_us", "read_to_small")
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
        rows.append(row | {each: statistics.median(run[each] for run in same) for each in known})
    return rows


def cost_medians(costs: Rows) -> list[dict[str, Any]]:
    rows = []
    for tokens in dict.fromkeys(cost["tokens"] for cost in costs):
        same = [cost for cost in costs if cost["tokens"] == tokens]
        row = {"tokens": tokens, "bytes": same[0]["bytes"], "runs": len(same)}
        rows.append(row | {each: statistics.median(cost[each] for cost in same) for each in COSTS})
    return rows


def ratios(runs: Rows) -> dict[int, dict[str, float]]:
    """By size and other side: ours over theirs, groups per second at full speed; the median over the repetitions."""
    full = {(run["tokens"], name(run), run["repetition"]): run["groups_per_s"] for run in runs if run["mode"] == "full"}
    found: dict[int, dict[str, float]] = {}
    for tokens, side in dict.fromkeys((tokens, side) for tokens, side, _ in full if side != OURS):
        pairs = [
            full[tokens, OURS, i] / full[tokens, side, i]
            for t, s, i in full
            if (t, s) == (tokens, side) and (tokens, OURS, i) in full
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
    for mode, text in (("paced", "one group a millisecond"), ("full", "full speed")):
        row = next((r for r in medians(runs) if (r["tokens"], r["mode"], r["side"]) == (P50_TOKENS, mode, OURS)), None)
        p50 = row["p50_us"] if row else None
        text = f"p50 of a 16 x 2,048 group under 100 us, {text}"
        found.append(Goal(text, p50, None if p50 is None else p50 < P50_US))
    sizes = ratios(runs)
    smallest = sizes.get(P50_TOKENS, {})
    for side, factor in FACTORS.items():
        ratio = smallest.get(side)
        text = f"groups per second of 16 x 2,048 at least {factor:,} times {side}"
        found.append(Goal(text, ratio, None if ratio is None else ratio >= factor))
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
    rows, sizes = medians(runs), ratios(runs)
    handed = []
    for row in rows:
        rate, full = row["groups_per_s"], row["mode"] == "full"
        rates = [f"{rate:,.1f}", f"{rate * row['bytes'] / 1e9:.3f}"] if full else ["", ""]
        handed.append([*_where(row), f"{row['p50_us']:,.0f}", f"{row['p99_us']:,.0f}", *rates])
    lines = markdown(["group", "mode", "side", "p50 us", "p99 us", "groups/s", "GB/s"], handed, 3)
    for tokens, sides in sizes.items():
        text = ", ".join(f"{ratio:,.2f} x {side}" for side, ratio in sides.items())
        lines += ["", f"groups per second of {OURS}, 16 x {tokens:,}: {text}"]
    parts = [[*_where(row), *(f"{row[each]:,.0f}" for each in PARTS)] for row in rows if PARTS[0] in row]
    if parts:
        titles = [
            "p50 of the parts, us",
            "mode",
            "side",
            "checked, copied",
            "rung, woken, leased",
            "16 trajectories",
            "stash",
        ]
        lines += ["", *markdown(titles, parts, 3)]
    if costs:
        titles = ["group", "MB", "write GB/s", "memcpy GB/s", "write / memcpy", "read us", "read / read of 16 x 64"]
        speeds = dict.fromkeys(("write_gb_s", "memcpy_gb_s", "write_share_of_memcpy"), ".2f")
        shown = (speeds | {"read_us": ".0f", "read_to_small": ".2f"}).items()
        paid = [
            [f"16 x {row['tokens']:,}", f"{row['bytes'] / 1e6:.2f}", *(format(row[key], form) for key, form in shown)]
            for row in cost_medians(costs)
        ]
        lines += ["", *markdown(titles, paid, 1)]
    said = {None: "not measured", True: "yes", False: "no"}
    aims = [
        [goal.text, "" if goal.found is None else f"{goal.found:,.2f}", said[goal.holds]] for goal in goals(runs, costs)
    ]
    return [*lines, "", *markdown(["goal", "found", ""], aims)]


def _where(row: Mapping[str, Any]) -> list[str]:
    return [f"16 x {row['tokens']:,}", row["mode"], row["side"]]


def document(runs: Rows, costs: Rows) -> dict[str, Any]:
    return {
        "versions": {run["side"]: run["versions"] for run in runs},
        "goals": [{"goal": goal.text, "found": goal.found, "holds": goal.holds} for goal in goals(runs, costs)],
        "ratios": ratios(runs),
        "summary": medians(runs),
        "costs": cost_medians(costs),
        "runs": [{key: value for key, value in run.items() if key != "versions"} for run in runs],
        "cost_runs": list(costs),
    }


def draw(path: Path, runs: Rows, costs: Rows) -> None:
    """p50 paced, groups per second at full speed, and the costs, over the bytes of a group."""
    panels, rows = 2 + bool(costs), medians(runs)
    with plot(path, 4.7 * panels, 4.2, panels) as axes:
        for number, side in enumerate(dict.fromkeys(row["side"] for row in rows)):
            style = "--" if side == "memcpy" else "o-"
            for each, mode, figure in ((axes[0], "paced", "p50_us"), (axes[1], "full", "groups_per_s")):
                same = [row for row in rows if (row["side"], row["mode"]) == (side, mode)]
                places = [row["bytes"] / 1e6 for row in same]
                each.plot(places, [row[figure] for row in same], style, color=f"C{number}", label=side, markersize=4)
        axes[0].set(ylabel="us from put to usable, p50", title="one group a millisecond")
        axes[1].set(ylabel="groups/s", title="full speed")
        if costs:
            _draw_costs(axes[2], cost_medians(costs))
        for each in axes:
            each.set(xscale="log", yscale="log", xlabel="MB of a group")
            each.legend(frameon=False, fontsize=7)


def _draw_costs(axes: Any, costs: Rows) -> None:
    places = [row["bytes"] / 1e6 for row in costs]
    drawn = (("write_us", "put", "o-"), ("memcpy_us", "memcpy of the same", "--"), ("read_us", "read", "s-"))
    for key, label, style in drawn:
        axes.plot(places, [row[key] for row in costs], style, label=label, markersize=4)
    axes.set(ylabel="us", title="what each side's process pays")
