"""Programs for child processes of the transport tests, and names that no other test uses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
import warm

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    folders = (str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(folder for folder in folders if folder)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def child(program: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """A Python process that runs `program` (it talks over stdin and stdout, line by line)."""
    start = warm.Popen if "torch" in program or "slab" in program else subprocess.Popen
    return start(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


@contextlib.contextmanager
def living(program: str, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A `child` that does not outlive the block."""
    with child(program, *arguments, **extra) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line the child says; its end is an error here."""
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, f"the child ended with code {process.wait(60)}"
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


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for what other processes do: a bound for a busy machine."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(word: str) -> list[int]:
    """Numbers of the processes with `# word` in their command line, guards included."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"# {word}".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def own_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A shared-memory name of this test alone; fails the test if something is left under it."""
    chosen = f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    yield chosen
    left = [path for path in Path("/dev/shm").iterdir() if chosen in path.name]
    for path in left:
        path.unlink()
    assert not left, f"left in shared memory: {left}"


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
