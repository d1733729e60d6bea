"""What reward workers of dead runs left behind, found by the mark in its environment: the next run ends it.

This is the last resort. Nothing is left while a worker's guard lives (`guard.py`); where guard and run were both killed, the
worker dies with the guard, and what it had started is found here. Except for what has cleared its environment.

A mark says which process the run was (number, start time, and the namespaces in which these count) and which of its workers
this was. Processes of other users, other namespaces and living runs are left alone. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .guard import MARK

_ROUNDS = 20  # what was forked while we looked is found in the next one
_WAIT_MS = 1000  # for the end of one that was killed


def owner() -> str:
    """This process, as a mark names it."""
    return f"{os.getpid()}:{_start_time(os.getpid())}:{_namespaces()}"


def mark_of(owner: str, number: int) -> str:
    """What the environment of worker `number` carries."""
    return f"{owner}:{number}"


def end_of_dead_runs() -> list[str]:
    """Kill what the workers of dead runs of this user started. Returns who it was, as "number (name)"."""
    ours = os.environ.get(
        MARK
    )  # we were started by a reward function ourselves: then the mark is no sign of a leftover
    return _end(lambda mark: mark != ours and _is_of_a_dead_run(mark))


def end_of_worker(mark: str) -> list[str]:
    """The same for one worker of this run whose guard has ended."""
    return _end(lambda found: found == mark)


def _end(is_left: Callable[[str], bool]) -> list[str]:
    ended: dict[int, str] = {}
    for _ in range(_ROUNDS):
        found = dict(_kill(is_left))
        if not found:
            break
        ended |= found
    return [f"{pid} ({name})" for pid, name in ended.items()]


def _kill(is_left: Callable[[str], bool]) -> Iterator[tuple[int, str]]:
    if sys.platform != "linux":
        return
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            handle = os.pidfd_open(pid)  # before we look: it cannot mean a later process of that number
            try:
                mark = _mark(pid)
                if mark is None or not is_left(mark):
                    continue
                name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                waiting = select.poll()
                waiting.register(handle, select.POLLIN)
                waiting.poll(_WAIT_MS)
                yield pid, name
            finally:
                os.close(handle)


def _mark(pid: int) -> str | None:
    start = f"{MARK}=".encode()
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(start):
            return entry[len(start) :].decode(errors="replace")
    return None


def _is_of_a_dead_run(mark: str) -> bool:
    """False for what is no mark of ours."""
    pid, _, rest = mark.partition(":")
    started, _, rest = rest.partition(":")
    namespaces, _, _ = rest.partition(":")
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
