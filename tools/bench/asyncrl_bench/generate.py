"""Generation alone by the embedded engine, against vLLM on the CPU (`--peer vllm`).

    for each repetition, for each case (dtype x job):   GEMM rate  ->  asyncrl  ->  vLLM      each in a fresh process

The order of the sides turns with every repetition. Completions have a fixed length; groups share a prompt; every sequence is
handed over at once. Needed FLOP: 2 per parameter and sampled token, and the body once per group's prompt. `--sweep` measures
decode steps instead, by sequences and context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

from . import figures, sweep
from .command import MODEL, Bench, Measured, Place, option, peer_options, run_options
from .figures import Run, Sheet
from .job import GenerateJob, RatesJob, write_token_prompts
from .processes import peer_python, vllm_environment

SHEET = Sheet(
    "tokens/s, generation alone",
    (
        ("tokens/s", "tokens_per_s", ".1f"),
        ("s", "seconds", ".2f"),
        ("of the limit", "limit_share", ".1%"),
        ("peak GiB", "peak_gib", ".2f"),
    ),
)
NAME = "bench_generate"


def numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if bad := [part for part in parts if not part.isdecimal() or int(part) < 1]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is not a number of at least 1")
    return tuple(sorted({int(part) for part in parts}))


def jobs(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        sequences, _, tokens = part.strip().partition("x")
        if not (sequences.isdecimal() and tokens.isdecimal() and int(sequences) and int(tokens)):
            raise argparse.ArgumentTypeError(f"{part!r} is not SEQUENCESxTOKENS, as in 64x128")
        found.append((int(sequences), int(tokens)))
    return tuple(found)


def check(options: argparse.Namespace) -> str | None:
    if options.sweep and options.name == NAME:
        options.name = "bench_decode"  # the two tables do not overwrite each other
    return "--sweep measures asyncrl alone: leave --peer out" if options.sweep and options.peer != "none" else None


def measure(place: Place) -> Measured:
    options, runs = place.options, list[Run]()
    if options.sweep:
        return sweep.measure(place)
    sides: dict[str, Callable[[GenerateJob, str], dict[str, Any]]] = {"asyncrl": partial(place.own, "generate")}
    if options.peer == "vllm":
        python, own = peer_python("vllm", place.cache, options.vllm_python), vllm_environment(options.threads)
        sides["vllm"] = lambda job, label: place.peer(python, "vllm_generate", job, label, own)
    model = place.model()
    cases = {f"{sequences} x {tokens}": (sequences, tokens) for sequences, tokens in options.jobs}

    def prepare(dtype: Any, case: str, label: str) -> tuple[GenerateJob, Mapping[str, Any]]:
        sequences, tokens = cases[case]
        file = str(place.scratch / f"prompts-{sequences}.json")
        job = GenerateJob.asked(options, model=model, prompts=file, sequences=sequences, max_tokens=tokens, dtype=dtype)
        rates = place.own("rates", RatesJob(model, dtype, options.threads), label)
        write_token_prompts(job, rates["vocabulary"])
        return job, rates

    for run in figures.pairs(place, product(options.dtypes, cases), prepare, sides, judge):
        runs.append(run)
        figures.write(place, runs, figures.summarise(runs, SHEET), SHEET)
    entries = figures.summarise(runs, SHEET)
    return Measured(figures.table(entries, SHEET), lambda path: figures.draw(path, entries, SHEET))


def judge(side: str, job: GenerateJob, rates: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": result["tokens"], "needed_flop": needed_flop(job, rates, result["tokens"])}


def needed_flop(job: GenerateJob, rates: Mapping[str, Any], tokens: int) -> float:
    body, head = rates["decoder_parameters"], rates["head_parameters"]
    groups = -(-job.sequences // job.group_size)
    return float(2 * (body * (tokens + groups * job.prompt_tokens) + head * tokens))


BENCH = Bench(
    "generate",
    __doc__,
    "tiny random model, 4 sequences x 6 tokens",
    (
        option("--jobs", "64x128,16x512", "sequences x tokens of each", "4x6", type=jobs),
        option("--group-size", 8, "sequences that share a prompt", 2),
        option("--prompt-tokens", 48, "of every prompt", 8),
        option("--warmup-tokens", 8, "of each of as many sequences, before the clock starts", 2),
        option("--sweep", False, "decode steps by sequences and context instead; asyncrl alone"),
        option("--sequences", "1,8,64,256", "of the sweep", "1,2", type=numbers),
        option("--contexts", "128,256,512,1024,2048,4096", "of the sweep", "16,32", type=numbers),
        option("--steps", 5, "of the sweep: measured steps of a cell; their median counts", 2),
        option("--cache-gib", 8.0, "of the sweep: cells whose keys and values need more are left out"),
        MODEL,
        *run_options(NAME),
        *peer_options("vllm", "none"),
    ),
    measure,
    check,
)
