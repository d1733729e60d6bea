"""Router replay (R3): how far the trainer's log-probs are from the sampler's, with recorded routes and without.

    python tools/measure replay            # writes tools/results/replay.json and .png; exit 1 if the goal is missed

Two runs of a small Qwen3-MoE (four layers, 32 experts, four a token, random weights) in bfloat16 with float32 masters, alike but
for `algorithm.router_replay`. They are sync, so each token is trained by the very weights that sampled it: what differs is the
order of products, and the experts that rounding tips over. Of every trained token: k3 = exp(d) - d - 1 with d = log-prob of the
training forward - log-prob of the sampler, and whether |d| > ln 2.

Goal: the mean of k3 over the run is with replay at most half of that without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from commands import RESULTS, command, machine

from asyncrl import Runtime, load_config

MODELS = Path(__file__).with_name("models.py")
SETTINGS = {
    "preset": "sync",
    "threads": 1,
    "model.path": f"{MODELS}:experts",
    "model.dtype": "bfloat16",
    "data.train": f"{MODELS}:rows",
    "data.max_prompt_tokens": 12,
    "reward": f"{MODELS}:share",
    "rollout.group_size": 8,
    "rollout.groups_per_step": 2,
    "rollout.max_tokens": 32,
    "rollout.ignore_eos": True,
    "train.lr": 1e-3,
    "algorithm.mismatch_gate": "null",
    "telemetry.live": "off",
    "telemetry.report": False,
}


class Listening:
    """The trainer's forward; of each with gradients it notes how far it is from the sampler, by version."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._parts: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._forward(batch, *args, **kwargs)
        if torch.is_grad_enabled():
            difference = found[0].detach().double().numpy() - batch.sampler_logprobs
            self._parts.setdefault(self.policy.version, []).append(difference)
        return found

    def steps(self) -> list[tuple[float, float]]:
        """(mean k3, share of |d| > ln 2) of the tokens of each step."""
        joined = [np.concatenate(self._parts[version]) for version in sorted(self._parts)]
        return [(float((np.expm1(d) - d).mean()), float((np.abs(d) > math.log(2)).mean())) for d in joined]


async def run(replay: bool, steps: int, folder: str) -> dict[str, Any]:
    """One run, with a number for each of its steps."""
    options = SETTINGS | {"algorithm.router_replay": replay, "train.max_steps": steps, "run.dir": folder}
    given = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    rewards: list[float] = []
    started = time.perf_counter()
    async with Runtime(load_config([], given), write=False) as runtime:
        core: Any = runtime.built.core
        core.forward = heard = Listening(core.forward)

        async def watch() -> None:
            async for report in runtime.steps():
                rewards.append(round(report.metrics["reward/mean"], 4))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            await runtime.run()
    numbers = heard.steps()
    return {
        "router_replay": replay,
        "seconds": round(time.perf_counter() - started, 1),
        "k3": [float(f"{k3:.3g}") for k3, _ in numbers],
        "over_ln2": [round(over, 5) for _, over in numbers],
        "reward": rewards,
        "mean_k3": float(f"{np.mean([k3 for k3, _ in numbers]):.3g}"),
        "mean_over_ln2": float(f"{np.mean([over for _, over in numbers]):.3g}"),
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """k3, the share beyond ln 2 and the reward over training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = {
        "k3": "KL (k3) of trainer and sampler, per token",
        "over_ln2": "share of |d| > ln 2",
        "reward": "reward/mean",
    }
    for axis, (key, title) in zip(axes, names.items(), strict=True):
        for each in runs:
            label = "with router replay" if each["router_replay"] else "without"
            axis.plot(range(1, len(each[key]) + 1), each[key], label=label)
        axis.set(title=title, xlabel="step", yscale="log" if key == "k3" else "linear")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=40)


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = [asyncio.run(run(replay, options.steps, folder)) for replay in (False, True)]
    without, with_replay = (each["mean_k3"] for each in runs)
    record = {
        "date": date.today().isoformat(),
        "command": command(),
        "machine": f"{machine()}, {os.cpu_count()} cores, one thread",
        "ratio": float(f"{with_replay / without:.3g}"),
        "runs": runs,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "replay.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(runs, RESULTS / "replay.png")
    for each in runs:
        print({key: value for key, value in each.items() if not isinstance(value, list)})
    print(f"KL with replay is {with_replay / without:.3f} of that without; at most half is the goal")
    return 0 if with_replay <= 0.5 * without else 1
