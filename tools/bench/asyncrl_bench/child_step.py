"""`child.py step`: whole RL steps of the real `Runtime`, in the steady state of preset `async`."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import anyio

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.runtime import Runtime

from .job import REWARD, REWARD_FUNCTION, StepJob, new_loop
from .machine import versions
from .peers.side import peak_bytes


def configuration(job: StepJob) -> Config:
    """Everything that is not said here is asyncrl's default."""
    return load_config(
        [],
        [
            "preset=async",
            f"seed={job.seed}",
            f"threads={job.threads}",
            f"model.path={job.model}",
            f"model.dtype={job.dtype}",
            f"model.device={job.device}",
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
    window = Window(job.warmup_steps, job.steps)
    peak = 0
    with anyio.CancelScope() as scope:
        async with Runtime(configuration(job), write=False) as runtime, anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal peak
                async for report in runtime.steps():
                    if window.add(report, runtime.built.ports.engine.statistics().get("tokens", 0.0)):
                        peak = peak_bytes(job.device)  # while the reward workers are still there
                        scope.cancel()

            tasks.start_soon(watch)
            await runtime.run()
    if not peak:
        raise RuntimeError(f"the run ended after {len(window.times)} of {job.warmup_steps + job.steps} steps")
    return {**window.result(), "peak_bytes": peak, "versions": versions("transformers")}


def run_steps(job: StepJob) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(measure_steps(job))
