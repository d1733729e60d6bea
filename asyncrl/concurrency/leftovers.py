"""Kills processes that dead runs left behind. The mark in a process's environment tells its run.

This is the last resort. When a child ends, its guard kills every process that the child has started (`guard.py`). If the guard
itself was killed, the child dies too, but processes of the child go on. The next run finds and kills these processes here, unless
they cleared their environment.

A mark has the run's process number and start time, the namespaces in which both are valid, and the number of a child. Processes of
other users, other namespaces and living runs are not touched.
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

# A round misses processes that are forked during it; the next round finds them.
_ROUNDS = 20
# Longest wait for the end of a killed process.
_WAIT_MS = 1000


def mark_of(number: int) -> str:
    """The mark of child `number` of this process."""
    return f"{os.getpid()}:{_start_time(os.getpid())}:{_namespaces()}:{number}"


def kill_leftovers(mark: str | None = None) -> list[str]:
    """Kill the processes with this mark; None: with the mark of any dead run. Returns a "number (name)" for each. It blocks, so
    call it in a thread."""
    killed: dict[int, str] = {}
    for _ in range(_ROUNDS if sys.platform == "linux" else 0):
        found = dict(_kill(mark))
        if not found:
            break
        killed |= found
    return [f"{pid} ({name})" for pid, name in killed.items()]


def _kill(wanted: str | None) -> Iterator[tuple[int, str]]:
    # If a reward function of another run started this run, our processes have inherited the mark of that run, and are spared.
    inherited = os.environ.get(MARK)
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        # OSError: the process has ended, or belongs to another user.
        with contextlib.suppress(OSError):
            if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            # Opened before the mark is read, so that a later process with the same number is never killed.
            handle = os.pidfd_open(pid)
            try:
                mark = _mark(pid)
                is_wanted = mark == wanted if wanted else mark != inherited and _is_of_a_dead_run(mark)
                if not is_wanted:
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
    """Returns False for a malformed mark and for one of other namespaces."""
    pid, started, namespaces = [*mark.split(":"), "", "", ""][:3]
    return pid.isdigit() and started.isdigit() and namespaces == _namespaces() and _start_time(int(pid)) != int(started)


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process. None if the process has ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _namespaces() -> str:
    """The ids of our namespaces of process numbers and of time."""
    found = []
    for name in ("pid", "time"):
        with contextlib.suppress(OSError):
            found.append(str(os.stat(f"/proc/self/ns/{name}").st_ino))
    return "-".join(found)
