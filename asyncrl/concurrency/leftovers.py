"""What guarded children of dead runs left behind, found by the mark in its environment: the next run kills it.

This is the last resort. Nothing is left while a guard lives (`guard.py`); where guard and run were both killed, the child dies with
the guard, and what it had started is found here, except for what has cleared its environment.

A mark names the process of the run (number, start time, and the namespaces in which these count) and one of its children. Processes
of other users, other namespaces and living runs are left alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from .guard import MARK

# What was forked during one round is found in the next.
_ROUNDS = 20
# For the end of one that was killed.
_WAIT_MS = 1000


def mark_of(number: int) -> str:
    """The mark of child `number` of this process."""
    return f"{os.getpid()}:{_start_time(os.getpid())}:{_namespaces()}:{number}"


def kill_leftovers(mark: str | None = None) -> list[str]:
    """Kill what carries this mark; None: the mark of any run that is dead. Returns who it was, as "number (name)". It blocks: call
    it in a thread."""
    killed: dict[int, str] = {}
    for _ in range(_ROUNDS if sys.platform == "linux" else 0):
        found = dict(_kill(mark))
        if not found:
            break
        killed |= found
    return [f"{pid} ({name})" for pid, name in killed.items()]


def _kill(wanted: str | None) -> Iterator[tuple[int, str]]:
    # Where a reward function of a run that is dead by now has started us, its mark is no sign of a leftover.
    ours = os.environ.get(MARK)
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        # It has ended, or is another user's.
        with contextlib.suppress(OSError):
            if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            # Before its mark is read: then it cannot mean a later process of that number.
            handle = os.pidfd_open(pid)
            try:
                mark = _mark(pid)
                if mark != wanted if wanted else mark == ours or not _is_of_a_dead_run(mark):
                    continue
                name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                waiting = select.poll()
                waiting.register(handle, select.POLLIN)
                waiting.poll(_WAIT_MS)
                yield pid, name
            finally:
                os.close(handle)


def _mark(pid: int) -> str:
    start = f"{MARK}=".encode()
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = next((entry[len(start) :] for entry in entries if entry.startswith(start)), b"")
    return found.decode(errors="replace")


def _is_of_a_dead_run(mark: str) -> bool:
    """False for what is no mark of ours."""
    pid, started, namespaces = [*mark.split(":"), "", "", ""][:3]
    return pid.isdigit() and started.isdigit() and namespaces == _namespaces() and _start_time(int(pid)) != int(started)


def _start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began. None where there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _namespaces() -> str:
    """Where process numbers and start times mean the same as here."""
    found = []
    for name in ("pid", "time"):
        with contextlib.suppress(OSError):
            found.append(str(os.stat(f"/proc/self/ns/{name}").st_ino))
    return "-".join(found)
