"""Generation and training at the same time, on one core each, against either side alone: real lanes, a real model.

    both sides alone  ->  decode steps by sequences: `engine.max_sequences` at which the sides cost the same    (unless it is given)
    for each repetition:  both sides alone  ->  the run with a worker  ->  the run with one lane for both       each a fresh process

Alone: a run with a worker generates the groups of all steps while nothing trains, then trains them while nothing is generated;
what they took is counted per token of the other runs' steps. A step can take as long as the longer side at best, and as the sum
where both share one core. What it takes above that is what the sides wait for each other, what the runtime costs, and what one
core takes from the other one where they share caches and memory: `busy` has the seconds that each lane computes in the run.

Weights, at each version of the run with a worker: how long decoding stops, and how long it takes from the optimizer's end to the
worker's answer, beside plain copies of the same bytes and a checkpoint of them, on the trainer's lane of the same run.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .command import DTYPES, MODEL, OVERRIDES, Bench, Measured, Place, child_options, option, positive
from .job import RatesJob, StepJob, SweepJob, write_prompts
from .plots import markdown, plot

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
START = 8  # sequences decoded together, of the first look at both sides
GOAL, UNBALANCED = 1.10, 1.5
COLORS = {"decode": "C0", "prefill": "C9", "train": "C1", "publish": "C3", "reward": "C4"}


def check(options: argparse.Namespace) -> str | None:
    return None if (os.cpu_count() or 1) > 1 else "this machine has one core: there is nothing to overlap"


def measure(place: Place) -> Measured:
    options = place.options
    model, prompts = place.model(), str(write_prompts(place.scratch / "prompts.jsonl", distinct=options.prompts))
    longest = place.own("rates", RatesJob(model, options.dtype, 1, prompts), "prompts")["prompt_tokens_max"]
    job = StepJob.asked(
        options, model=model, prompts=prompts, groups_per_step=options.prompts, max_prompt_tokens=longest, threads=1
    )
    sequences = options.max_sequences or balance(place, job)
    worker = placed(job, sequences, "generation.placement=worker", "generation.workers=1", "generation.threads=1")
    shared = placed(job, sequences, "generation.placement=shared")
    runs = list[dict[str, Any]]()
    for number in range(options.repetitions):
        found: dict[str, Any] = {"load": os.getloadavg()}
        found["sides"] = place.own("sides", worker, f"sides-{number}")
        for name, own in (("worker", worker), ("shared", shared)):
            found[name] = place.own("overlap", own, f"{name}-{number}")
            place.say(f"{name}: {found[name]['seconds'] / job.steps:.2f} s a step")
        runs.append({**found, "figures": figures(found, job.steps)})
        place.write(max_sequences=sequences, summary=summarise(runs), runs=runs)
    summary = summarise(runs)
    return Measured(report(summary, runs, sequences), partial(draw, runs[-1]["worker"]["timeline"]))


def placed(job: StepJob, sequences: int, *settings: str) -> StepJob:
    own = (f"engine.max_sequences={sequences}", "telemetry.trace=true", *settings)
    return job.of(overrides=(*own, *job.overrides))


def balance(place: Place, job: StepJob) -> int:
    """Of `COUNTS`, sequences decoded together at which generating a step's tokens takes as long as training them."""
    settings = ("generation.placement=worker", "generation.workers=1", "generation.threads=1")
    sides = place.own("sides", placed(job, START, *settings), "balance")
    sweep = SweepJob(
        job.model, COUNTS, (job.max_prompt_tokens + job.max_tokens // 2,), job.dtype, 1, warmup_steps=3, steps=10,
        cache_gib=1.0,
    )  # fmt: skip
    cells = place.own("sweep", sweep, "balance")["cells"]
    costs: dict[int, float] = {each["sequences"]: each["seconds"] / each["sequences"] for each in cells}
    generation, training = (side["seconds"] / side["tokens"] for side in (sides["generation"], sides["training"]))
    expected = {count: generation * cost / costs[START] for count, cost in costs.items()}
    chosen = min(expected, key=lambda count: abs(math.log(expected[count] / training)))
    place.say(
        f"balance: a token takes {1e3 * training:.1f} ms to train and {1e3 * expected[chosen]:.1f} ms to generate with "
        f"{chosen} sequences decoded together ({1e3 * generation:.1f} with {START})"
    )
    return chosen


def figures(found: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Seconds a step, of the same tokens for all: those that the run with a worker generated and trained."""
    worker, shared, sides = found["worker"], found["shared"], found["sides"]
    tokens = worker["sampled_tokens"]
    seconds = {
        name: side["seconds"] / side["tokens"] * tokens / steps
        for name, side in (("generation", sides["generation"]), ("training", sides["training"]))
    }
    longer, both = max(seconds.values()), sum(seconds.values())
    one_lane = shared["seconds"] / shared["sampled_tokens"] * tokens / steps
    step = worker["seconds"] / steps
    lanes = {name: sum(kinds.values()) for name, kinds in worker["busy"].items()}
    return {
        "generation alone": seconds["generation"],
        "training alone": seconds["training"],
        "step, worker": step,
        "step, shared": one_lane,
        "step to longer side": step / longer,
        "longer side to shorter": longer / min(seconds.values()),
        "sum of sides to longer": both / longer,
        "shared to sum of sides": one_lane / both,
        "shared to worker": one_lane / step,
        "step to busier lane": step / max(lanes.values()),
        "generated to trained": worker["generated_tokens"] / tokens,
        "staleness, mean": worker["staleness_mean"],
        "staleness, max": worker["staleness_max"],
        **{f"busy, {name}": value for name, value in lanes.items()},
    }


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians: of the runs' figures, of the shares of each lane's time, of the hand-overs of all of them."""
    shares = [
        {key: value for key, value in run["worker"]["shares"].items() if key.count("/") == 2 and value >= 0.0005}
        for run in runs
    ]
    moves: dict[str, list[float]] = {}
    for run in runs:
        for name, values in run["worker"]["hand_over"].items():
            if isinstance(values, list):
                moves.setdefault(name, []).extend(values)
    return {
        "figures": {name: median(run["figures"][name] for run in runs) for name in runs[0]["figures"]},
        "shares": {
            name: median(each.get(name, 0.0) for each in shares) for name in sorted({n for s in shares for n in s})
        },
        "hand_over_ms": {name: median(values) for name, values in moves.items() if values},
        "bytes": runs[0]["worker"]["hand_over"]["bytes"],
    }


def report(summary: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], sequences: int) -> list[str]:
    found = summary["figures"]
    rows = [[name, f"{value:.3f}"] for name, value in found.items()]
    lines = markdown([f"{sequences} sequences decoded together, one core a side", "s, or ratio"], rows, 1)
    if found["longer side to shorter"] > UNBALANCED:
        lines += [
            "",
            f"NOTE: the sides are not in balance, one takes {found['longer side to shorter']:.2f} of the other",
        ]
    verdict = "reached" if found["step to longer side"] <= GOAL else "missed"
    lines += ["", f"goal, a step takes at most {GOAL:.2f} of the longer side alone: {verdict}"]
    for lane in sorted({name.split("/")[1] for name in summary["shares"]}):
        own = {n.replace(f"/{lane}/", " "): share for n, share in summary["shares"].items() if f"/{lane}/" in n}
        spent = sorted(own.items(), key=lambda item: -item[1])
        lines += ["", f"lane {lane}: " + ", ".join(f"{name} {share:.1%}" for name, share in spent)]
    lines += ["", *hand_overs(summary["hand_over_ms"], summary["bytes"])]
    loads = " ".join(f"{run['load'][0]:.1f}" for run in runs)
    return [*lines, "", f"load of the machine before each repetition: {loads}"]


def hand_overs(moves: Mapping[str, float], size: int) -> list[str]:
    texts = {
        "token_gap": "between two tokens of a running request",
        "stop": "the same around a move, the longest: the move, and the step after it, which packs the weights",
        "gap": "between the decode steps before and after the move",
        "usual_gap": "between two other decode steps",
        "bind": "of the gap: the modules move to the other half",
        "decode": "a decode step",
        "decode_after": "the first one after the move",
        "to_write": "from the optimizer's end until the copy begins",
        "write": "checks of the modules, copy, fixed row",
        "to_bind": "until the worker's closure has ended that it was in",
        "to_answer": "from the worker's move until the publish pump goes on",
        "total": "from the optimizer's end until the publish pump goes on",
        "memcpy": "a plain copy of the same bytes, on the same lane",
        "checkpoint": "a safetensors file of them, written and loaded",
    }
    rows = [[text, f"{moves[name]:.2f}"] for name, text in texts.items() if name in moves]
    return markdown([f"hand-over of {size / 2**20:,.0f} MiB, medians", "ms"], rows, 1)


def draw(timeline: Mapping[str, Any], path: Path) -> None:
    """A track for each lane, a bar for each closure, a line for each commit."""
    from matplotlib.patches import Patch

    lanes, commits = timeline["lanes"], timeline["commits"]
    with plot(path, 11, 1.3 + 0.7 * len(lanes)) as (axes,):
        seen = dict[str, str]()
        for row, closures in enumerate(lanes.values()):
            for name, start, end in closures:
                kind = kind_of(name)
                seen[kind] = COLORS.get(kind, "0.6")
                axes.broken_barh([(start, end - start)], (row - 0.38, 0.76), color=seen[kind], linewidth=0)
        for commit in commits:
            axes.axvline(commit, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(lanes)), [{"cpu": "trainer"}.get(name, name) for name in lanes])
        axes.set_xlim(0, commits[-1])
        axes.set_xlabel("seconds; dotted: a step is committed")
        handles = [Patch(color=color, label=kind) for kind, color in seen.items()]
        axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def kind_of(name: str) -> str:
    from asyncrl.telemetry.budget import kind_of as kind

    return kind(name)


BENCH = Bench(
    "overlap",
    __doc__,
    "tiny random model, 2 prompts x 2 x 8 tokens, no search for the balance",
    (
        option("--prompts", 4, "prompts per step", 2),
        option("--group-size", 4, "completions per prompt", 2),
        option("--max-tokens", 64, "longest completion", 8),
        option("--lengths", "natural", "until the end-of-sequence token, or always --max-tokens", choices=("natural", "fixed")),
        option("--max-sequences", None, "sequences decoded together, where the balance is known", 2, type=positive),
        option("--steps", 6, "measured steps of a run", 3),
        option("--warmup-steps", 3, "steps before them, until the pipeline is in its steady state", 1),
        option("--dtype", "bfloat16", "of the matrix products", "float32", choices=DTYPES),
        option("--repetitions", 1, "of everything but the balance; medians are shown"),
        MODEL,
        *child_options("bench_overlap"),
        OVERRIDES,
    ),
    measure,
    check,
)  # fmt: skip
