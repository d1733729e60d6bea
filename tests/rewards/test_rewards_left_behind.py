"""Nothing that a reward function starts outlives its worker: every end, in the short form of `tools/chaos rewards`."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rewards_helpers import only_worker, pool, score, until
from warm import children

from asyncrl.errors import RewardCrash

TOOL = Path(__file__).resolve().parents[2] / "tools" / "chaos"
# Of a program of its own that opens a pool.
PREAMBLE = f"""
import asyncio, os, sys, threading, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}, {str(TOOL.parents[1])!r}]
from rewards_helpers import pool, prompt, score, trajectories
"""
GOES_ON, ENDED, KILLED = [], [0], [-signal.SIGKILL]
ENDS = {
    "run killed at work": KILLED,
    "run killed while idle": KILLED,
    "worker killed": GOES_ON,
    "worker crashes": GOES_ON,
    "call times out": GOES_ON,
    "call cancelled": GOES_ON,
    "worker replaced": GOES_ON,
    "pool closed": ENDED,
    "pool closed at work": ENDED,
    "watchdog's hard exit": [4],
}


@pytest.mark.slow
def test_nothing_outlives_its_worker():
    done = subprocess.run([sys.executable, str(TOOL), "rewards"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {end: (result["left"], result["run ended with"]) for end, result in json.loads(done.stdout).items()}
    assert found == {end: ([], codes) for end, codes in ENDS.items()}


# ---- the guard itself


async def test_a_guard_that_does_not_answer_is_killed_and_its_worker_with_it(monkeypatch):
    monkeypatch.setattr("asyncrl.concurrency.child.GUARD_S", 0.5)
    async with pool("length") as rewards:
        worker = only_worker()
        worker.parent().suspend()
        worker.suspend()  # it does not leave by itself either
    assert not rewards._alive
    worker.wait(20)


async def test_a_dead_worker_gets_no_call_while_its_guard_is_still_at_work():
    async with pool("length", workers=2) as rewards:
        guard = children()[0]
        guard.suspend()
        try:
            for worker in guard.children():
                worker.kill()
            await until(lambda: any(process.hung_up for process in rewards._alive))
            for _ in range(4):
                assert (await score(rewards, "abc")).reward == 3.0
        finally:
            guard.resume()


def test_a_worker_of_a_pool_in_a_thread_that_ended_stays():
    """Its life is tied to the process, whichever thread has started it."""
    program = """
loop = asyncio.new_event_loop()
rewards = pool("length")
def start():
    loop.run_until_complete(rewards.__aenter__())
async def whole():
    await score(rewards, "abc")
thread = threading.Thread(target=start)
thread.start(); thread.join()
loop.run_until_complete(whole())
print("scored", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + program], capture_output=True, text=True, check=False)
    assert done.stdout == "scored\n", done.stderr


def test_a_fork_of_the_run_keeps_no_worker_alive():
    """A data loader's process holds copies of all descriptors; the guard waits for the run itself."""
    program = """
async def main():
    async with pool("length") as rewards:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(child, *[p.pid for p in rewards._alive], flush=True)
        os._exit(4)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", PREAMBLE + program], stdout=subprocess.PIPE, text=True) as run:
        copy, worker = (psutil.Process(int(pid)) for pid in run.stdout.readline().split())
        try:
            psutil.wait_procs([worker], timeout=20)
            assert not worker.is_running() and copy.is_running()
        finally:
            copy.kill()


async def test_a_function_that_kills_its_group_kills_itself_alone():
    async with pool("kills_its_group") as rewards:
        for _ in range(2):
            with pytest.raises(RewardCrash, match="was killed by SIGKILL"):
                await score(rewards)
