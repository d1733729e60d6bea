"""The guard of one reward worker: its parent, which leaves nothing behind of what the worker started.

    run ── guard ── worker ── whatever the user's functions start

A program of its own (`guard.py RUN_PID MARK DESCRIPTOR COMMAND...`), run by path without the package: one stands beside each
worker, so it has to be small and to start at once.

Guarantees
* When the worker ends, when the run ends (killed, or by the watchdog's hard exit), and on SIGTERM, everything below the guard
  is killed: children in any process group and session, daemons too, because on Linux the guard adopts orphans (subreaper).
* Then, not before, the guard ends as the worker did: with its exit code, or by the same signal.
* A guard that is killed takes the worker with it. What else there was carries `MARK` in its environment (`leftovers.py`).

Only children of the guard and their groups are signalled: the number of a process cannot be used again while nobody but we
could reap it. Their children become ours as they die, until there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

MARK = "ASYNCRL_REWARD_WORKER"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_AGAIN_MS = 50  # until what is still there is signalled again: its parent may have forked while it was killed
_LOOK_MS = 1000  # where a process cannot be waited for that is no child: how often to ask who our parent is


def main(run: int, mark: str, descriptor: int, command: list[str]) -> None:
    """Start `command` as the worker that serves `descriptor`, and outlive it by all that it started. Ends as the worker did, once
    process `run` has ended at the latest."""
    news = _signals()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    run_handle = _handle(run)
    if os.getppid() != run:
        return  # it ended before we could look
    worker = _start(mark, descriptor, command)
    os.close(descriptor)  # the worker's end of the socket is the worker's alone
    _end_as(_watch(run, run_handle, worker, news))


def _watch(run: int, run_handle: int | None, worker: int, news: int) -> int | None:
    """Wait for an end, make it everybody's. Returns the worker's wait status."""
    poller = select.poll()
    poller.register(news, select.POLLIN)
    if run_handle is not None:
        poller.register(run_handle, select.POLLIN)
    idle = None if run_handle is not None else _LOOK_MS
    status, ending = None, False
    while True:
        found, some_left = _reap(worker)
        status = found if found is not None else status
        if ending or status is not None:
            if not some_left or not _kill_children():
                return status
            idle = _AGAIN_MS
        ready = dict(poller.poll(idle))
        if news in ready and signal.SIGTERM in os.read(news, 4096):
            ending = True
        if run_handle in ready or os.getppid() != run:
            ending = True
            if run_handle in ready:
                poller.unregister(run_handle)  # it stays readable


def _signals() -> int:
    """A descriptor from which the numbers of SIGCHLD and SIGTERM can be read as they come."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return read


def _handle(pid: int) -> int | None:
    """Readable once the process has ended, whichever of its threads started us. None where the kernel has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _start(mark: str, descriptor: int, command: list[str]) -> int:
    """The worker, in a session of its own: what it does to its process group does not reach the guard."""
    guard = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:  # else it was killed before the line above
            os.set_inheritable(descriptor, True)
            os.execve(command[0], command, {**os.environ, MARK: mark})
    finally:
        os._exit(127)  # a fork that became no worker must not go on as a second guard


def _reap(worker: int) -> tuple[int | None, bool]:
    """The worker's status if it has ended since, and whether there is a child that has not."""
    status = None
    while True:
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == worker:
            status = found


def _kill_children() -> bool:
    """False where none of them may be killed: they belong to another user by now."""
    killed = False
    for pid in _children():
        with contextlib.suppress(OSError):
            group = os.getpgid(pid)
            if group != os.getpgrp():  # a worker that was forked just now
                os.killpg(group, signal.SIGKILL)  # all at once: nobody in it forks meanwhile
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            continue
        except ProcessLookupError:
            pass
        killed = True
    return killed


def _children() -> list[int]:
    try:
        with open("/proc/thread-self/children", encoding="utf-8") as file:
            return [int(each) for each in file.read().split()]
    except OSError:  # a kernel without this file, or no Linux
        return [pid for pid in _processes() if _parent(pid) == os.getpid()]


def _processes() -> list[int]:
    try:
        return [int(each) for each in os.listdir("/proc") if each.isdigit()]
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _end_as(status: int | None) -> None:
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # the core, if there is one, is the worker's
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # as the worker did, whatever code it was; the guard holds nothing to be cleaned up


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
