"""From runs to figures: tokens per second, the share of the arithmetic limit, medians, ratios, table and plot.

The benches step, train and generate share it: sides that do the same job in turns, in several dtypes and cases. The limit of a run
is the time that its needed FLOP take at the best GEMM rate that the whole call has seen in the dtype.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .command import Place, turned
from .job import Job
from .plots import grouped_bars, limit_line, markdown, plot

GIB = 1 << 30
J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side in one repetition. `case` tells what was measured, for people: `64 x 128`."""

    side: str
    dtype: str
    case: str
    repetition: int
    seconds: float
    tokens: float  # those that the rate counts
    needed_flop: float
    gemm_flops: float  # seen beside this run
    peak_bytes: int
    result: Mapping[str, Any]
    more: Mapping[str, float] = field(default_factory=dict)  # figures of this bench alone

    def figures(self, gemm_flops: float | None = None) -> dict[str, float]:
        """`gemm_flops`: the rate that the limit stands on; that beside this run by default."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "seconds": self.seconds,
            "limit_share": self.needed_flop / (gemm_flops or self.gemm_flops) / self.seconds,
            "peak_gib": self.peak_bytes / GIB,
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Sheet:
    """How the runs of a bench are shown."""

    unit: str  # of the plot
    columns: Sequence[tuple[str, str, str]]  # title, key of the figures, format; the ratio stands behind the first
    case: str = "case"  # its key in the JSON
    title: str = "job"  # its column


def pairs(
    place: Place,
    cases: Iterable[tuple[str, str]],
    prepare: Callable[[str, str, str], tuple[J, Mapping[str, Any]]],
    sides: Mapping[str, Callable[[J, str], dict[str, Any]]],
    judge: Callable[[str, J, Mapping[str, Any], dict[str, Any]], Mapping[str, Any]],
) -> Iterator[Run]:
    """All sides of all cases, in every repetition; each run as soon as it is done. Errors: `BenchError`.

    `prepare(dtype, case, label)`: the job, and the rates of the machine beside it. `judge(side, job, rates, result)`: what is
    known of the run then, fields of `Run`.
    """
    cases = list(cases)
    for repetition in range(place.options.repetitions):
        for dtype, case in cases:
            label = f"{dtype}-{case}-{repetition}".replace(" ", "")
            job, rates = prepare(dtype, case, label)
            for side in turned(sides, repetition):
                place.say(f"{side}: {dtype}, {case}, repetition {repetition + 1}")
                result = sides[side](job, label)
                known: dict[str, Any] = {
                    "gemm_flops": rates.get("gemm_flops"),
                    "seconds": result.get("seconds"),
                    "result": result,
                }
                known |= {"peak_bytes": result["peak_bytes"], **judge(side, job, rates, result)}
                run = Run(side=side, dtype=dtype, case=case, repetition=repetition, **known)
                found = run.figures()
                place.say(f"  {found['tokens_per_s']:.1f} tokens/s, {found['limit_share']:.1%} of the GEMM rate")
                yield run


def summarise(runs: Sequence[Run], sheet: Sheet) -> list[dict[str, Any]]:
    """One entry per dtype and case, in order: medians per side, and the medians of the paired ratios to each peer."""
    entries = []
    for dtype, case in dict.fromkeys((run.dtype, run.case) for run in runs):
        own = [run for run in runs if (run.dtype, run.case) == (dtype, case)]
        rate = max(run.gemm_flops for run in runs if run.dtype == dtype)
        entry: dict[str, Any] = {"dtype": dtype, sheet.case: case, "gemm_gflops": rate / 1e9, "sides": {}}
        for side in dict.fromkeys(run.side for run in own):
            figures = [run.figures(rate) for run in own if run.side == side]
            medians = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
            entry["sides"][side] = {"runs": len(figures), **medians}
        ours = {run.repetition: run for run in own if run.side == "asyncrl"}
        for peer in (side for side in entry["sides"] if side != "asyncrl"):
            theirs = {run.repetition: run for run in own if run.side == peer}
            both = [(ours[i].figures(), theirs[i].figures()) for i in sorted(ours.keys() & theirs.keys())]
            if both:
                ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in both]
                entry[f"ratio_to_{peer}"] = statistics.median(ratios)
                entry[f"ratios_to_{peer}"] = ratios
                entry[f"memory_ratio_to_{peer}"] = statistics.median(a["peak_gib"] / b["peak_gib"] for a, b in both)
        entries.append(entry)
    return entries


def table(entries: Sequence[Mapping[str, Any]], sheet: Sheet) -> list[str]:
    """A row per dtype, case and side, the ratio on asyncrl's row; then the GEMM rates."""
    rows = []
    for entry in entries:
        found = [(key.removeprefix("ratio_to_"), entry[key]) for key in entry if key.startswith("ratio_to_")]
        ratio = ", ".join(f"{value:.2f}x {peer}" for peer, value in found)
        for side, figures in entry["sides"].items():
            first, *others = (format(figures[key], form) for _, key, form in sheet.columns)
            rows.append([entry["dtype"], entry[sheet.case], side, first, ratio if side == "asyncrl" else "", *others])
    title, *titles = (title for title, _, _ in sheet.columns)
    lines = markdown(["dtype", sheet.title, "side", title, "ratio", *titles], rows)
    for dtype, rate in {entry["dtype"]: entry["gemm_gflops"] for entry in entries}.items():
        lines += ["", f"GEMM rate, {dtype}: {rate:.0f} GFLOP/s"]
    return lines


def write(place: Place, runs: Sequence[Run], entries: Sequence[Mapping[str, Any]], sheet: Sheet, **more: Any) -> None:
    place.write(
        versions={run.side: run.result["versions"] for run in runs},
        summary=list(entries),
        runs=[
            {
                "side": run.side,
                "dtype": run.dtype,
                sheet.case: run.case,
                "repetition": run.repetition,
                **run.figures(),
                "gemm_gflops": run.gemm_flops / 1e9,
                **{key: value for key, value in run.result.items() if key != "versions"},
            }
            for run in runs
        ],
        **more,
    )


def draw(path: Path, entries: Sequence[Mapping[str, Any]], sheet: Sheet) -> None:
    """Bars of tokens per second per case and side, with the arithmetic limit."""
    sides = dict.fromkeys(side for entry in entries for side in entry["sides"])
    bars = {side: [entry["sides"].get(side, {}).get("tokens_per_s", 0.0) for entry in entries] for side in sides}
    with plot(path, 1.5 + 1.7 * len(entries), 3.6) as (axes,):
        grouped_bars(axes, [f"{entry['dtype']}\n{entry[sheet.case]}" for entry in entries], bars, sheet.unit)
        for i, entry in enumerate(entries):
            ours = entry["sides"].get("asyncrl")
            if ours and ours["limit_share"]:
                limit = ours["tokens_per_s"] / ours["limit_share"]
                limit_line(axes, i, limit, f"limit {limit:.0f}")
