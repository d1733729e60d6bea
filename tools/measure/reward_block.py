"""Does a reward that sleeps, or a crash in one, slow decoding down? Medians and 99th percentiles of the decode step.

    python tools/measure reward_block [--rounds 3] [--steps 20] [--sleep 5]

Runs of the quickstart's model take turns: the reward as it is, and one that sleeps `--sleep` seconds in every two-hundredth
call (and one that ends its process, counted as 0). What is compared is the duration of the decode closures on the lane,
over all rounds; the promise is a ratio of the 99th percentiles of at most 1.2. The turns cancel what the machine does
meanwhile; on a busy machine use more rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import numpy as np
from commands import EXAMPLES, machine

from asyncrl import Runtime, load_config

MODELS = Path(__file__).with_name("models.py")


async def decode_ms(reward: str, steps: int) -> list[float]:
    """Durations of the decode closures of one run, the first step (warm-up) left out."""
    overrides = [
        f"reward.functions=[{MODELS}:{reward}]",
        "reward.workers=8",
        "reward.on_error=zero",
        "telemetry.live=off",
        "checkpoint.save_final=false",
        f"train.max_steps={steps}",
    ]
    async with Runtime(load_config([EXAMPLES / "quickstart.yaml"], overrides), write=False) as runtime:
        summary = await runtime.run()
        events = [e for e in runtime.recorder.events() if e.phase == "X" and e.name == "engine/decode"]
    assert summary.version == steps
    return [1e3 * event.duration for event in events[len(events) // steps :] if event.track.startswith("lane:")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=5.0, help="seconds")


def main(options: argparse.Namespace) -> int:
    os.environ["MEASURE_SLEEP_S"] = str(options.sleep)
    print(machine())
    kinds = ("plain", "sleeping", "crashing")
    spans: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            spans[kind] += asyncio.run(decode_ms(kind, options.steps))
    base = np.percentile(spans["plain"], [50, 99])
    for kind in kinds:
        middle, tail = np.percentile(spans[kind], [50, 99])
        print(
            f"{kind:9} {len(spans[kind]):6} decode steps  median {middle:7.3f} ms ({middle / base[0]:.2f}x)"
            f"  p99 {tail:7.3f} ms ({tail / base[1]:.2f}x)"
        )
    return 0
