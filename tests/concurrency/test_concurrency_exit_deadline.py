"""The end of a process: what libraries and user code leave behind holds it for so long, is named, and changes no exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import warm

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, atexit, ctypes, multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from asyncrl.concurrency import exit_deadline
from asyncrl.errors import StallError

ERROR = StallError("all wait")

def forever():
    time.sleep(1000)

CHILD = multiprocessing.get_context("fork").Process(target=forever)

async def stubborn():
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def work():
    global task
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)

def command(arguments):
    with asyncio.Runner() as runner:
        {plant}
        exit_deadline.start_exit_deadline({ended}, 0.2, runner.get_loop())
    if ERROR == {ended}:
        raise ERROR
    return {ended}

sys.exit(exit_deadline.run_program(command, None))
"""
# what is left -> the statement that leaves it, how the work ended, and what names it on stderr
LEFT = {
    "thread": ("threading.Thread(target=forever).start()", "0", "(forever)' in program.py:10 forever"),
    "pool": ("ThreadPoolExecutor().submit(forever)", "143", "_0' in program.py:10 forever"),
    "executor": ("runner.get_loop().run_in_executor(None, forever)", "ERROR", "_0' in program.py:10 forever"),
    "task": ("runner.run(work())", "ERROR", "' awaits a Future in stubborn ("),
    "exit handler": ("atexit.register(forever)", "0", "thread 'MainThread' in program.py:10 forever"),
    "child": ("CHILD.start(); print(CHILD.pid)", "ERROR", "process CHILD (ForkProcess-"),
    "the GIL": ("atexit.register(lambda: ctypes.PyDLL(None).sleep(1000))", "143", "in <lambda>"),
    "destructor": ("libc = ctypes.CDLL(None); libc.on_exit(libc.pause, None)", "0", ""),
    "idle pool": ("ThreadPoolExecutor().submit(print)", "0", ""),
    "daemon": ("threading.Thread(target=forever, daemon=True).start()", "2", ""),
}


def test_what_is_left_is_named_and_the_exit_code_is_that_of_the_work(tmp_path: Path) -> None:
    """All at once: they wait for deadlines most of the time."""
    programs = {}
    for name, (plant, ended, _) in LEFT.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM.format(plant=plant, ended=ended))
        programs[name] = warm.Popen(
            [sys.executable, "program.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    ends = {}
    for name, process in programs.items():
        with process:  # reaped, and its pipes closed
            out, err = process.communicate(timeout=60)
        ends[name] = process.returncode, out.strip(), err
    for name, (_, ended, named) in LEFT.items():
        code, child, err = ends[name]
        assert code == (4 if ended == "ERROR" else int(ended)), (name, err)
        assert named.replace("CHILD", child) in err, (name, err)
        assert ("the process cannot exit because of" in err) == (named not in ("", "in <lambda>")), (name, err)
        assert err.count("StallError: all wait") == (ended == "ERROR"), (name, err)
        assert name != "child" or not psutil.pid_exists(int(child))
