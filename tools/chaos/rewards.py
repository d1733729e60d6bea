"""Attack on reward workers: every way in which one can end, and whether anything that it started outlives it.

    python tools/chaos rewards                # each end once, as in CI
    python tools/chaos rewards --rounds 50    # by hand

A reward function starts a brood: a child, a grandchild, a fork that ignores SIGTERM, a stopped one, a session, a daemon (two
forks and a session), one with an empty environment, and one that is never the same process for longer than two milliseconds.
Then its worker or its run ends. Whatever of the brood lives after `--bound` seconds counts as left
behind, and is killed by this program. The last line is JSON; the exit code is 1 where anything was left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commands import end as end_all
from commands import is_alive, start, wait_for

FILE = Path(__file__).resolve()
BROOD = ("child", "grandchild", "fork", "stopped", "session", "daemon", "bare daemon", "restless")
# How it ends -> what the function does once its brood is there: `wait`, `exit` (the worker), or `go` (return).
ENDS = {
    "run killed at work": "wait",
    "run killed while idle": "go",
    "worker killed": "wait",
    "worker crashes": "exit",
    "call times out": "wait",
    "call cancelled": "wait",
    "worker replaced": "go",
    "pool closed": "go",
    "pool closed at work": "wait",
    "watchdog's hard exit": "go",
}
GOES_ON = ("worker killed", "worker crashes", "call times out", "call cancelled", "worker replaced")
PATIENCE_S = 60.0  # for whatever must happen before the attack, on a machine that does other things too


# -- in a worker


def breeds(completions: list[str]) -> list[float]:
    """`completions[0]`: a token that marks the brood, where to write who the worker is, and what to do then."""
    if not completions[0].startswith("brood "):
        return [0.0]
    _, token, notes, then = completions[0].split()
    forever = [f"86400.{token}{index}" for index in range(len(BROOD))]
    subprocess.Popen(["sleep", forever[0]])
    subprocess.Popen(["sh", "-c", f"sleep {forever[1]} & wait"])
    _fork(token, 2, lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(86400)))
    os.kill(subprocess.Popen(["sleep", forever[3]]).pid, signal.SIGSTOP)
    subprocess.Popen(["sleep", forever[4]], start_new_session=True)
    _fork(token, 5, lambda: _daemon(lambda: os.execvp("sleep", ["sleep", forever[5]])))
    _fork(token, 6, lambda: _daemon(lambda: os.execvpe("sleep", ["sleep", forever[6]], {})))
    _fork(token, 7, lambda: _daemon(lambda: _restless(Path(f"{notes}.pulse"))))
    _note(notes)
    if then == "exit":
        wait_for(lambda: len(brood(token, notes)) == len(BROOD), PATIENCE_S)
        os._exit(7)
    if then == "wait":
        time.sleep(86400)
    return [0.0]


def _note(notes: str) -> None:
    Path(f"{notes}.new").write_text(f"{os.getpid()} {os.getppid()}", encoding="utf-8")
    Path(f"{notes}.new").rename(notes)


def _fork(token: str, index: int, act: Any) -> None:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, f"{token}{index}".encode(), 0, 0, 0)  # PR_SET_NAME: kept by forks
        act()
        os._exit(0)


def _daemon(act: Any) -> None:
    os.setsid()
    if os.fork() == 0:
        act()
    os._exit(0)


def _restless(pulse: Path) -> None:
    end = time.monotonic() + 2 * PATIENCE_S  # nothing from outside ends it for sure
    while time.monotonic() < end:
        pulse.touch()
        time.sleep(0.002)
        if os.fork():
            os._exit(0)
        os.setsid()


# -- a run


def run(end: str, token: str, notes: str) -> None:
    """In a child."""
    asyncio.run(_run(end, token, Path(notes)))


async def _run(end: str, token: str, notes: Path) -> None:
    from asyncrl.concurrency.watchdog import Watchdog
    from asyncrl.config.schema import RewardConfig, WatchdogConfig
    from asyncrl.errors import RewardError
    from asyncrl.rewards.pool import RewardPool
    from asyncrl.telemetry.recorder import Recorder

    recorder = Recorder(max_events=0, nvtx=False)
    quick = WatchdogConfig(
        interval_s=0.1, loop_timeout_s=0.5, lane_timeout_s=60, stall_timeout_s=600, abort_grace_s=0.5
    )
    watchdog = Watchdog(quick, recorder=recorder, progress_limit=lambda: None, on_stall=lambda _: None, hard_exit=True)
    settings: dict[str, Any] = {"functions": f"{FILE}:breeds"}
    if end == "call times out":
        settings["timeout_s"] = 5.0
    if end == "worker replaced":
        settings["worker_max_calls"] = 1
    async with contextlib.AsyncExitStack() as stack:
        if end == "watchdog's hard exit":
            await stack.enter_async_context(watchdog)
        pool = await stack.enter_async_context(RewardPool(RewardConfig(**settings), recorder))
        first = asyncio.ensure_future(_call(pool, f"brood {token} {notes} {ENDS[end]}"))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, first.cancel)
        leaves = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, leaves.set)
        leaving = asyncio.ensure_future(leaves.wait())
        await asyncio.wait([first, leaving], return_when=asyncio.FIRST_COMPLETED)
        if end == "watchdog's hard exit":
            wait_for(lambda: len(brood(token, notes)) == len(BROOD), PATIENCE_S)
            time.sleep(600)  # noqa: ASYNC251  what the watchdog is for
        if first.done() and end in GOES_ON:
            await _call(pool, "another")
            print("scored again", flush=True)
        await leaving
    with contextlib.suppress(RewardError, asyncio.CancelledError):
        await first


async def _call(pool: Any, text: str) -> None:
    """One group of one completion; what fails is what the attack did."""
    import numpy as np

    from asyncrl.errors import AsyncrlError
    from asyncrl.types import FinishReason, Prompt, Trajectory

    ids, reals = np.array([1, 2], dtype=np.int32), np.zeros(2, dtype=np.float32)
    versions, mask = np.array([-1, 0], dtype=np.int32), np.array([False, True])
    one = Trajectory(
        group_id=0, member=0, group_size=1, prompt_length=1, tokens=ids, mask=mask, logprobs=reals, sampled_logprobs=reals,
        versions=versions, temperature=1.0, finish_reason=FinishReason.STOP, completion=text,
    )  # fmt: skip
    with contextlib.suppress(AsyncrlError):
        await pool.score(Prompt(group_id=0, ids=ids[:1], prompt="", columns={}), [one])


# -- the attack


def brood(token: str, notes: Path) -> set[str]:
    """Which of them live: told by their command line or name, whoever their parent is. The restless one by its pulse."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        if time.time() - Path(f"{notes}.pulse").stat().st_mtime < 0.5:
            found.add("restless")
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and is_alive(int(entry)):
                command = Path(f"/proc/{entry}/cmdline").read_bytes() + Path(f"/proc/{entry}/comm").read_bytes()
                _, marked, rest = command.partition(token.encode())
                if marked and rest[:1].isdigit() and rest[1:2] in (b"\0", b"\n", b" "):
                    found.add(f"{BROOD[int(rest[:1])]}")
    return found


def _child(end: str, token: str, notes: Path) -> subprocess.Popen[str]:
    return start(__name__, "run", end, token, notes, stdout=subprocess.PIPE, text=True, start_new_session=True)


def attack(end: str, folder: Path, bound: float) -> dict[str, Any]:
    """Let one run end one worker in this way. What is left, and how long the others took to go."""
    token = str(random.SystemRandom().randrange(10**8, 10**9))
    notes = folder / token
    process = _child(end, token, notes)
    try:
        if end not in ("worker crashes", "watchdog's hard exit", "worker replaced"):
            assert wait_for(lambda: notes.exists() and brood(token, notes) == set(BROOD), PATIENCE_S), (
                f"{end}: {brood(token, notes)} only"
            )
        assert wait_for(notes.exists, PATIENCE_S), f"{end}: no worker"
        worker, guard = (int(each) for each in notes.read_text(encoding="utf-8").split())
        guarded = guard != process.pid
        _strike(end, process, worker)
        if end in GOES_ON:
            assert process.stdout is not None and process.stdout.readline() == "scored again\n", f"{end}: no other call"
        elif process.poll() is None:
            process.wait(PATIENCE_S)
        began = time.monotonic()
        ours = [worker, guard] if guarded else [worker]
        wait_for(lambda: not brood(token, notes) and not any(map(is_alive, ours)), bound)
        left = sorted(brood(token, notes)) + [
            ("worker", "guard")[index] for index, pid in enumerate(ours) if is_alive(pid)
        ]
        return {"left": left, "seconds": time.monotonic() - began, "code": process.poll()}
    finally:
        end_all([process])
        _clean(token, notes)


def _strike(end: str, process: subprocess.Popen[str], worker: int) -> None:
    if end in ("run killed at work", "run killed while idle"):
        process.kill()
    elif end == "worker killed":
        os.kill(worker, signal.SIGKILL)
    elif end == "call cancelled":
        process.send_signal(signal.SIGUSR1)
    elif end in ("pool closed", "pool closed at work"):
        process.send_signal(signal.SIGUSR2)


def _clean(token: str, notes: Path) -> None:
    """What was left behind on the machine goes, by its name in the command line."""
    while brood(token, notes):
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                parts = (Path(f"/proc/{entry}/cmdline").read_bytes(), Path(f"/proc/{entry}/comm").read_bytes())
                if entry.isdigit() and int(entry) != os.getpid() and any(token.encode() in part for part in parts):
                    os.kill(int(entry), signal.SIGKILL)


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--rounds", type=int, default=1, help="of each end")
    options.add_argument("--bound", type=float, default=5.0, help="seconds after which what lives was left behind")
    options.add_argument("--only", choices=list(ENDS), action="append")


def main(given: argparse.Namespace) -> int:
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for end in given.only or ENDS:
            rounds = [attack(end, Path(name), given.bound) for _ in range(given.rounds)]
            left = sorted({each for one in rounds for each in one["left"]})
            slowest = max(one["seconds"] for one in rounds)
            codes = sorted({one["code"] for one in rounds if one["code"] is not None})  # none: the run goes on
            result[end] = {"rounds": len(rounds), "left": left, "slowest_s": round(slowest, 3), "run ended with": codes}
            print(f"{end:24} {len(rounds):4}  {slowest:6.2f} s  left: {', '.join(left) or 'nothing'}", file=sys.stderr)
    print(json.dumps(result))
    return 1 if any(one["left"] for one in result.values()) else 0
