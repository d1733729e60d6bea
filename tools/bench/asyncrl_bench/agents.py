"""Waiting is free: whole steps of agents whose tools take 0.2 to 2 s, against the same agents with instant tools.

An episode has several replies, and waits after each reply but the last one. The waits are log-normal, with a median of 0.6 s. The
tokens are equal in number on all sides: replies have a fixed length, and a tool answers with the same words.

async               staleness 2, so that groups of later steps are played while a step trains and while other episodes wait
sync                each step waits for the slowest of its own episodes
TRL, rollout_func   `GRPOTrainer` with a loop of ours in its experimental hook: all agents of a step make a reply, their tools run
                    at the same time, then the next reply. So each reply waits for the slowest tool of the step
TRL, tools          `GRPOTrainer` with a tool that is a coroutine. TRL 1.16 awaits the tools of one agent at a time, so a step takes
                    the sum of all waits. It is measured in one step

The model never writes a call by itself, so TRL's parser of replies is replaced by one that finds a call in every reply. TRL keeps
no keys and values from one reply to the next; `async` of asyncrl does. TRL's `AsyncGRPOTrainer` needs a server of vLLM and NCCL, so
it is not measured here.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from .command import (
    DEVICE,
    DTYPES,
    MODEL,
    OVERRIDES,
    Bench,
    Measured,
    Place,
    child_options,
    cuda_peer,
    option,
    peer_options,
    turned,
)
from .job import PEERS, BenchError, RatesJob, StepJob, write_prompts
from .plots import markdown
from .processes import peer_python

AGENT = PEERS / "waiting_agent.py"
GOAL = 1.15
PRESETS = {"async": ("preset=async", "rollout.max_staleness=2"), "sync": ("preset=sync",)}
TRL_FORMS = {"TRL, rollout_func": "rollout_func", "TRL, tools": "tools"}
TOOLS = ("instant", "waiting")
MAX_CONTEXT = 512
Side = Callable[[str, str], dict[str, Any]]  # tools, label


def check(options: argparse.Namespace) -> str | None:
    agents = options.prompts * options.group_size
    if options.peer == "trl" and agents % min(options.trl_microbatch, agents):
        return f"--trl-microbatch {options.trl_microbatch} does not divide {agents} agents"
    return cuda_peer(options)


def measure(place: Place) -> Measured:
    options = place.options
    prompts = str(write_prompts(place.scratch / "prompts.jsonl", distinct=options.prompts))
    model = place.model()
    longest = place.own("rates", RatesJob(model, options.dtype, 1, prompts, device=options.device), "prompts")[
        "prompt_tokens_max"
    ]
    job = StepJob.asked(
        options,
        model=model,
        prompts=prompts,
        groups_per_step=options.prompts,
        max_prompt_tokens=longest,
        lengths="fixed",
        max_context=MAX_CONTEXT,
        microbatch=options.trl_microbatch,
    )
    sides = {preset: own(place, job, preset) for preset in PRESETS}
    if options.peer == "trl":
        sides |= {name: peer(place, job, form) for name, form in TRL_FORMS.items()}
    runs: list[dict[str, Any]] = []
    for number in range(options.repetitions):
        found = {}
        for side, tools in turned([(side, tools) for side in sides for tools in TOOLS], number):
            name = f"{side}, {tools}"
            found[name] = sides[side](tools, f"{side.rpartition(' ')[2]}-{tools}-{number}")
            place.say(f"{name} tools: {found[name]['seconds'] / found[name]['steps']:.2f} s a step")
        require_equal_tokens(found)
        seconds = {name: each["seconds"] / each["steps"] for name, each in found.items()}
        runs.append({"seconds": seconds, "ratios": ratios(seconds), "load": os.getloadavg(), "sides": found})
        place.write(agents=options.prompts * options.group_size, summary=summarise(runs), runs=runs)
    return Measured(report(summarise(runs), options))


def own(place: Place, job: StepJob, preset: str) -> Side:
    return lambda tools, label: place.own("step", asked(job, preset, tools), label)


def asked(job: StepJob, preset: str, tools: str) -> StepJob:
    """A run with these tools."""
    environment = f"rollout.environment={AGENT}:{tools}"
    longest = f"rollout.max_context={job.max_context}", "train.tokens_per_microbatch=4096"
    return job.of(overrides=(*PRESETS[preset], environment, *longest, *job.overrides))


def peer(place: Place, job: StepJob, form: Any) -> Side:
    """One of TRL's two forms. With `tools` one step is measured, because it waits for minutes and its waits are a sum of many."""
    options = place.options
    python = peer_python("trl", place.cache, options.trl_python)
    steps = 1 if form == "tools" else options.trl_steps
    job = job.of(
        trl_form=form, steps=steps, warmup_steps=1, microbatch=min(job.microbatch, job.groups_per_step * job.group_size)
    )
    return lambda tools, label: place.peer(python, "trl_agents", job.of(agent=tools), label)


def require_equal_tokens(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Errors: BenchError if a side sampled another number of tokens, for example because `MAX_CONTEXT` cut its replies."""
    counted = {name: each["sampled_tokens"] / each["steps"] for name, each in found.items()}
    if max(counted.values()) > 1.01 * min(counted.values()):
        raise BenchError(f"the sides sampled different numbers of tokens a step: {counted}; lower --max-tokens")


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    sides = [name.removesuffix(", waiting") for name in seconds if name.endswith(", waiting")]
    return {side: seconds[f"{side}, waiting"] / seconds[f"{side}, instant"] for side in sides}


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions."""
    return {
        kind: {name: median(run[kind][name] for run in runs) for name in runs[0][kind]}
        for kind in ("seconds", "ratios")
    }


def report(summary: Mapping[str, Mapping[str, float]], options: argparse.Namespace) -> list[str]:
    seconds, found = summary["seconds"], summary["ratios"]
    sides = [name for name in (*PRESETS, *TRL_FORMS) if name in found]
    rows = [[side, *(f"{seconds[f'{side}, {tools}']:.2f}" for tools in TOOLS), f"{found[side]:.2f}"] for side in sides]
    title = f"{options.prompts * options.group_size} agents a step, s a step"
    verdict = "reached" if found["async"] <= GOAL else "missed"
    lines = markdown([title, "instant tools", "tools of 0.2 to 2 s", "ratio"], rows, 1)
    return [*lines, "", f"goal, async at most {GOAL:.2f}: {verdict}"]


BENCH = Bench(
    "agents",
    __doc__,
    "tiny random model, 2 prompts x 2, three steps, asyncrl alone",
    (
        option("--prompts", 8, "prompts per step", 2),
        option("--group-size", 8, "agents per prompt", 2),
        option("--max-tokens", 64, "tokens of a reply", 4),
        option("--threads", 2, "torch threads", 1),
        option("--steps", 9, "measured steps of a run of asyncrl; take a multiple of 3, the slots turn over then", 3),
        option("--warmup-steps", 3, "steps before them, until the pipeline is in its steady state", 1),
        option("--trl-steps", 3, "measured steps of a run of TRL with rollout_func"),
        option("--trl-microbatch", 16, "TRL's per_device_train_batch_size"),
        option("--dtype", "float32", "of the matrix products", choices=DTYPES),
        option("--repetitions", 3, "of all runs, in turns; medians are shown", 1),
        MODEL,
        DEVICE,
        *child_options("bench_agents"),
        *peer_options("trl", "trl"),
        OVERRIDES,
    ),
    measure,
    check,
)
