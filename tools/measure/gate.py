"""How much of a run's start-up the gate takes: from the start of the process until the run is open.

    python tools/measure gate CONFIG.yaml [a.b=value ...] [--repeat 3]

Each repetition is a process of its own, as a run is. What is printed is a ratio, with the machine beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
from pathlib import Path
from statistics import median

from commands import machine, split, start


def since_start() -> float:
    """Seconds of this process so far."""
    started = float(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - started


def child(*given: str) -> None:
    from asyncrl import Runtime, load_config

    async def measure() -> None:
        async with Runtime(load_config(*split(given)), write=False) as runtime:
            verdict = runtime.built.verdict
            assert verdict is not None, "a run without a model has nothing to compare"
            found = {"gate_s": verdict.seconds, "open_s": since_start(), "line": verdict.lines()[0]}
            print(json.dumps(found), flush=True)
            os._exit(0)  # it is open: what follows is not asked

    asyncio.run(measure())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("given", nargs="+", help="configuration files and overrides")
    parser.add_argument("--repeat", type=int, default=3)


def main(options: argparse.Namespace) -> int:
    print(machine())
    shares = []
    for _ in range(options.repeat):
        out, _ = start(__name__, "child", *options.given, stdout=subprocess.PIPE, text=True).communicate()
        found = json.loads(out.splitlines()[-1])
        shares.append(found["gate_s"] / found["open_s"])
        print(f"{found['gate_s']:.2f} s of {found['open_s']:.2f} s; {found['line']}", flush=True)
    print(f"median share: {median(shares):.1%}")
    return 0
