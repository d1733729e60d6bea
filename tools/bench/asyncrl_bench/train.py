"""Training alone (log-probs, loss, backward, optimizer) of ragged sequences, against the GEMM rate.

    for each repetition, for each dtype:   GEMM rate and steps, in turns   ->   one step under the profiler    a fresh process

Needed FLOP of a step: 6 per parameter of a matrix product and token; a prompt counts once per group and needs no head.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import figures
from .command import MODEL, Bench, Measured, Place, option, positive, run_options
from .figures import Run, Sheet
from .job import TrainJob
from .plots import limit_line, plot

SHEET = Sheet(
    "tokens/s, training alone",
    (
        ("trained tokens/s", "tokens_per_s", ".1f"),
        ("s", "seconds", ".2f"),
        ("CPU s", "cpu_seconds", ".2f"),
        ("of the limit", "limit_share", ".1%"),
        ("peak GiB", "peak_gib", ".2f"),
    ),
)


def measure(place: Place) -> Measured:
    options, runs = place.options, list[Run]()
    model = place.model()

    def prepare(dtype: Any, case: str, label: str) -> tuple[TrainJob, Mapping[str, Any]]:
        return TrainJob.asked(options, model=model, dtype=dtype, profile=not options.no_profile), {}

    cases = [(dtype, f"{options.groups} x {options.group_size} ragged") for dtype in options.dtypes]
    sides: dict[str, Callable[[TrainJob, str], dict[str, Any]]] = {"asyncrl": partial(place.own, "train")}
    if options.against_packed:
        sides["packed"] = lambda job, label: place.own("train", job.of(packed=True), f"packed-{label}")
    for run in figures.pairs(place, cases, prepare, sides, judge):
        runs.append(run)
        figures.write(place, runs, figures.summarise(runs, SHEET), SHEET, breakdown=breakdowns(runs))
    entries, parts = figures.summarise(runs, SHEET), breakdowns(runs)
    lines = figures.table(entries, SHEET)
    for dtype, own in parts.items():
        lines += ["", f"of a step, {dtype}: " + ", ".join(f"{name} {share:.1%}" for name, share in own.items())]
    return Measured(lines, (lambda path: draw(path, entries, parts)) if parts else None)


def judge(side: str, job: TrainJob, rates: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": statistics.median(result["step_seconds"]),
        "tokens": result["scored_tokens"],
        "needed_flop": result["needed_flop"],
        "gemm_flops": result["gemm_flops"],
        "more": {"cpu_seconds": statistics.median(result["step_cpu_seconds"])},
    }


def breakdowns(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """By dtype: medians over repetitions of each part's share of the profiled step; the largest first, `rest` last."""
    found: dict[str, dict[str, float]] = {}
    runs = [run for run in runs if run.side == "asyncrl"]
    for dtype in dict.fromkeys(run.dtype for run in runs):
        parts = [run.result["breakdown"] for run in runs if run.dtype == dtype and run.result["breakdown"]]
        if parts:
            medians = {name: statistics.median(one[name] / sum(one.values()) for one in parts) for name in parts[0]}
            found[dtype] = dict(sorted(medians.items(), key=lambda item: (item[0] == "rest", -item[1])))
    return found


def draw(path: Path, entries: Sequence[Mapping[str, Any]], parts: Mapping[str, Mapping[str, float]]) -> None:
    """A bar per dtype: the seconds of a step by part, and the limit."""
    with plot(path, 2.2 + 1.8 * len(entries)) as (axes,):
        bottoms = [0.0] * len(entries)
        for name in next(iter(parts.values())):
            heights = [
                entry["sides"]["asyncrl"]["seconds"] * parts.get(entry["dtype"], {}).get(name, 0.0) for entry in entries
            ]
            axes.bar(range(len(entries)), heights, 0.6, bottoms, label=name)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for i, entry in enumerate(entries):
            own = entry["sides"]["asyncrl"]
            limit = own["seconds"] * own["limit_share"]
            limit_line(axes, i, limit, f"limit {limit:.2f} s\n{own['limit_share']:.0%} of it", above=bottoms[i])
        axes.set_xticks(range(len(entries)), [entry["dtype"] for entry in entries])
        axes.set_ylabel("seconds of a train step")
        axes.margins(y=0.18)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


BENCH = Bench(
    "train",
    __doc__,
    "tiny random model, 2 groups of 2, one step",
    (
        option("--groups", 8, "prompts per step", 2),
        option("--group-size", 8, "completions per prompt", 2),
        option("--prompt-tokens", 48, "about; each prompt has its own length", 8),
        option("--mean-tokens", 47, "mean of the geometric lengths of completions", 6),
        option("--max-tokens", 128, "longest completion", 12),
        option("--tokens-per-microbatch", None, "asyncrl's own default where it is not given", type=positive),
        option("--steps", 3, "measured steps of a run; their median counts", 1),
        option("--warmup-steps", 1, "steps before them"),
        option("--no-profile", False, "no breakdown: without the step under the profiler"),
        option("--against-packed", False, "the same on the packed path, in turns"),
        MODEL,
        *run_options("bench_train"),
    ),
    measure,
)
