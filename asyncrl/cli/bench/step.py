"""`asyncrl bench step`: whole RL steps of asyncrl (preset `async`, steady state) against TRL's `GRPOTrainer`.

    for each repetition, for each case (dtype x lengths):   GEMM rate  ->  asyncrl  ->  TRL      each in a fresh process

so that the sides alternate and a machine that gets slower slows both. The order of the two sides turns with every repetition. The
JSON is written after every run: what was measured is kept if a later run fails or is interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import report, shares
from .job import MODELS, PEERS, BenchError, StepJob, cache_directory, write_prompts
from .processes import environment, run_child, run_json, trl_python
from .report import Machine, Run
from .shares import positive

_PLACES = ("--trl-python", "--cache", "--out")
_QUICK: dict[str, Any] = {
    "model": "tiny", "prompts": 2, "group_size": 2, "max_tokens": 8, "steps": 3, "warmup_steps": 1, "repetitions": 1,
    "dtypes": "float32", "lengths": "natural", "peer": "none", "threads": 1,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "model": "smollm2", "prompts": 8, "group_size": 8, "max_tokens": 128, "steps": 6, "warmup_steps": 3, "repetitions": 3,
    "dtypes": "float32,bfloat16", "lengths": "natural,fixed", "peer": "trl", "threads": 2,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench step", allow_abbrev=False, description=__doc__.partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="smoke test: tiny random model, 2 prompts x 2 x 8 tokens, asyncrl alone")
    add("--prompts", type=positive, help="prompts per step (8)")
    add("--group-size", type=positive, help="completions per prompt (8)")
    add("--max-tokens", type=positive, help="longest completion (128)")
    add("--lengths", help="natural,fixed: until the end-of-sequence token, or always --max-tokens")
    add(
        "--steps",
        type=positive,
        help="measured steps of a run of asyncrl; take a multiple of 3, the slots turn over then (6)",
    )
    add("--warmup-steps", type=positive, help="steps before them, until the pipeline is in its steady state (3)")
    add("--trl-steps", type=positive, default=1, help="measured steps of a run of TRL (1; minutes each)")
    add("--trl-warmup-steps", type=int, default=1, help="steps before them (1)")
    add("--trl-microbatch", type=positive, default=16, help="TRL's per_device_train_batch_size (16)")
    add(
        "--trl-float32-masters",
        action="store_true",
        help="bfloat16 of TRL: float32 weights under autocast, as asyncrl's masters are",
    )
    add("--trl-gradient-checkpointing", action="store_true", help="TRL's own default; slower, less memory. Off here")
    shares.common_options(
        parser,
        "bench_step",
        dtypes="which of them. bfloat16 of asyncrl keeps float32 masters; TRL's with --trl-float32-masters",
        repetitions="alternating runs of each side; medians are shown (3)",
        without_trl="asyncrl alone",
    )
    add("overrides", nargs="*", metavar="a.b=c", help="settings of asyncrl's side, after the job's own")
    return parser


def public_command(arguments: Sequence[str]) -> str:
    """What is written beside the figures: without the options that only name places on this machine."""
    return shares.public_command("step", arguments, _PLACES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options with `--quick` or the defaults filled in. Exits with 2 and a sentence where they make no sense."""
    complain = parser()
    given = complain.parse_intermixed_args(arguments)
    options = shares.fill(complain, given, _QUICK if given.quick else _DEFAULTS, lengths=("natural", "fixed"))
    if options.trl_warmup_steps < 0:
        complain.error("--trl-warmup-steps: at least 0")
    sequences = options.prompts * options.group_size
    options.trl_microbatch = min(options.trl_microbatch, sequences)
    if sequences % options.trl_microbatch:
        complain.error(f"--trl-microbatch {options.trl_microbatch} does not divide {sequences} sequences")
    return options


@dataclass(slots=True)
class StepBench:
    """One call of the tool. `scratch` holds the jobs and the logs of its runs."""

    options: argparse.Namespace
    command: str
    scratch: Path
    cache: Path
    runs: list[Run] = field(default_factory=list)

    def measure(self) -> list[dict[str, Any]]:
        """All runs; the summary. Errors: `BenchError`; what was measured until then is in the JSON."""
        options = self.options
        peer = trl_python(options.trl_python, self.cache) if options.peer == "trl" else None
        job = self._job()
        cases = [(dtype, lengths) for dtype in options.dtypes for lengths in options.lengths]
        for repetition in range(options.repetitions):
            for dtype, lengths in cases:
                self._pair(job.of(dtype=dtype, lengths=lengths), repetition, peer)
        return report.summarise(self.runs)

    def _job(self) -> StepJob:
        options = self.options
        known = options.model in MODELS
        model = self.cache / "models" / options.model if known else Path(options.model).absolute()
        prompts = write_prompts(self.scratch / "prompts.jsonl", seed=0, distinct=options.prompts)
        return StepJob(
            model=str(model),
            prompts=str(prompts),
            groups_per_step=options.prompts,
            group_size=options.group_size,
            max_tokens=options.max_tokens,
            max_prompt_tokens=1,  # known once the tokenizer has seen the prompts
            dtype=options.dtypes[0],
            lengths=options.lengths[0],
            threads=options.threads,
            warmup_steps=options.warmup_steps,
            steps=options.steps,
            overrides=tuple(options.overrides),
            gradient_checkpointing=options.trl_gradient_checkpointing,
            float32_masters=options.trl_float32_masters,
            microbatch=options.trl_microbatch,
        )

    def _pair(self, job: StepJob, repetition: int, peer: Path | None) -> None:
        """Both sides of one case, one after the other."""
        label = f"{job.dtype}-{job.lengths}-{repetition}"
        made = [self.options.model] if self.options.model in MODELS else []  # the first call makes it
        file = job.write(self.scratch / f"machine-{label}.json")
        machine = Machine(**self._child(["machine", file, *made], f"machine-{label}"))
        job = job.of(max_prompt_tokens=machine.prompt_tokens_max)
        sides = ["asyncrl"] if peer is None else ["asyncrl", "trl"]
        for side in sides if repetition % 2 == 0 else reversed(sides):
            self._say(f"{side}: {job.dtype}, {job.lengths} lengths, repetition {repetition + 1}")
            if side == "asyncrl":
                result = self._child(["step", job.write(self.scratch / f"asyncrl-{label}.json")], f"asyncrl-{label}")
            else:
                assert peer is not None
                result = self._trl(job, label, peer)
            self.runs.append(Run(side, job.dtype, job.lengths, repetition, result, machine))
            figures = self.runs[-1].figures()
            self._say(f"  {figures['tokens_per_s']:.1f} sampled tokens/s, {figures['seconds_per_step']:.1f} s a step")
            self.write()

    def _child(self, arguments: Sequence[str | Path], label: str) -> dict[str, Any]:
        options = self.options
        log = self.scratch / f"{label}.log"
        return run_child(arguments, threads=options.threads, log=log, timeout_s=options.timeout)

    def _trl(self, job: StepJob, label: str, python: Path) -> dict[str, Any]:
        options = self.options
        job = job.of(steps=options.trl_steps, warmup_steps=options.trl_warmup_steps)
        return run_json(
            [python, PEERS / "trl_step.py", job.write(self.scratch / f"trl-{label}.json")],
            environment=environment(options.threads, package=False),
            log=self.scratch / f"trl-{label}.log",
            timeout_s=options.timeout,
        )

    def write(self) -> Path:
        options = {
            key: value for key, value in vars(self.options).items() if f"--{key}".replace("_", "-") not in _PLACES
        }
        content = report.document(self.runs, report.summarise(self.runs), {**options, "command": self.command})
        path = Path(self.options.out) / f"{self.options.name}.json"
        report.write_json(path, content)
        return path

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    cache = cache_directory(options.cache)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
    bench = StepBench(options, public_command(arguments), scratch, cache)
    try:
        entries = bench.measure()
    except BenchError as error:
        print(f"asyncrl bench: {error}", file=sys.stderr)  # the scratch folder stays: the message names a log in it
        return 1
    print(report.table(entries))
    written = bench.write()
    plot = written.with_suffix(".png")
    also = f" and {plot}" if report.write_plot(plot, entries) else ""
    print(f"\nwritten: {written}{also}")
    shutil.rmtree(scratch, ignore_errors=True)
    return 0
