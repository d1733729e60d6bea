"""Child processes of a run. Each is a new interpreter, not a fork of this process, and has a channel to this process.

A child is run as `python -m MODULE CHANNEL PARENT`. CHANNEL is the descriptor of the child's end of the channel, and PARENT is the
pid of this process. The child calls `die_with_parent(PARENT)` before anything else. A child with a guard gets no PARENT.

Guarantees
* A child has a session of its own: Ctrl-C in the terminal does not reach it. It inherits only its channel, the
  descriptors in `fds`, and `output`. Its standard input is empty. It imports the same package `asyncrl` as this process.
* On Linux a child does not outlive this process, however this process ends. If the child ends first, its process group is killed.
  With a guard (`guard.py`) every process that the child started is killed.
* `kill` does not wait, is safe at any moment, and also ends a process that is stopped (SIGSTOP). `aclose` leaves no process behind,
  even if it is cancelled. A constructor that fails leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import anyio

from . import awake, guard
from .channel import Channel
from .shield import wait_shielded

# The folder that holds the package `asyncrl`.
_HOME = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG = 1
# Seconds between the SIGTERM and the SIGKILL that `kill` sends to a guard. A guard ends in less time, except if the guard is
# suspended or its child is stuck in the kernel.
GUARD_S = 10.0
_TAIL_BYTES = 1 << 16
_LONGEST_LINE = 500


class ChildProcess:
    """A running child. The future `ended` is done at the child's end. The owner must call `aclose`, or `kill` and await `ended`."""

    def __init__(
        self,
        name: str,
        module: str,
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        folder: str | None = None,
        guarded: bool = False,
        notify: Callable[[], None] | None = None,
    ) -> None:
        """Errors: OSError. Call this in a thread that lives as long as the child: to the kernel that thread is the parent.

        name: for error messages.
        fds: descriptors that the child inherits, under the same numbers.
        environment: all environment variables of the child.
        output: the file for the child's standard output and error. This object closes the file. None: our standard error.
        folder: the child's working directory; None: ours.
        guarded: start the child under a guard.
        notify: see `Channel`.
        """
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output = output
        self._output_begin = 0 if output is None else os.fstat(output.fileno()).st_size
        self._output_tail = b""
        self._guarded, self._killed = guarded, False
        self._cancel_timer: Callable[[], None] | None = None
        with contextlib.ExitStack() as undo:
            if output is not None:
                undo.callback(output.close)
            ours, theirs = socket.socketpair()
            self.channel = undo.enter_context(contextlib.closing(Channel(ours, name, notify)))
            with theirs:
                channel, parent = str(theirs.fileno()), str(os.getpid())
                # -P: no working directory in front of sys.path, where the user's files could shadow the standard library.
                command = [sys.executable, "-P", "-m", module, channel]
                if guarded:
                    # The guard is the child's parent, and makes the kernel kill the child when the guard dies.
                    command = [sys.executable, "-I", "-S", guard.__file__, parent, *command]
                else:
                    command.append(parent)
                self._popen = _start(command, (theirs.fileno(), *fds), environment, output or 2, folder)
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._pidfd = os.pidfd_open(self._popen.pid) if hasattr(os, "pidfd_open") else None
            undo.pop_all()
        self.pid = self._popen.pid
        loop = asyncio.get_running_loop()
        if self._pidfd is not None:
            loop.add_reader(self._pidfd, self._on_end)
        else:
            # macOS has no descriptor for a process: a thread waits for the child's end.
            loop.run_in_executor(None, self._popen.wait).add_done_callback(lambda _: self._on_end())

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while the child runs."""
        return self._popen.returncode

    @property
    def status(self) -> str:
        """The predicate of a message about the child: "is running", "exited with status 1", "was killed by SIGKILL"."""
        code = self._popen.returncode
        if code is None:
            return "is running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
            return f"was killed by signal {-code}"
        return f"exited with status {code}"

    def processor_s(self) -> float:
        """CPU seconds of all threads of the child, or of its guard if it has one. NaN after the end, and on macOS."""
        with contextlib.suppress(OSError):
            if self._popen.returncode is not None:
                return math.nan  # another process may have this pid
            # The id of the process's clock, as clock_getcpuclockid(3) makes it.
            return time.clock_gettime((~self.pid << 3) | 2)
        return math.nan

    def last_lines(self, count: int = 20) -> str:
        """The last lines of the child's output, also after its end. Control characters except tabs are replaced."""
        tail = self._read_tail() if self._popen.returncode is None else self._output_tail
        lines = [_printable(line) for line in tail.decode("utf-8", "replace").split("\n")]
        return "\n".join([line for line in lines if line][-count:])

    def hang_up(self, grace_s: float) -> None:
        """Close the channel, which asks the child to end. Kill the child if it still runs after `grace_s` seconds."""
        self.channel.close()
        if not self._killed:  # the timer that `kill` has set must stay
            self._set_timer(grace_s, self.kill)

    def kill(self) -> None:
        """Kill the child and close the channel. `ended` is done soon afterwards. A second call does nothing."""
        self.channel.close()
        if self._killed:
            return
        self._killed = True
        if self._guarded:
            self._signal_group(signal.SIGTERM)
            self._set_timer(GUARD_S, lambda: self._signal_group(signal.SIGKILL))
        else:
            self._signal_group(signal.SIGKILL)

    async def aclose(self, grace_s: float) -> None:
        """Close the channel; kill the child after `grace_s` seconds or when this call is cancelled. When this call
        returns or raises, the child has ended. A second call is allowed."""
        self.channel.close()
        try:
            with anyio.move_on_after(grace_s):
                await asyncio.wait([self.ended])
        finally:
            self.kill()
            cancelled = await wait_shielded(self.ended)
        if cancelled is not None:
            raise cancelled

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer()
        if not self.ended.done():
            # `awake.call_later` does not count the time in which this process is suspended.
            self._cancel_timer = awake.call_later(asyncio.get_running_loop(), seconds, act)

    def _signal_group(self, number: int) -> None:
        # The pid of a reaped child, which is also the id of its group, may belong to another process.
        if self._popen.returncode is None:
            # PermissionError: macOS does not let anybody kill a zombie.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _on_end(self) -> None:
        # Other processes of the child's group may still run.
        self._signal_group(signal.SIGKILL)
        if self._popen.poll() is None:
            return
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._output is not None:
            self._output_tail = self._read_tail()
            self._output.close()
        if self._cancel_timer is not None:
            self._cancel_timer()
        if not self.ended.done():
            self.ended.set_result(None)

    def _read_tail(self) -> bytes:
        if self._output is None:
            return b""
        size = os.fstat(self._output.fileno()).st_size
        start = max(self._output_begin, size - _TAIL_BYTES)
        return os.pread(self._output.fileno(), max(0, size - start), start)


def open_output(path: Path | None) -> IO[bytes]:
    """A file to which a child appends its output. If `path` is None: a temporary file without a name. Errors: OSError."""
    if path is None:
        return tempfile.TemporaryFile("ab+", buffering=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab+", buffering=0)


def _printable(line: str) -> str:
    """The text after the last carriage return (a progress bar overwrites its line), without control characters, cut to length."""
    line = line.rstrip().rpartition("\r")[2]
    shown = "".join(char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in line)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}..."


def _start(
    command: Sequence[str],
    fds: Sequence[int],
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    folder: str | None,
) -> subprocess.Popen[bytes]:
    variables = dict(environment)
    if not _HOME.endswith("-packages"):
        # The package is not installed, so the child finds it through PYTHONPATH.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), _HOME)))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        cwd=folder,
        env=variables,
        start_new_session=True,
    )


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when process `parent` ends; exit if `parent` has ended already."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        # Nothing is open yet, and no process would read an error.
        os._exit(1)


def signal_at_parents_end(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent (the thread that started it) ends; 0 withdraws the request.
    A parent that has ended already causes no signal: check `os.getppid()` afterwards. Does nothing on macOS."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
