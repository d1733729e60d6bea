"""What runs in asyncrl's own child processes: `python -m asyncrl.cli.bench.child COMMAND ...`, one JSON line at the end.

model NAME DIRECTORY   make the model directory, if it is not there
machine JOB.json       rate of the GEMM in the job's dtype, size of the model, tokens of its prompts
step JOB.json          whole RL steps of the real `Runtime`, in the steady state of preset `async`
train JOB.json         optimizer steps of the real trainer over packed groups (child_train.py)
head JOB.json          memory and time of the head alone (child_head.py)
rates JOB.json         rates of the GEMM and of reading memory, size of the model (child_generate.py)
generate JOB.json      generation by the real embedded engine (child_generate.py)
sweep JOB.json         decode steps at chosen numbers of sequences and contexts (child_generate.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import REWARD, REWARD_FUNCTION, GenerateJob, HeadJob, StepJob, SweepJob, TrainJob

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.pumps.pipeline import StepReport

_GEMM = 2048
_GEMM_SECONDS = 2.0


# -- the machine -------------------------------------------------------------------------------------------------------


def machine(job: StepJob) -> dict[str, Any]:
    return {"gemm_flops": gemm_rate(job.dtype, job.threads), **model_size(job.model), **prompt_tokens(job)}


def gemm_rate(dtype: str, threads: int, seconds: float = _GEMM_SECONDS) -> float:
    """FLOP/s of the product of two 2048 x 2048 matrices, the best of about two seconds of them, and of two at least."""
    import torch

    torch.set_num_threads(threads)
    a = torch.randn(_GEMM, _GEMM).to(getattr(torch, dtype))
    b = torch.randn(_GEMM, _GEMM).to(getattr(torch, dtype))
    out = torch.empty_like(a)
    best, end, done = float("inf"), time.perf_counter() + seconds, 0
    while done < 2 or time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - started)
        done += 1
    return float(2 * _GEMM**3 / best)


def model_size(path: str) -> dict[str, Any]:
    """Parameters of the matrix products of one token: all linear layers without the head, and the head. No allocation."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return {"decoder_parameters": linear - head.weight.numel(), "head_parameters": head.weight.numel()}


def prompt_tokens(job: StepJob) -> dict[str, Any]:
    """Mean and largest length of the rendered prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    rows = [json.loads(line)["prompt"] for line in Path(job.prompts).read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=False) for row in rows]
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return {"prompt_tokens_mean": sum(lengths) / len(lengths), "prompt_tokens_max": max(lengths)}


# -- steps of asyncrl --------------------------------------------------------------------------------------------------


def configuration(job: StepJob) -> Config:
    """Everything that is not said here is asyncrl's default."""
    from asyncrl.config.load import load_config

    return load_config(
        [],
        [
            "preset=async",
            f"seed={job.seed}",
            f"threads={job.threads}",
            f"model.path={job.model}",
            f"model.dtype={job.dtype}",
            "model.device=cpu",
            f"data.train={job.prompts}",
            f"data.max_prompt_tokens={job.max_prompt_tokens}",
            "data.shuffle=false",
            f"reward.functions={REWARD}:{REWARD_FUNCTION}",
            f"rollout.group_size={job.group_size}",
            f"rollout.groups_per_step={job.groups_per_step}",
            f"rollout.max_tokens={job.max_tokens}",
            f"rollout.ignore_eos={str(job.lengths == 'fixed').lower()}",
            f"train.lr={job.lr}",
            "train.max_steps=1000000",  # far away: near the end of a run nothing new is admitted, and steps get faster
            "checkpoint.save_final=false",
            "telemetry.trace=false",
            "telemetry.report=false",
            "telemetry.live=off",
            *job.overrides,
        ],
    )


@dataclass(slots=True)
class Window:
    """The measured steps: from the commit of the last warm-up step to the commit of the last measured one."""

    warmup: int
    steps: int
    times: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)  # tokens sampled by the engine so far, at each commit
    reports: list[StepReport] = field(default_factory=list)

    def add(self, report: StepReport, generated: float) -> bool:
        """True once the last measured step is in."""
        self.times.append(time.perf_counter())
        self.generated.append(generated)
        self.reports.append(report)
        took = self.times[-1] - self.times[-2] if len(self.times) > 1 else float("nan")
        print(f"step {len(self.times)}: {took:.1f} s", file=sys.stderr, flush=True)
        return len(self.times) == self.warmup + self.steps

    def result(self) -> dict[str, Any]:
        first = self.warmup - 1  # the warm-up step whose commit starts the clock
        measured = self.reports[first + 1 :]
        groups = [group for report in measured for group in report.groups]
        seconds = [self.times[i + 1] - self.times[i] for i in range(first, len(self.times) - 1)]
        shares: dict[str, float] = {}
        for report, took in zip(measured, seconds, strict=True):
            for name, value in report.metrics.items():
                if name.startswith(("busy/", "idle/")):
                    shares[name] = shares.get(name, 0.0) + value * took / sum(seconds)
        return {
            "seconds": sum(seconds),
            "step_seconds": seconds,
            "steps": self.steps,
            "sampled_tokens": sum(int(t.mask.sum()) for group in groups for t in group.trajectories),
            "generated_tokens": int(self.generated[-1] - self.generated[first]),
            "prompt_tokens": sum(int(group.prompt.ids.size) for group in groups),
            "sequences": sum(len(group.trajectories) for group in groups),
            "shares": shares,
            "staleness_max": max(report.metrics.get("staleness/max", 0.0) for report in measured),
        }


async def measure_steps(job: StepJob) -> dict[str, Any]:
    """Leaves the run by cancellation, as Ctrl-C does: its tail, which generates nothing new, is not part of the figures."""
    import anyio

    from asyncrl.models.native import library as native
    from asyncrl.runtime.runtime import Runtime

    window = Window(job.warmup_steps, job.steps)
    peak = 0
    with anyio.CancelScope() as scope:
        async with Runtime(configuration(job), write=False) as runtime, anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal peak
                async for report in runtime.steps():
                    if window.add(report, runtime.built.rooms.engine.statistics().get("tokens", 0.0)):
                        peak = peak_bytes()  # while the reward workers are still there
                        scope.cancel()

            tasks.start_soon(watch)
            await runtime.run()
    if not peak:
        raise RuntimeError(f"the run ended after {len(window.times)} of {job.warmup_steps + job.steps} steps")
    versions = {name: metadata.version(name) for name in ("torch", "transformers")} | {"kernels": native.build()}
    return {**window.result(), "peak_bytes": peak, "versions": versions}


def peak_bytes() -> int:
    """Largest resident memory of this process and its children, each at its own peak.

    Not `ru_maxrss`: Linux hands the parent's peak down at the fork, so a small child of a large parent looks large.
    A child counts with the pages that it shares (the interpreter's), so the sum is a little too large.
    """
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended: its children went to another one
            children += [int(pid) for pid in (task / "children").read_text().split()]
    total = 0
    for pid in (os.getpid(), *children):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                total += int(line.split()[1]) * 1024
    return total


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed, as `asyncrl run`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run_steps(job: StepJob) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(measure_steps(job))


def answer(command: str, file: Path, made: str | None) -> dict[str, Any] | None:
    """What a command says; None for an unknown one. `made`: the model of the job has this name and may have to be made."""
    kinds: dict[str, Any] = {
        "train": TrainJob, "head": HeadJob, "rates": GenerateJob, "generate": GenerateJob, "sweep": SweepJob
    }  # fmt: skip
    job: Any = kinds.get(command, StepJob).read(file)
    if made is not None:
        from .models import make_model

        make_model(made, Path(job.model))
    if command == "machine":
        return machine(job)
    if command == "step":
        return run_steps(job)
    if command == "train":
        from .child_train import run_training

        return run_training(job)
    if command == "head":
        from .child_head import run_head

        return run_head(job)
    if command in ("rates", "generate", "sweep"):
        from . import child_generate

        if command == "rates":
            return child_generate.rates(job)
        return child_generate.run_generation(job) if command == "generate" else child_generate.run_sweep(job)
    return None


def main(arguments: Sequence[str]) -> int:
    command, file, *made = arguments
    found = answer(command, Path(file), made[0] if made else None)
    if found is None:
        print(f"unknown command {command!r}", file=sys.stderr)
        return 2
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
