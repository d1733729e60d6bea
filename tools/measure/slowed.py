"""Steps of a run of which one generating rank is slower than the others, beside steps in which every rank is as fast.

    python tools/measure slowed                         # one of three generating ranks five times slower
    python tools/measure slowed --slower 2 --steps 200

One rank trains and three generate, under torchrun. A dry run's engine waits in place of computing, so two cores are enough. The
slow rank waits longer in each decode step. Two kinds of engines: one that decodes all groups of a rank together at the price of one
(`wide`), and one that decodes one group after the other (`one by one`). Ideal: the speeds of the ranks add up, so a step takes
3 / (2 + 1/5) of the step of three fast ranks. Exit 1 if a step of the default preset takes more than 15 % longer.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from commands import ROOT, TOOLS, command, machine, table

from asyncrl.telemetry.sinks import read_jsonl

RANKS, GROUP_SIZE, ALLOWED = 3, 4, 1.15
ENGINES = {"wide": (), "one by one": (f"engine.max_sequences={GROUP_SIZE}",)}


def settings(folder: Path, preset: str, engine: str, given: argparse.Namespace) -> list[str]:
    text = (
        f"engine.kind=dry_run train.kind=dry_run run.name=run run.dir={folder} preset={preset} train.max_steps={given.steps} "
        f"rollout.groups_per_step={given.groups} rollout.group_size={GROUP_SIZE} rollout.max_tokens=32 data.max_prompt_tokens=64 "
        f"dry_run.decode_step_s={given.decode_s} dry_run.finish_s=0.001 dry_run.length_sigma={given.sigma} "
        f"distributed.roles.train=1 distributed.roles.generate={RANKS} reward.functions={TOOLS}/measure/slowed.py:score "
        "telemetry.live=off telemetry.trace=false telemetry.report=false"
    )
    return [*text.split(), *ENGINES[engine]]


def score(completions: list[str], **columns: object) -> list[float]:
    return [float(len(completion)) for completion in completions]


def rank(slower: str, *words: str) -> None:
    """One rank, in the place of `asyncrl.main`. The last one is slower."""
    own = list(words)
    if os.environ["RANK"] == str(RANKS):
        step_s = next(float(word.partition("=")[2]) for word in words if word.startswith("dry_run.decode_step_s="))
        own.append(f"dry_run.decode_step_s={step_s * float(slower)}")
    sys.argv = ["asyncrl", *own]
    runpy.run_module("asyncrl.main", run_name="__main__", alter_sys=True)


def step_s(slower: float, preset: str, engine: str, given: argparse.Namespace) -> float:
    """The seconds of a step, over the second half of a run."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-slowed-") as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS + 1)]
        words = [str(TOOLS / "measure"), "slowed:rank", str(slower), *settings(Path(folder), preset, engine, given)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launcher, *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        times = [line["time"] for line in read_jsonl(Path(folder) / "run/metrics.jsonl") if "train/groups" in line]
    if given.verbose:
        print([round(b - a, 2) for a, b in pairwise(times)], flush=True)
    late = times[len(times) // 2 :]
    return statistics.fmean(b - a for a, b in pairwise(late))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slower", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--groups", type=int, default=8, help="of a step")
    parser.add_argument("--decode-s", type=float, default=0.02, help="seconds of a decode step of a fast rank")
    parser.add_argument("--sigma", type=float, default=0.3, help="spread of the lengths of completions")
    parser.add_argument("--presets", nargs="+", default=["async", "sync"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--verbose", action="store_true", help="print the seconds of each step")


def main(given: argparse.Namespace) -> int:
    rows, failed = [], False
    for preset in given.presets:
        for engine in given.engines:
            equal, slowed = (step_s(slower, preset, engine, given) for slower in (1.0, given.slower))
            ideal = equal * RANKS / (RANKS - 1 + 1 / given.slower)
            failed |= preset == "async" and slowed > ALLOWED * ideal
            rows.append(
                (preset, engine, *(f"{seconds:.3f}" for seconds in (equal, ideal, slowed)), f"{slowed / ideal:.2f}")
            )
    print(f"`{command()}`, {machine()}\n")
    heads = "preset", "engine", "s a step, three fast ranks", "ideal with a slow one", "measured", "measured / ideal"
    print("\n".join(table(heads, rows)))
    return int(failed)
