"""Waiting is free: whole steps of agents whose tools take 0.2 to 2 s, against the same agents with instant tools.

An episode has several replies, and waits after each reply but the last one. The waits are log-normal, with a median of 0.6 s. The
tokens are equal in number on both sides. Async: staleness 2, so that groups of later steps are played while a step trains and while
other episodes wait. Sync: each step waits for the slowest of its own episodes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .command import DTYPES, MODEL, OVERRIDES, Bench, Measured, Place, child_options, option, turned
from .job import PEERS, RatesJob, StepJob, write_prompts
from .plots import markdown

AGENT = PEERS / "waiting_agent.py"
GOAL = 1.15
PRESETS = {"async": ("preset=async", "rollout.max_staleness=2"), "sync": ("preset=sync",)}
TOOLS = ("instant", "waiting")


def measure(place: Place) -> Measured:
    options = place.options
    prompts = str(write_prompts(place.scratch / "prompts.jsonl", distinct=options.prompts))
    model = place.model()
    longest = place.own("rates", RatesJob(model, options.dtype, 1, prompts), "prompts")["prompt_tokens_max"]
    job = StepJob.asked(
        options,
        model=model,
        prompts=prompts,
        groups_per_step=options.prompts,
        max_prompt_tokens=longest,
        lengths="fixed",
    )
    runs: list[dict[str, Any]] = []
    for number in range(options.repetitions):
        seconds: dict[str, float] = {}
        for preset, tools in turned([(preset, tools) for preset in PRESETS for tools in TOOLS], number):
            found = place.own("step", asked(job, preset, tools), f"{preset}-{tools}-{number}")
            seconds[f"{preset}, {tools}"] = found["seconds"] / found["steps"]
            place.say(f"{preset}, {tools} tools: {found['seconds'] / found['steps']:.2f} s a step")
        runs.append({"seconds": seconds, "ratios": ratios(seconds), "load": os.getloadavg()})
        place.write(agents=options.prompts * options.group_size, summary=summarise(runs), runs=runs)
    return Measured(report(summarise(runs), options))


def asked(job: StepJob, preset: str, tools: str) -> StepJob:
    """A run with these tools."""
    environment = f"rollout.environment={AGENT}:{tools}"
    longest = "rollout.max_context=512", "train.tokens_per_microbatch=4096"
    return job.of(overrides=(*PRESETS[preset], environment, *longest, *job.overrides))


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    return {preset: seconds[f"{preset}, waiting"] / seconds[f"{preset}, instant"] for preset in PRESETS}


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions."""
    return {
        kind: {name: median(run[kind][name] for run in runs) for name in runs[0][kind]}
        for kind in ("seconds", "ratios")
    }


def report(summary: Mapping[str, Mapping[str, float]], options: argparse.Namespace) -> list[str]:
    seconds, found = summary["seconds"], summary["ratios"]
    rows = [
        [preset, *(f"{seconds[f'{preset}, {tools}']:.2f}" for tools in TOOLS), f"{found[preset]:.2f}"]
        for preset in PRESETS
    ]
    title = f"{options.prompts * options.group_size} agents a step, s a step"
    verdict = "reached" if found["async"] <= GOAL else "missed"
    lines = markdown([title, "instant tools", "tools of 0.2 to 2 s", "ratio"], rows, 1)
    return [*lines, "", f"goal, async at most {GOAL:.2f}: {verdict}"]


BENCH = Bench(
    "agents",
    __doc__,
    "tiny random model, 2 prompts x 2, two steps",
    (
        option("--prompts", 8, "prompts per step", 2),
        option("--group-size", 8, "agents per prompt", 2),
        option("--max-tokens", 64, "tokens of a reply", 4),
        option("--threads", 2, "torch threads", 1),
        option("--steps", 8, "measured steps of a run", 2),
        option("--warmup-steps", 4, "steps before them, until the pipeline is in its steady state", 1),
        option("--dtype", "float32", "of the matrix products", choices=DTYPES),
        option("--repetitions", 3, "of all four runs, in turns; medians are shown", 1),
        MODEL,
        *child_options("bench_agents"),
        OVERRIDES,
    ),
    measure,
)
