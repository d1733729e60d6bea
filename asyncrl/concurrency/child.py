"""Child processes of a run: started by exec, never by a fork of ours, and heard of when they end.

Guarantees
* A child has a session of its own: Ctrl-C in the terminal reaches us, and not the child. It inherits the descriptors that it is
  given, and no others; there is nothing to read at its standard input; it finds the package `asyncrl` that we were loaded from.
* Where a `Child` cannot be made whole, nothing of it is left.

A child that calls `die_with_parent` first does not outlive us, however we end; one that calls `signal_at_parents_end` hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_HOME = str(Path(__file__).resolve().parents[2])  # where the package `asyncrl` lies
_PR_SET_PDEATHSIG = 1


class Child:
    """A process that was started here. Whoever makes it calls `watch`, reaps it by `poll` once it has ended, then `forget`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        fds: Sequence[int],
        environment: Mapping[str, str],
        output: int,
        folder: str | None = None,
    ) -> None:
        """`environment` is the whole of it; `output`: the descriptor that is its standard output and error; `folder`: its
        working directory, ours if None. Errors: OSError."""
        self._popen, self._pidfd = _spawn(command, fds, environment, output, folder)
        self.pid = self._popen.pid

    def watch(self, ended: Callable[[], None]) -> None:
        """Have `ended` called on this loop once the process has ended; until `forget`, as often as it was not reaped."""
        self._loop = asyncio.get_running_loop()
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, ended)
        else:  # this platform has no descriptor for a process: a thread waits, and ends with the process
            self._loop.run_in_executor(None, self._popen.wait).add_done_callback(lambda _: ended())

    def forget(self) -> None:
        """No more calls; its descriptor is closed. Twice is fine."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def poll(self) -> int | None:
        """Its exit status if it has ended, below zero for a signal; it is reaped by that."""
        return self._popen.poll()

    @property
    def status(self) -> int | None:
        """The exit status that `poll` found."""
        return self._popen.returncode

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        status = self._popen.returncode
        if status is not None and status < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
            return f"was killed by signal {-status}"
        return f"exited with status {status}"

    def processor_s(self) -> float:
        """Seconds that all its threads have computed; NaN where the platform does not say."""
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid(3) has it
        return math.nan

    def signal(self, number: int) -> None:
        """To the process alone; nothing where it has ended."""
        self._popen.send_signal(number)

    def kill_group(self) -> None:
        """Kill it with all that it started and left in its process group. Before it is reaped: later its number, and the group's,
        may be another's, and nothing is done."""
        if self._popen.returncode is None:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # macOS has it that a zombie may not be killed
                os.killpg(self.pid, signal.SIGKILL)


def _spawn(
    command: Sequence[str], fds: Sequence[int], environment: Mapping[str, str], output: int, folder: str | None
) -> tuple[subprocess.Popen[bytes], int | None]:
    """The process, and the descriptor that becomes readable at its end, where the platform has such."""
    given = dict(environment)
    if not _HOME.endswith("-packages"):  # not installed: the child has to be told
        given["PYTHONPATH"] = os.pathsep.join(filter(None, (given.get("PYTHONPATH"), _HOME)))
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        cwd=folder,
        env=given,
        start_new_session=True,
    )
    try:
        return popen, os.pidfd_open(popen.pid) if hasattr(os, "pidfd_open") else None
    except BaseException:
        popen.kill()
        popen.wait()
        raise


def die_with_parent(parent: int) -> None:
    """In a child of process `parent`, as the first thing that it does: from now on the kernel kills us when it ends, and this ends
    us where it has ended already.

    To the kernel the parent is the thread that started us: start children from one that lives as long as they do. Where there is
    no such signal (macOS) a child has to see by other means that nobody is there any more.
    """
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # nothing of ours is open yet, and nobody is left who would read an error


def signal_at_parents_end(number: int) -> None:
    """From now on the kernel sends us this signal when our parent ends (the thread that started us, that is); 0: none any more.
    One that has ended already is not told of: look at `os.getppid()` afterwards. Nothing where there is no such signal (macOS)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
