"""Does a reward that sleeps, or a crash in one, slow decoding down? Medians and 99th percentiles of the decode step.

    python tools/measure_reward_block.py [--rounds 3] [--steps 20] [--sleep 5]

Runs of the quickstart's model take turns: the reward as it is, and one that sleeps `--sleep` seconds in every two-hundredth
call (and one that ends its process, counted as 0). What is compared is the duration of the decode closures on the lane,
over all rounds; the promise is a ratio of the 99th percentiles of at most 1.2. The turns cancel what the machine does
meanwhile; on a busy machine use more rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent)]

import quickstart_model  # noqa: E402


def plain(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    return quickstart_model.reward(prompts, completions, completion_ids, answer)


def _seldom(prompts: Any, completions: Any) -> bool:
    return hash((str(prompts), str(completions))) % 200 == 0


def sleeping(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    if _seldom(prompts, completions):
        time.sleep(float(os.environ["MEASURE_SLEEP_S"]))
    return plain(prompts, completions, completion_ids, answer)


def crashing(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    if _seldom(prompts, completions):
        os._exit(3)
    return plain(prompts, completions, completion_ids, answer)


async def decode_ms(reward: str, steps: int) -> list[float]:
    """Durations of the decode closures of one run, the first step (warm-up) left out."""
    from asyncrl import Runtime, load_config  # not above: the reward workers load this file too, and need no torch

    overrides = [
        f"reward.functions=[{__file__}:{reward}]",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    os.environ["MEASURE_SLEEP_S"] = str(options.sleep)
    from asyncrl.telemetry.machine import describe_cpu

    print(f"{describe_cpu()}, load {os.getloadavg()[0]:.1f}")
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


if __name__ == "__main__":
    main()
