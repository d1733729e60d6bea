"""What every side has: its job, its answer, its memory. The standard library only, and torch where memory is a GPU's.

Scripts beside this one run inside a peer's environment and import it; asyncrl's own sides do too.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def job() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return found


def answer(found: dict[str, Any], file: TextIO | None = None) -> None:
    """The last line that this process prints."""
    print(json.dumps(found), file=file, flush=True)


def status(key: str, pid: int | str = "self") -> int:
    """Bytes from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def tree() -> list[int]:
    """This process and all that come from it."""
    pids = [os.getpid()]
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                    pids += [int(child) for child in (task / "children").read_text(encoding="utf-8").split()]
    return pids


def cpu_seconds() -> float:
    """That this process and all that come from it have taken so far, those that ended and were waited for included."""
    ticks = 0
    for pid in tree():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))  # user and system, its own and that of its ended children
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes(device: str = "cpu") -> int:
    """Largest resident memory of this process and of all that come from it, each at its own peak. On a GPU: what torch has taken of
    its memory in this process.

    Not `ru_maxrss`: Linux hands the parent's peak down at the fork, so a small child of a large parent looks large.
    A child counts with the pages that it shares (the interpreter's), so the sum is a little too large.
    """
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_reserved())
    total = 0
    for pid in tree():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += status("VmHWM", pid)
    return total


def peak_above(run: Callable[[], None], device: str = "cpu") -> int:
    """Most bytes while `run` runs, above those before it: resident ones, or on a GPU those that torch has allocated."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - held)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is that of making the inputs
    before = status("VmRSS")
    run()
    return max(status("VmHWM") - before, 0)
