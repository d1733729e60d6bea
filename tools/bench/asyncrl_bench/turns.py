"""Episodes of several turns by the embedded engine: the keys and values of a history kept until the next turn, against the same
engine that computes the whole history in every turn.

    for each repetition, for each dtype:   GEMM rate  ->  kept  ->  computed again      each in a fresh process

The order of the sides turns with every repetition. All episodes begin at once and tools answer at once, so no row waits long.
Replies have a fixed length; groups share their first prompt. Needed FLOP: 2 per parameter and token, each token of a history once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

from . import figures
from .command import MODEL, Bench, Measured, Place, option, run_options
from .figures import Run, Sheet
from .job import RatesJob, TurnsJob, write_token_prompts

SHEET = Sheet(
    "tokens/s of replies",
    (
        ("tokens/s", "tokens_per_s", ".1f"),
        ("s", "seconds", ".2f"),
        ("prefilled tokens", "prefill_tokens", ".0f"),
        ("of the limit", "limit_share", ".1%"),
        ("peak GiB", "peak_gib", ".2f"),
    ),
)
AGAIN = "computed_again"


def measure(place: Place) -> Measured:
    options, runs, model = place.options, list[Run](), place.model()
    case = f"{options.sequences} x {options.turns} turns"
    sides: dict[str, Callable[[TurnsJob, str], dict[str, Any]]] = {
        "asyncrl": partial(place.own, "turns"),
        AGAIN: lambda job, label: place.own("turns", job.of(kept_prefix_max_age=0), f"{label}-again"),
    }

    def prepare(dtype: Any, case: str, label: str) -> tuple[TurnsJob, Mapping[str, Any]]:
        job = TurnsJob.asked(options, model=model, prompts=str(place.scratch / "prompts.json"), dtype=dtype)
        rates = place.own("rates", RatesJob(model, dtype, options.threads), label)
        write_token_prompts(job, rates["vocabulary"])
        return job, rates

    for run in figures.pairs(place, product(options.dtypes, [case]), prepare, sides, judge):
        runs.append(run)
        figures.write(place, runs, figures.summarise(runs, SHEET), SHEET)
    entries = figures.summarise(runs, SHEET)
    return Measured(figures.table(entries, SHEET), lambda path: figures.draw(path, entries, SHEET))


def judge(side: str, job: TurnsJob, rates: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    body, head = rates["decoder_parameters"], rates["head_parameters"]
    groups = -(-job.sequences // job.group_size)
    tokens = groups * job.prompt_tokens + job.sequences * (job.turns - 1) * job.tool_tokens + result["tokens"]
    flop = float(2 * (body * tokens + head * result["tokens"]))
    return {
        "tokens": result["tokens"],
        "needed_flop": flop,
        "more": {"prefill_tokens": float(result["prefill_tokens"])},
    }


BENCH = Bench(
    "turns",
    __doc__,
    "tiny random model, 4 episodes of 3 turns",
    (
        option("--sequences", 32, "episodes", 4),
        option("--group-size", 8, "episodes that share their first prompt", 2),
        option("--prompt-tokens", 512, "of every first prompt", 12),
        option("--turns", 4, "requests of every episode", 3),
        option("--max-tokens", 32, "of every reply", 4),
        option("--tool-tokens", 32, "of every tool's answer", 3),
        option("--warmup-tokens", 4, "of each reply of as many episodes, before the clock starts", 2),
        MODEL,
        *run_options("bench_turns"),
    ),
    measure,
)
