"""The guard of one child process: its parent, which leaves nothing behind of what the child started.

    run ── guard ── child ── whatever the user's functions start

A program of its own (`guard.py RUN MARK COMMAND...`, the last word of COMMAND is the descriptor of the child's channel), run by
path without the package: one guard stands beside each reward worker, so it has to be small and to start at once.

Guarantees
* When the child ends, when the run ends (killed, or by the watchdog's hard exit), and on SIGTERM, everything below the guard
  is killed: children in any process group and session, daemons too, because on Linux the guard adopts orphans (subreaper).
* Then, not before, the guard ends as the child did: with its exit code, or by the same signal.
* A guard that is killed takes the child with it. What else there was carries `MARK` in its environment (`leftovers.py`).

Only children of the guard and their groups are signalled: the number of a process cannot be used again while nobody but us
could reap it. Their children become ours as they die, until there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

MARK = "ASYNCRL_CHILD"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
# Until what still lives is signalled again: its parent may have forked while it was killed.
_AGAIN_S = 0.05
# How often to ask who our parent is.
_LOOK_S = 1.0


def main(run: int, mark: str, command: list[str]) -> None:
    """Start `command`, and outlive it by all that it started. Ends as the child did, soon after process `run` at the latest."""
    signals, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(mark, command)
    # The child's end of the channel is the child's alone.
    os.close(int(command[-1]))
    status, ending = None, False
    while True:
        found, some_left = _reap(child)
        status = found if found is not None else status
        ending = ending or status is not None or os.getppid() != run
        if ending and not (some_left and _kill_children()):
            _end_as(status)
        if select.select([signals], [], [], _AGAIN_S if ending else _LOOK_S)[0]:
            ending = signal.SIGTERM in os.read(signals, 4096) or ending


def _start(mark: str, command: list[str]) -> int:
    """The child, in a session of its own: what it does to its process group does not reach the guard."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Else the guard was killed before the line above.
        if os.getppid() == guard:
            os.execve(command[0], command, {**os.environ, MARK: mark})
    finally:
        # A fork that did not become the command must not go on as a second guard.
        os._exit(127)


def _reap(child: int) -> tuple[int | None, bool]:
    """The wait status of `child` if it has ended since, and whether there is a child that has not."""
    status = None
    while True:
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == child:
            status = found


def _kill_children() -> bool:
    """False where none of them may be killed: they belong to another user by now."""
    try:
        with open("/proc/thread-self/children", encoding="utf-8") as file:
            children = [int(each) for each in file.read().split()]
    except OSError:
        # No such file in this kernel: the child is killed as the guard ends, what it started is found by its mark.
        return False
    killed = False
    for pid in children:
        with contextlib.suppress(OSError):
            group = os.getpgid(pid)
            # Not ours: that is a child which was forked just now.
            if group != os.getpgrp():
                # All at once: nobody in the group forks meanwhile.
                os.killpg(group, signal.SIGKILL)
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            continue
        except ProcessLookupError:
            pass
        killed = True
    return killed


def _end_as(status: int | None) -> None:
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        # The core, if there is one, is the child's.
        _prctl(_PR_SET_DUMPABLE, 0)
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
