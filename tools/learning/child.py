"""One worker of the learning comparison: a job per line on stdin, a result per line on stdout, until stdin ends.

    {"overrides": ["algorithm.loss=dapo", ...], "wrong_clip": null, "stop_at": 0.8, "needs_clip": true}

A run ends early once the mean reward of five steps has reached `stop_at` (and something was clipped, where `needs_clip`);
with `stop_at` null it runs through.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import torch

from asyncrl import Runtime, load_config
from asyncrl.algorithms import registry
from asyncrl.algorithms.base import LossInputs
from asyncrl.algorithms.losses import Dapo, Surrogate

TASK = Path(__file__).with_name("task.yaml")
WINDOW = 5
KEPT = {"reward": "reward/mean", "clip": "clip_ratio/region_mean", "age": "staleness/max", "kl": "mismatch_kl/mean"}


class WrongSign(Dapo):
    """`dapo` whose clipped half has the wrong sign: `-min(r A, -clip(r) A)`."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        right, advantage_S = super().surrogate(inputs), inputs.advantage_S
        bounded_S = right.ratio_S.clamp(1 - self.epsilon, 1 + self.high)
        return replace(right, loss_S=-torch.minimum(right.ratio_S * advantage_S, -bounded_S * advantage_S))


class WrongBounds(Dapo):
    """`dapo`, written as the one-sided clip, with its two bounds exchanged: good tokens are held at `1 - epsilon`."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        right, advantage_S = super().surrogate(inputs), inputs.advantage_S
        low_S, high_S = right.ratio_S.clamp(max=1 - self.epsilon), right.ratio_S.clamp(min=1 + self.high)
        return replace(right, loss_S=-torch.where(advantage_S > 0, low_S, high_S) * advantage_S)


WRONG: dict[str, type[Dapo]] = {"sign": WrongSign, "bounds": WrongBounds}


@contextmanager
def spoilt(name: str | None) -> Iterator[None]:
    """`dapo` with a wrong clip in its place inside the block."""
    right = registry.LOSSES["dapo"]
    if name is not None:
        registry.LOSSES["dapo"] = WRONG[name]
    try:
        yield
    finally:
        registry.LOSSES["dapo"] = right


async def run(job: dict[str, Any]) -> dict[str, Any]:
    started, cpu = time.perf_counter(), cpu_seconds()
    curves: dict[str, list[float]] = {name: [] for name in KEPT}
    reached: int | None = None

    async def watch(runtime: Runtime, scope: anyio.CancelScope) -> None:
        nonlocal reached
        async for step in runtime.steps():
            for name, metric in KEPT.items():
                if metric in step.metrics:
                    curves[name].append(round(step.metrics[metric], 5))
            last = curves["reward"][-WINDOW:]
            learned = job["stop_at"] is not None and len(last) == WINDOW and sum(last) / WINDOW >= job["stop_at"]
            if learned and (not job["needs_clip"] or any(curves["clip"])):
                reached = len(curves["reward"])
                scope.cancel()  # the step in progress is aborted, and the run ends in order
                return

    with anyio.CancelScope() as scope, spoilt(job["wrong_clip"]):
        async with Runtime(load_config([TASK], job["overrides"]), write=False) as runtime:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, runtime, scope)
                await runtime.run()
    seconds, spent = time.perf_counter() - started, cpu_seconds() - cpu
    return {"reached": reached, "seconds": round(seconds, 2), "cpu_seconds": round(spent, 2), **curves}


def cpu_seconds() -> float:
    """Of this process and of the children that it has waited for (the reward workers)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(json.loads(line)))), flush=True)
        gc.collect()  # a run's rooms refer to each other: left alone they go much later
