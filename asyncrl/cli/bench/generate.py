"""`asyncrl bench generate`: generation alone by the embedded engine, against vLLM on the CPU (`--peer vllm`).

    for each repetition, for each case (dtype x job):   GEMM rate  ->  asyncrl  ->  vLLM      each in a fresh process

The order of the sides turns with every repetition. Completions have a fixed length; groups share a prompt; every sequence is
handed over at once. Needed FLOP: 2 per parameter and sampled token, and the body once per group's prompt. `--sweep` measures
decode steps instead, by sequences and context (sweep.py). The JSON is written after every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report, shares, sweep
from .job import PEERS, GenerateJob, write_token_prompts
from .processes import run_json, vllm_environment, vllm_python
from .shares import Place, Run, positive

_QUICK: dict[str, Any] = {
    "model": "tiny", "jobs": "4x6", "group_size": 2, "prompt_tokens": 8, "warmup_tokens": 2, "repetitions": 1,
    "dtypes": "float32", "threads": 1, "sequences": "1,2", "contexts": "16,32", "steps": 2,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "model": "smollm2", "jobs": "64x128,16x512", "group_size": 8, "prompt_tokens": 48, "warmup_tokens": 8,
    "repetitions": 3, "dtypes": "float32,bfloat16", "threads": 2, "sequences": "1,8,64,256",
    "contexts": "128,256,512,1024,2048,4096", "steps": 5,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench generate", allow_abbrev=False, description=__doc__.partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="smoke test: tiny random model, 4 sequences x 6 tokens")
    add("--jobs", help="64x128,16x512: sequences x tokens of each")
    add("--group-size", type=positive, help="sequences that share a prompt (8)")
    add("--prompt-tokens", type=positive, help="of every prompt (48)")
    add("--warmup-tokens", type=positive, help="of each of as many sequences, before the clock starts (8)")
    add("--peer", choices=("vllm", "none"), default="none", help="vllm, or asyncrl alone (none)")
    add(
        "--vllm-python",
        help="interpreter or folder of an existing environment with vLLM; else one is made in the cache",
    )
    add("--sweep", action="store_true", help="decode steps by sequences and context instead; asyncrl alone")
    add("--sequences", help="of the sweep: 1,8,64,256")
    add("--contexts", help="of the sweep: 128,256,512,1024,2048,4096")
    add("--steps", type=positive, help="of the sweep: measured steps of a cell; their median counts (5)")
    add(
        "--cache-gib",
        type=float,
        default=8.0,
        help="of the sweep: cells whose keys and values need more are left out (8)",
    )
    shares.common_options(parser, "bench_generate")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    complain = parser()
    given = complain.parse_args(arguments)
    options = shares.fill(complain, given, _QUICK if given.quick else _DEFAULTS)
    options.jobs = tuple(_pair(complain, part) for part in options.jobs.split(","))
    for name in ("sequences", "contexts"):
        values = [part.strip() for part in getattr(options, name).split(",")]
        if bad := [part for part in values if not part.isdecimal() or int(part) < 1]:
            complain.error(f"--{name}: {bad[0]!r} is not a number of at least 1")
        setattr(options, name, tuple(sorted({int(part) for part in values})))
    if options.sweep and options.peer != "none":
        complain.error("--sweep measures asyncrl alone: leave --peer out")
    if options.sweep and options.name == "bench_generate":
        options.name = "bench_decode"
    return options


def _pair(complain: argparse.ArgumentParser, text: str) -> tuple[int, int]:
    sequences, _, tokens = text.strip().partition("x")
    if not (sequences.isdecimal() and tokens.isdecimal() and int(sequences) and int(tokens)):
        complain.error(f"--jobs: {text!r} is not SEQUENCESxTOKENS, as in 64x128")
    return int(sequences), int(tokens)


def measure(place: Place, command: str) -> str:
    """All runs, and the tables. Errors: `BenchError`; what was measured until then is in the JSON."""
    options, runs = place.options, list[Run]()
    peer = vllm_python(options.vllm_python, place.cache) if options.peer == "vllm" else None
    written = Path()
    for repetition in range(options.repetitions):
        for dtype in options.dtypes:
            for sequences, tokens in options.jobs:
                for run in _pair_of_runs(place, _job(place, dtype, sequences, tokens), repetition, peer):
                    runs.append(run)
                    figures = run.figures()
                    place.say(
                        f"  {figures['tokens_per_s']:.1f} tokens/s, {figures['limit_share']:.1%} of the GEMM rate"
                    )
                    written = _write(options, command, runs)
    entries = shares.summarise(runs)
    plot = written.with_suffix(".png")
    also = f" and {plot}" if report.write_plot(plot, entries, "tokens/s, generation alone") else ""
    return f"{shares.table(entries, 'tokens')}\n\nwritten: {written}{also}"


def _job(place: Place, dtype: Any, sequences: int, tokens: int) -> GenerateJob:
    options = place.options
    return GenerateJob(
        model=str(place.model),
        prompts=str(place.scratch / f"prompts-{sequences}.json"),
        sequences=sequences,
        group_size=options.group_size,
        prompt_tokens=options.prompt_tokens,
        max_tokens=tokens,
        dtype=dtype,
        threads=options.threads,
        warmup_tokens=options.warmup_tokens,
    )


def _pair_of_runs(place: Place, job: GenerateJob, repetition: int, peer: Path | None) -> Any:
    """Yields each side's run as soon as it is done."""
    case = f"{job.sequences} x {job.max_tokens}"
    label = f"{job.dtype}-{job.sequences}x{job.max_tokens}-{repetition}"
    file = job.write(place.scratch / f"{label}.json")
    rates = place.child("rates", file, f"rates-{label}")
    write_token_prompts(Path(job.prompts), job, rates["vocabulary"])
    sides = ["asyncrl"] if peer is None else ["asyncrl", "vllm"]
    for side in sides if repetition % 2 == 0 else reversed(sides):
        place.say(f"{side}: {job.dtype}, {case}, repetition {repetition + 1}")
        if side == "asyncrl":
            result = place.child("generate", file, f"asyncrl-{label}")
        else:
            result = run_json(
                [str(peer), PEERS / "vllm_generate.py", file],
                environment=vllm_environment(job.threads),
                log=place.scratch / f"vllm-{label}.log",
                timeout_s=place.options.timeout,
            )
        yield Run(
            side=side,
            dtype=job.dtype,
            case=case,
            repetition=repetition,
            seconds=result["seconds"],
            tokens=result["tokens"],
            needed_flop=needed_flop(job, rates, result["tokens"]),
            gemm_flops=rates["gemm_flops"],
            peak_bytes=result["peak_bytes"],
            result=result,
        )


def needed_flop(job: GenerateJob, rates: dict[str, Any], tokens: int) -> float:
    body, head = rates["decoder_parameters"], rates["head_parameters"]
    groups = -(-job.sequences // job.group_size)
    return 2.0 * (body * (tokens + groups * job.prompt_tokens) + head * tokens)


def _write(options: argparse.Namespace, command: str, runs: Sequence[Run]) -> Path:
    path = Path(options.out) / f"{options.name}.json"
    report.write_json(path, shares.document("generate", runs, vars(options), command))
    return path


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    command = shares.public_command("generate", arguments)
    chosen = sweep.measure if options.sweep else measure
    return shares.call(options, lambda place: chosen(place, command))
