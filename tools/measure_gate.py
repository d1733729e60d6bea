"""How much of a run's start-up the gate takes: from the start of the process until the run is open.

    python tools/measure_gate.py CONFIG.yaml [a.b=value ...] [--repeat 3]

Each repetition is a process of its own, as a run is. What is printed is a ratio, with the machine beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median


def since_start() -> float:
    """Seconds of this process so far."""
    started = float(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - started


async def measure(files: list[str], overrides: list[str]) -> None:
    from asyncrl import Runtime, load_config

    async with Runtime(load_config(files, overrides), write=False) as runtime:
        verdict = runtime.built.verdict
        assert verdict is not None, "a run without a model has nothing to compare"
        print(json.dumps({"gate_s": verdict.seconds, "open_s": since_start(), "line": verdict.lines()[0]}), flush=True)
        os._exit(0)  # it is open: what follows is not asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", help="configuration files and overrides")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    files = [word for word in options.given if "=" not in word]
    if options.child:
        asyncio.run(measure(files, [word for word in options.given if "=" in word]))
    from asyncrl.telemetry.machine import describe_cpu

    print(f"{describe_cpu()}, load {os.getloadavg()[0]:.1f}")
    found = []
    for _ in range(options.repeat):
        child = subprocess.run(
            [sys.executable, __file__, "--child", *options.given], stdout=subprocess.PIPE, text=True, check=True
        )
        found.append(json.loads(child.stdout.splitlines()[-1]))
        print(f"{found[-1]['gate_s']:.2f} s of {found[-1]['open_s']:.2f} s")
    print(found[-1]["line"])
    print(f"median share: {median(each['gate_s'] / each['open_s'] for each in found):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
