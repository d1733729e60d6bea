"""What very many small steps do to the process: memory, full garbage collections, lateness of the event loop; and to the disk.

    python tools/measure steps [--dry] [--steps 10000] [--folder DIR] [--out FILE.md] [a.b=value ...]

A model of some thousand parameters trains on the quickstart's task, so that a step takes ten to twenty milliseconds and what a step
leaves behind counts. `--dry`: without a model, one group a step; a million steps take an hour then, and gigabytes of disk.

The trace is limited to 20,000 events, which the first steps fill, and `RunSummary.history` to 2,000 lines. Memory is compared
from a tenth of the steps on: of fewer than 20,000 the history is part of what grows. Exits 1 where it grew by more than
`ALLOWED_MIB` since. Lateness means something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from commands import EXAMPLES, command, machine, table

from asyncrl import Runtime, load_config
from asyncrl.config.schema import Config

MODELS = Path(__file__).with_name("models.py")
ALLOWED_MIB = 16.0
OVERRIDES = [
    f"model.path={MODELS}:tiny",
    f"data.train={MODELS}:tiny_rows",
    "rollout.group_size=2",
    "rollout.groups_per_step=2",
    "rollout.max_tokens=2",
    "telemetry.live=off",
    "telemetry.trace_events=20000",
    "checkpoint.save_final=false",
]
DRY = [
    "engine.kind=dry_run",
    "train.kind=dry_run",
    "dry_run.decode_step_s=0",
    "dry_run.train_token_s=0",
    "dry_run.finish_s=0",
    "rollout.groups_per_step=1",
    "reward.functions=[]",
    "telemetry.rollouts_per_step=0",  # else a file a step
]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Collections:
    """Full collections of this process: how many, and their seconds (of the thread that made them, not of the clock)."""

    def __init__(self) -> None:
        self.count, self.seconds, self.longest = 0, 0.0, 0.0
        self._started = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._started = time.thread_time()
            return
        took = time.thread_time() - self._started
        self.count, self.seconds, self.longest = self.count + 1, self.seconds + took, max(self.longest, took)


@dataclass(frozen=True, slots=True)
class Row:
    """After so many steps. `cpu_s` and `late_ms` are of the steps since the row before."""

    steps: int
    mib: float  # resident
    blocks: int  # of Python's own allocator
    collections: int  # full ones
    share: float  # of the time, that they took
    longest_s: float
    cpu_s: float  # of this process, a step
    late_ms: float  # largest p99 of a step's lateness

    def __str__(self) -> str:
        shares = f"{self.share:.2%} | {1e3 * self.longest_s:.1f} | {1e3 * self.cpu_s:.2f} | {self.late_ms:.1f}"
        return f"| {self.steps:,} | {self.mib:.1f} | {self.blocks:,} | {self.collections} | {shares} |"


COLUMNS = "steps;resident MiB;blocks of Python's allocator;full collections;their share of the time;longest, ms of CPU"
HEAD = [*table([*COLUMNS.split(";"), "CPU of a step, ms", "largest p99 of a step's lateness, ms"], ())]


async def measure(config: Config) -> list[Row]:
    """Ten rows, printed as they come."""
    steps = config.train.max_steps
    assert steps is not None
    found: list[Row] = []
    async with Runtime(config) as runtime:
        collections = Collections()
        gc.callbacks.append(collections)
        started, late, cpu = time.perf_counter(), 0.0, time.process_time()

        async def watch() -> None:
            nonlocal late, cpu
            async for step in runtime.steps():
                late = max(late, step.metrics.get("loop/lag_ms_p99", 0.0))
                if step.version % (steps // 10) == 0:
                    share = collections.seconds / (time.perf_counter() - started)
                    took, cpu = (time.process_time() - cpu) / (steps // 10), time.process_time()
                    kept = resident_mib(), sys.getallocatedblocks()
                    collected = collections.count, share, collections.longest
                    found.append(Row(step.version, *kept, *collected, took, late))
                    print(found[-1], flush=True)
                    late = 0.0

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            await runtime.run()
        gc.callbacks.remove(collections)
    return found


def files(folder: Path) -> list[str]:
    """What a run left, a line for each file or directory."""
    lines = []
    for path in sorted(folder.glob("*/*")):
        inside = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        lines.append(
            f"| `{path.name}` | {len(inside):,} | {sum(each.stat().st_size for each in inside) / 2**20:,.2f} |"
        )
    return ["| left on disk | files | MiB |", "|---|---|---|", *lines]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--dry", action="store_true", help="without a model")
    parser.add_argument("--folder", type=Path, help="where the run lies; a temporary one by default")
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = [*OVERRIDES, *(DRY if options.dry else ()), f"run.dir={folder}", f"train.max_steps={options.steps}"]
        config = load_config([EXAMPLES / "quickstart.yaml"], [*given, *options.overrides])
        print(machine(), *HEAD, sep="\n")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `asyncrl run` has it
            found = runner.run(measure(config))
        left = files(Path(folder))
    first, last = found[0], found[-1]
    grown = last.mib - first.mib
    verdict = f"memory grew by {grown:.1f} MiB in the last {last.steps - first.steps:,} steps"
    print("\n".join(["", *left, "", verdict]))
    if options.out is not None:
        title = f"# Memory over {'many dry' if options.dry else 'many small'} steps"
        where = f"{time.strftime('%Y-%m-%d')}, `{command()}`, {machine()}"
        lines = [title, "", where, "", *HEAD, *map(str, found), "", *left, "", verdict, ""]
        options.out.write_text("\n".join(lines), encoding="utf-8")
    return int(grown > ALLOWED_MIB)
