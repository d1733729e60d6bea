"""What attacked runs train, and one rank of a run that meets a fault: `phases` starts it in the place of `asyncrl.main`.

FAULT      a name of FAULTS
FAULT_AT   "stage TEXT": when a stage of the start or of the end begins whose name begins so; "version N": when weights N are
           there, before anything of them is written
FAULT_RANK the rank that meets it
FAULT_MET  a file that is made just before

FAULT=record makes none: it writes every moment that comes into that file, one a line.

An attacked run lives for a few steps: the quickstart's warm-up would be most of its CPU time, so `build` makes its model smaller
and without that.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
if sys.path[0] == str(Path(__file__).parent):
    del sys.path[0]  # else torch would find http.py of this folder
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import quickstart_model  # noqa: E402

from asyncrl import Hooks  # noqa: E402
from asyncrl.concurrency.lane import ThreadLane  # noqa: E402
from asyncrl.runtime.opened import OpenRun  # noqa: E402
from asyncrl.runtime.progress import Stages  # noqa: E402

FOR_EVER_S = 100_000
fault, moment, rank, file = (os.environ.get(f"FAULT{name}", "") for name in ("", "_AT", "_RANK", "_MET"))
met = Path(file)
mine = os.environ.get("RANK", "0") == rank
quickstart_model.warm_up = lambda *_: None


def build(seed: int) -> tuple[Any, Any]:
    return quickstart_model.build(seed, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)


async def wait_for_gate(prompt: Any) -> None:
    """From the second step on, until the tool has made the file NODES_GATE."""
    while prompt.group_id >= 4 and not os.path.exists(os.environ["NODES_GATE"]):  # noqa: ASYNC110, ASYNC240  # of the tool
        await asyncio.sleep(0.05)


gated = Hooks(before_group=wait_for_gate)


def block() -> None:
    time.sleep(FOR_EVER_S)


def block_the_lane() -> None:
    """What a lane is given from now on never returns."""
    submit = ThreadLane._submit
    ThreadLane._submit = lambda self, fn, name, priority: submit(self, block, name, priority)  # type: ignore[method-assign]


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def planted_error() -> None:
    raise RuntimeError("a planted error")


def children(number: int) -> None:
    for child in psutil.Process().children(recursive=True):
        child.send_signal(number)


def full_disk() -> None:
    """No file grows any more, in shared memory neither; only what the run says still gets into its log."""
    cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0)  # ends with this process
    assert cat.stdin is not None
    for number in (1, 2):
        os.dup2(cat.stdin.fileno(), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def no_descriptors() -> None:
    """None beside those that are open."""
    most = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, most + 1))


def output_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)


def names_gone() -> None:
    """What this process named in shared memory has no name any more."""
    for name in os.listdir("/dev/shm"):
        if str(os.getpid()) in name:
            os.unlink(f"/dev/shm/{name}")


def cancelled() -> None:
    """One task inside of the run."""
    others = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    pumps = [each for each in others if "pump" in each.get_name()]
    random.Random(moment).choice(sorted(pumps, key=lambda each: each.get_name())).cancel()


def signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], None]] = {
    "blocks": block,
    "lane blocks": block_the_lane,
    "holds the GIL": hold_the_gil,
    "raises": planted_error,
    "SIGKILL": signalled(signal.SIGKILL),
    "SIGSTOP": signalled(signal.SIGSTOP),
    "SIGTERM": signalled(signal.SIGTERM),
    "SIGINT": signalled(signal.SIGINT),
    "SIGHUP": signalled(signal.SIGHUP),
    "children killed": lambda: children(signal.SIGKILL),
    "children stopped": lambda: children(signal.SIGSTOP),
    "disk full": full_disk,
    "no descriptors": no_descriptors,
    "output gone": output_gone,
    "names gone": names_gone,
    "task cancelled": cancelled,
    "weights NaN": lambda: None,  # `at_version` has the weights
}

begin, at_version = Stages.begin, OpenRun._at_version


def reached(now: str, exactly: bool) -> bool:
    """True: this is the moment, for the first time."""
    if fault == "record":
        with met.open("a", encoding="utf-8") as lines:
            lines.write(now + "\n")
    if not mine or met.exists() or not (now == moment if exactly else now.startswith(moment)):
        return False
    met.touch()
    return True


def beginning(self: Stages, text: str) -> None:
    begin(self, text)
    if reached(f"stage {text}", False):
        FAULTS[fault]()


async def arriving(self: OpenRun, version: int, **options: Any) -> None:
    if reached(f"version {version}", True):
        FAULTS[fault]()
        if fault == "weights NaN":
            self.policy.weights.working.fill_(float("nan"))
    await at_version(self, version, **options)


if __name__ == "__main__":
    Stages.begin = beginning  # type: ignore[method-assign]
    OpenRun._at_version = arriving  # type: ignore[method-assign]
    runpy.run_module("asyncrl.main", run_name="__main__", alter_sys=True)
