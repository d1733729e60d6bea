"""Programs for child processes of the transport tests, and names that no other test uses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}", "OMP_NUM_THREADS": "1", **extra}


def child(program: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """A Python process that runs `program` (it talks over stdin and stdout, line by line)."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


def line(process: subprocess.Popen[str]) -> str:
    """The next line the child says; its end is an error here."""
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, f"the child ended with code {process.wait(10)}"
    return said.strip()


def say(process: subprocess.Popen[str], words: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(words + "\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> int:
    """Close the pipes and wait for the end."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.wait(20)


def names(name: str) -> list[str]:
    """What lies in shared memory under this name."""
    return [path.name for path in Path("/dev/shm").iterdir() if name in path.name]


def both_loops(test: Callable[[str], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test under asyncio and under uvloop."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def under(name: str, run: Callable[..., Any]) -> None:
        run(test(name))

    under.__name__, under.__doc__ = test.__name__, test.__doc__
    return under
