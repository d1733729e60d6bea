"""`asyncrl bench train`: training alone (log-probs, loss, backward, optimizer) of ragged sequences, against the GEMM rate.

    for each repetition, for each dtype:   GEMM rate and steps, in turns   ->   one step under the profiler    a fresh process

Needed FLOP of a step: 6 per parameter of a matrix product and token; a prompt counts once per group and needs no head. The JSON is
written after every run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report, shares
from .job import TrainJob
from .shares import Place, Run, positive

_QUICK: dict[str, Any] = {
    "model": "tiny", "groups": 2, "group_size": 2, "prompt_tokens": 8, "mean_tokens": 6, "max_tokens": 12, "steps": 1,
    "repetitions": 1, "dtypes": "float32", "threads": 1,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "model": "smollm2", "groups": 8, "group_size": 8, "prompt_tokens": 48, "mean_tokens": 47, "max_tokens": 128, "steps": 3,
    "repetitions": 3, "dtypes": "float32,bfloat16", "threads": 2,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench train", allow_abbrev=False, description=__doc__.partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="smoke test: tiny random model, 2 groups of 2, one step")
    add("--groups", type=positive, help="prompts per step (8)")
    add("--group-size", type=positive, help="completions per prompt (8)")
    add("--prompt-tokens", type=positive, help="about; each prompt has its own length (48)")
    add("--mean-tokens", type=positive, help="mean of the geometric lengths of completions (47)")
    add("--max-tokens", type=positive, help="longest completion (128)")
    add("--tokens-per-microbatch", type=positive, help="asyncrl's own default where it is not given")
    add("--steps", type=positive, help="measured steps of a run; their median counts (3)")
    add("--warmup-steps", type=positive, default=1, help="steps before them (1)")
    add("--no-profile", action="store_true", help="no breakdown: without the step under the profiler")
    shares.common_options(parser, "bench_train")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    complain = parser()
    options = complain.parse_args(arguments)
    return shares.fill(complain, options, _QUICK if options.quick else _DEFAULTS)


def measure(place: Place, command: str) -> str:
    options, runs = place.options, list[Run]()
    for repetition in range(options.repetitions):
        for dtype in options.dtypes:
            label = f"train-{dtype}-{repetition}"
            place.say(f"asyncrl: {dtype}, repetition {repetition + 1}")
            job = _job(place, dtype).write(place.scratch / f"{label}.json")
            runs.append(_run(options, dtype, repetition, place.child("train", job, label)))
            figures = runs[-1].figures()
            place.say(f"  {figures['seconds']:.2f} s a step, {figures['limit_share']:.1%} of the GEMM rate beside it")
            written = _write(options, command, runs)
    entries = shares.summarise(runs)
    parts = breakdowns(runs)
    plot = written.with_suffix(".png")
    also = f" and {plot}" if write_plot(plot, entries, parts) else ""
    return "\n".join([shares.table(entries, "trained tokens"), *_parts_table(parts), "", f"written: {written}{also}"])


def _job(place: Place, dtype: Any) -> TrainJob:
    options = place.options
    return TrainJob(
        model=str(place.model),
        groups=options.groups,
        group_size=options.group_size,
        prompt_tokens=options.prompt_tokens,
        mean_tokens=options.mean_tokens,
        max_tokens=options.max_tokens,
        dtype=dtype,
        threads=options.threads,
        warmup_steps=options.warmup_steps,
        steps=options.steps,
        profile=not options.no_profile,
        tokens_per_microbatch=options.tokens_per_microbatch,
    )


def _run(options: argparse.Namespace, dtype: str, repetition: int, result: dict[str, Any]) -> Run:
    return Run(
        side="asyncrl",
        dtype=dtype,
        case=f"{options.groups} x {options.group_size} ragged",
        repetition=repetition,
        seconds=statistics.median(result["step_seconds"]),
        tokens=result["scored_tokens"],
        needed_flop=result["needed_flop"],
        gemm_flops=result["gemm_flops"],
        peak_bytes=result["peak_bytes"],
        result=result,
    )


def breakdowns(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """By dtype: medians over repetitions of each part's share of the profiled step; the largest first, `rest` last."""
    found: dict[str, dict[str, float]] = {}
    for dtype in dict.fromkeys(run.dtype for run in runs):
        parts = [run.result["breakdown"] for run in runs if run.dtype == dtype and run.result["breakdown"]]
        if parts:
            medians = {name: statistics.median(one[name] / sum(one.values()) for one in parts) for name in parts[0]}
            found[dtype] = dict(sorted(medians.items(), key=lambda item: (item[0] == "rest", -item[1])))
    return found


def _parts_table(parts: dict[str, dict[str, float]]) -> list[str]:
    return [
        line
        for dtype, own in parts.items()
        for line in ("", f"of a step, {dtype}: " + ", ".join(f"{name} {share:.1%}" for name, share in own.items()))
    ]


def _write(options: argparse.Namespace, command: str, runs: Sequence[Run]) -> Path:
    path = Path(options.out) / f"{options.name}.json"
    content = shares.document("train", runs, vars(options), command)
    report.write_json(path, {**content, "breakdown": breakdowns(runs)})
    return path


def write_plot(path: Path, entries: Sequence[dict[str, Any]], parts: dict[str, dict[str, float]]) -> bool:
    """A bar per dtype: the seconds of a step by part, and the limit. False without matplotlib or without a breakdown."""
    if not parts or not report.matplotlib_found():
        return False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2.2 + 1.8 * len(entries), 3.8), layout="constrained")
    names = list(next(iter(parts.values())))
    bottoms = [0.0] * len(entries)
    for name in names:
        heights = [
            entry["sides"]["asyncrl"]["seconds"] * parts.get(entry["dtype"], {}).get(name, 0.0) for entry in entries
        ]
        axes.bar(range(len(entries)), heights, 0.6, bottoms, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for i, entry in enumerate(entries):
        own = entry["sides"]["asyncrl"]
        limit = own["seconds"] * own["limit_share"]
        axes.hlines(limit, i - 0.4, i + 0.4, colors="black", linestyles="dashed", linewidth=1)
        text = f"limit {limit:.2f} s\n{own['limit_share']:.0%} of it"
        axes.annotate(text, (i, bottoms[i]), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(entries)), [entry["dtype"] for entry in entries])
    axes.set_ylabel("seconds of a train step")
    axes.margins(y=0.18)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    report.save_plot(figure, axes, path)
    return True


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    command = shares.public_command("train", arguments)
    return shares.call(options, lambda place: measure(place, command))
