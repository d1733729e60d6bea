"""Whole RL steps of asyncrl (preset `async`, steady state) against TRL's `GRPOTrainer`.

    for each repetition, for each case (dtype x lengths):   GEMM rate  ->  asyncrl  ->  TRL      each in a fresh process

The order of the two sides turns with every repetition.

What is counted. `sampled tokens` are the tokens that were sampled and trained in the measured steps. In the steady state of an
asynchronous run as many are generated as trained, but a short window can hold more of one than of the other: the rate counts the
smaller number, both are in the JSON, and a note stands where they are far apart.

Needed FLOP of a step: 2 per parameter of a matrix product and token forward, 4 backward; every sampled token is sampled once and
trained once (8 in all), every prompt is prefilled and trained once per group (8, without the head, which a prompt does not
need). Attention over the context, the optimizer, norms and softmax are left out, so the share of the limit is a little too low.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from . import figures
from .command import (
    DEVICE,
    MODEL,
    OVERRIDES,
    Bench,
    Measured,
    Place,
    cuda_peer,
    option,
    peer_options,
    positive,
    run_options,
    words,
)
from .figures import Run, Sheet
from .job import RatesJob, StepJob, write_prompts
from .processes import peer_python

SHEET = Sheet(
    "sampled tokens/s, whole RL steps",
    (
        ("sampled tokens/s", "tokens_per_s", ".1f"),
        ("s/step", "seconds_per_step", ".1f"),
        ("tokens/completion", "mean_length", ".1f"),
        ("of the limit", "limit_share", ".1%"),
        ("peak GiB", "peak_gib", ".2f"),
    ),
    case="lengths",
    title="lengths",
)
UNSTEADY = 0.1
_FLOP_PER_PARAMETER = 2 + 2 + 4  # sampled or prefilled; forward; backward


def check(options: argparse.Namespace) -> str | None:
    sequences = options.prompts * options.group_size
    options.trl_microbatch = min(options.trl_microbatch, sequences)
    if options.trl_warmup_steps < 0:
        return "--trl-warmup-steps: at least 0"
    if sequences % options.trl_microbatch:
        return f"--trl-microbatch {options.trl_microbatch} does not divide {sequences} sequences"
    return cuda_peer(options)


def measure(place: Place) -> Measured:
    options = place.options
    sides: dict[str, Any] = {"asyncrl": partial(place.own, "step")}
    if options.peer == "trl":
        steps = {"steps": options.trl_steps, "warmup_steps": options.trl_warmup_steps}
        python = peer_python("trl", place.cache, options.trl_python)
        sides["trl"] = lambda job, label: place.peer(python, "trl_step", job.of(**steps), label)
    model = place.model()
    prompts = str(write_prompts(place.scratch / "prompts.jsonl", seed=0, distinct=options.prompts))

    def prepare(dtype: Any, lengths: str, label: str) -> tuple[StepJob, Mapping[str, Any]]:
        rates = place.own("rates", RatesJob(model, dtype, options.threads, prompts, device=options.device), label)
        job = StepJob.asked(
            options,
            model=model,
            prompts=prompts,
            groups_per_step=options.prompts,
            max_prompt_tokens=rates["prompt_tokens_max"],
            dtype=dtype,
            lengths=lengths,
            overrides=tuple(options.overrides),
            gradient_checkpointing=options.trl_gradient_checkpointing,
            float32_masters=options.trl_float32_masters,
            microbatch=options.trl_microbatch,
        )
        return job, rates

    runs: list[Run] = []
    for run in figures.pairs(place, product(options.dtypes, options.lengths), prepare, sides, judge):
        runs.append(run)
        figures.write(place, runs, summarise(runs), SHEET)
    entries = summarise(runs)
    lines = [*figures.table(entries, SHEET), *notes(entries)]
    return Measured(lines, lambda path: figures.draw(path, entries, SHEET))


def judge(side: str, job: StepJob, rates: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The counted tokens, and the FLOP that they and their prompts need."""
    sampled = max(result["sampled_tokens"], 1)
    tokens = min(result["sampled_tokens"], result["generated_tokens"])
    prompts = result["prompt_tokens"] * tokens / sampled
    return {
        "tokens": tokens,
        "needed_flop": needed_flop(rates, tokens, prompts),
        "result": {**result, **{key: value for key, value in rates.items() if key != "gemm_flops"}},
        "more": {
            "seconds_per_step": result["seconds"] / result["steps"],
            "mean_length": result["sampled_tokens"] / result["sequences"],
            "generated_to_trained": result["generated_tokens"] / sampled,
        },
    }


def needed_flop(rates: Mapping[str, Any], sampled_tokens: float, prompt_tokens: float) -> float:
    body = rates["decoder_parameters"] * (sampled_tokens + prompt_tokens)
    return float(_FLOP_PER_PARAMETER * (body + rates["head_parameters"] * sampled_tokens))


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """With the medians of the shares of asyncrl's time."""
    entries = figures.summarise(runs, SHEET)
    for entry in entries:
        case = (entry["dtype"], entry["lengths"], "asyncrl")
        shares = [run.result["shares"] for run in runs if (run.dtype, run.case, run.side) == case]
        names = sorted({name for each in shares for name in each})
        entry["shares"] = {name: statistics.median(each.get(name, 0.0) for each in shares) for name in names}
    return entries


def notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where asyncrl's time went, and windows that were too short."""
    lines = []
    for entry in entries:
        case = f"{entry['dtype']}, {entry['lengths']}"
        if entry["shares"]:
            spent = sorted(entry["shares"].items(), key=lambda item: -item[1])
            text = ", ".join(f"{name} {share:.1%}" for name, share in spent if share >= 0.0005)
            lines += ["", f"asyncrl's time, {case}: {text}"]
        ours = entry["sides"].get("asyncrl")
        if ours and abs(ours["generated_to_trained"] - 1) > UNSTEADY:
            share = f"{ours['generated_to_trained']:.2f}"
            lines += [
                "",
                f"NOTE, {case}: asyncrl's window was not in a steady state: it generated {share} of what it trained; ",
            ]
            lines[-1] += "take more --steps"
    return lines


BENCH = Bench(
    "step",
    __doc__,
    "tiny random model, 2 prompts x 2 x 8 tokens, asyncrl alone",
    (
        option("--prompts", 8, "prompts per step", 2),
        option("--group-size", 8, "completions per prompt", 2),
        option("--max-tokens", 128, "longest completion", 8),
        option(
            "--lengths", "natural,fixed", "until the end-of-sequence token, or always --max-tokens", "natural",
            type=words("natural", "fixed"),
        ),
        option("--steps", 6, "measured steps of a run of asyncrl; take a multiple of 3, the slots turn over then", 3),
        option("--warmup-steps", 3, "steps before them, until the pipeline is in its steady state", 1, type=positive),
        option("--trl-steps", 1, "measured steps of a run of TRL, minutes each"),
        option("--trl-warmup-steps", 1, "steps before them", type=int),
        option("--trl-microbatch", 16, "TRL's per_device_train_batch_size"),
        option(
            "--trl-float32-masters", False, "bfloat16 of TRL: float32 weights under autocast, as asyncrl's masters are"
        ),
        option("--trl-gradient-checkpointing", False, "TRL's own default; slower, less memory. Off here"),
        MODEL,
        DEVICE,
        *run_options("bench_step", "bfloat16 of asyncrl keeps float32 masters; TRL's with --trl-float32-masters"),
        *peer_options("trl", "trl"),
        OVERRIDES,
    ),
    measure,
    check,
)  # fmt: skip
