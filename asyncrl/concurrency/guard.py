"""The guard is the parent process of one child. After the child's end the guard kills every process that the child has started.

    run ── guard ── child ── processes that the user's functions start

The run starts `guard.py RUN COMMAND...` as a script, so the package is not imported. RUN is the run's pid. The last word of COMMAND
is the descriptor of the child's channel. Each reward worker has a guard, so the guard must be small and start quickly.

Guarantees
* The guard kills all its descendants when the child ends, when the run ends in any way, and on SIGTERM. Process groups, sessions
  and daemons do not escape: on Linux the guard is the subreaper, which adopts orphans.
* Afterwards the guard ends like the child: with the same exit code, or by the same signal.
* If the guard is killed, the child dies too. Processes that the child started go on.

The guard signals only its own children and their groups. The pid of a child cannot be reused before the guard has reaped the child.
When a child dies, its children become children of the guard, and are killed in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
# Kills are repeated, because a process may fork while its group is killed.
_KILL_INTERVAL_S = 0.05
_PARENT_CHECK_S = 1.0  # how often the guard checks that the run lives


def main(run_pid: int, command: list[str]) -> None:
    """Start `command`. When the child or the run ends, or at SIGTERM, kill everything and end like the child. Never returns."""
    # Each signal writes a byte into the pipe, so that `select` notices the signal.
    signals, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    # A copy in the guard would keep the child's end of the channel open after the child's death.
    os.close(int(command[-1]))
    status, ending = None, False
    while True:
        new_status, has_children = _reap(child)
        status = new_status if new_status is not None else status
        ending = ending or status is not None or os.getppid() != run_pid
        if ending and not (has_children and _kill_children()):
            _end_like_child(status)  # no child is left, or none can be killed
        if select.select([signals], [], [], _KILL_INTERVAL_S if ending else _PARENT_CHECK_S)[0]:
            ending = signal.SIGTERM in os.read(signals, 4096) or ending


def _start(command: list[str]) -> int:
    """Start the child and return its pid. The child has its own session, so signals to its process group do not reach the guard."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the guard died before PDEATHSIG was set, no signal would ever end the child.
        if os.getppid() == guard:
            os.execv(command[0], command)
    finally:
        # If execv failed, the fork must not go on as a second guard.
        os._exit(127)


def _reap(child: int) -> tuple[int | None, bool]:
    """Reap all ended children. Returns the wait status of `child` if it was among them, and whether a child still runs."""
    child_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return child_status, False
        if pid == 0:
            return child_status, True
        if pid == child:
            child_status = status


def _kill_children() -> bool:
    """Kill all children and their groups. False: no child was killed, because the guard cannot list them, or may not kill them."""
    try:
        with open("/proc/thread-self/children", encoding="utf-8") as file:
            children = [int(number) for number in file.read().split()]
    except OSError:
        # The kernel has no such file. PDEATHSIG kills the child when the guard ends; processes that the child started go on.
        return False
    killed = False
    for pid in children:
        with contextlib.suppress(OSError):
            group = os.getpgid(pid)
            # A child between fork and setsid is still in the guard's own group.
            if group != os.getpgrp():
                # One call for the group: single kills would leave its other processes time to fork.
                os.killpg(group, signal.SIGKILL)
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            continue  # the child runs as another user
        except ProcessLookupError:
            pass
        killed = True
    return killed


def _end_like_child(status: int | None) -> None:
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        # The child may have written a core file. The guard must not write another one.
        _prctl(_PR_SET_DUMPABLE, 0)
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
