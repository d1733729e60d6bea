"""What ten thousand small steps do to the process: memory, full garbage collections, lateness of the event loop.

    python tools/measure_steps.py [--steps 10000] [--out FILE.md] [a.b=value ...]

A model of some thousand parameters trains on the quickstart's task, so that a step takes ten to twenty milliseconds and what a step
leaves behind counts. The trace is limited to 20,000 events, which the first steps fill: memory is compared from a tenth of the
steps on. Exits 1 where it grew by more than `ALLOWED_MIB` since. Lateness means something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent)]

import quickstart_model  # noqa: E402

ALLOWED_MIB = 16.0
OVERRIDES = [
    f"model.path={__file__}:build",
    f"data.train={__file__}:rows",
    "rollout.group_size=2",
    "rollout.groups_per_step=2",
    "rollout.max_tokens=2",
    "telemetry.live=off",
    "telemetry.trace_events=20000",
    "checkpoint.save_final=false",
]


def build(seed: int) -> tuple[Any, Any]:
    return quickstart_model.build(
        seed, 2, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip


def rows() -> list[dict[str, str]]:
    return quickstart_model.rows(512, 0, 2)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
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


async def measure(steps: int, overrides: list[str]) -> list[tuple[int, float, int, float, float, float]]:
    """Ten rows: steps, resident MiB, full collections, their share of the time, the longest of them (ms), largest p99 of the
    lateness of a step since the row before (ms)."""
    from asyncrl import Runtime, load_config  # not above: the reward workers load this file too, and need no torch

    found: list[tuple[int, float, int, float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        given = [*OVERRIDES, f"run.dir={folder}", f"train.max_steps={steps}", *overrides]
        async with Runtime(load_config([EXAMPLES / "quickstart.yaml"], given)) as runtime:
            collections = Collections()
            gc.callbacks.append(collections)
            started, late = time.perf_counter(), 0.0

            async def watch() -> None:
                nonlocal late
                async for step in runtime.steps():
                    late = max(late, step.metrics.get("loop/lag_ms_p99", 0.0))
                    if step.version % (steps // 10) == 0:
                        share = collections.seconds / (time.perf_counter() - started)
                        found.append(
                            (step.version, resident_mib(), collections.count, share, collections.longest, late)
                        )
                        print(row(found[-1]), flush=True)
                        late = 0.0

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch())
                await runtime.run()
            gc.callbacks.remove(collections)
    return found


def row(numbers: tuple[int, float, int, float, float, float]) -> str:
    steps, mib, count, share, longest, late = numbers
    return f"| {steps:,} | {mib:.1f} | {count} | {share:.2%} | {1e3 * longest:.1f} | {late:.1f} |"


HEAD = """\
| steps | resident MiB | full collections | their share of the time | longest, ms of CPU | largest p99 of a step's lateness, ms |
|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(HEAD)
    found = asyncio.run(measure(options.steps, options.overrides))
    grown = found[-1][1] - found[0][1]
    verdict = f"memory grew by {grown:.1f} MiB in the last {found[-1][0] - found[0][0]:,} steps"
    print(verdict)
    if options.out is not None:
        options.out.write_text(
            "\n".join(["# Memory over many small steps", "", HEAD, *map(row, found), "", verdict, ""])
        )
    return int(grown > ALLOWED_MIB)


if __name__ == "__main__":
    sys.exit(main())
