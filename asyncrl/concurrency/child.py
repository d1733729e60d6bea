"""Child processes of a run: started by exec, never by a fork of ours, each with a channel to us.

A child is a module that is run as `python -m MODULE CHANNEL PARENT`: the descriptor of its end of the channel, and the number of
its parent. It calls `die_with_parent(PARENT)` before anything else.

Guarantees
* A child has a session of its own: Ctrl-C in the terminal reaches us, and not the child. It inherits the descriptors that it is
  given, and no others; there is nothing to read at its standard input; it finds the package `asyncrl` that we were loaded from.
* It does not outlive us, however we end. A child without a guard takes what it left in its process group with it; of one with a
  guard (`guard.py`) nothing that it started is left.
* `kill` is synchronous and safe at any moment; a stopped process is killed all the same. `aclose` leaves nothing, wherever it is
  cancelled. Where a `ChildProcess` cannot be made, nothing of it is left.
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

from . import guard
from .channel import Channel
from .shield import wait_shielded

# Where the package `asyncrl` lies.
_HOME = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG = 1
# A guard that has not ended in this time after SIGTERM was stopped, or what it kills is stuck in the kernel.
GUARD_S = 10.0
_TAIL_BYTES = 1 << 16
_LONGEST_LINE = 500


class ChildProcess:
    """States: running, ended (`ended` is done). `aclose`, or `kill` and the end of `ended`, must follow."""

    def __init__(
        self,
        name: str,
        module: str,
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        folder: str | None = None,
        mark: str | None = None,
        notify: Callable[[], None] | None = None,
    ) -> None:
        """Errors: OSError. Call it from a thread that lives as long as the child: to the kernel that thread is the parent.

        name: for error messages.
        fds: descriptors that the child inherits, under the same numbers.
        environment: the whole of it.
        output: the file of its standard output and error, which it closes; None: our standard error.
        folder: its working directory; None: ours.
        mark: start it under a guard; what it starts has this mark in its environment (`leftovers.py`).
        notify: see `Channel`.
        """
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output = output
        self._output_begin = 0 if output is None else os.fstat(output.fileno()).st_size
        self._output_tail = b""
        self._guarded, self._killed = mark is not None, False
        self._timer: asyncio.TimerHandle | None = None
        with contextlib.ExitStack() as undo:
            if output is not None:
                undo.callback(output.close)
            ours, theirs = socket.socketpair()
            self.channel = undo.enter_context(contextlib.closing(Channel(ours, name, notify)))
            with theirs:
                channel, parent = str(theirs.fileno()), str(os.getpid())
                # -P: no working directory in front of sys.path, where the user's files could shadow the standard library.
                command = [sys.executable, "-P", "-m", module, channel]
                if mark is not None:
                    command = [sys.executable, "-I", "-S", guard.__file__, parent, mark, *command]
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
            # macOS has no descriptor for a process: a thread waits, and ends with the process.
            loop.run_in_executor(None, self._popen.wait).add_done_callback(lambda _: self._on_end())

    @property
    def exit_code(self) -> int | None:
        """Below zero for a signal; None as long as it runs."""
        return self._popen.returncode

    @property
    def status(self) -> str:
        """How it is, in words: "is running", or how it ended."""
        code = self._popen.returncode
        if code is None:
            return "is running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
            return f"was killed by signal {-code}"
        return f"exited with status {code}"

    def processor_s(self) -> float:
        """Seconds that all its threads have computed; NaN where the platform does not say."""
        with contextlib.suppress(OSError):
            # As clock_getcpuclockid(3) has it.
            return time.clock_gettime((~self.pid << 3) | 2)
        return math.nan

    def last_lines(self, count: int = 20) -> str:
        """The end of its output, made fit to be shown; at any time."""
        tail = self._read_tail() if self._popen.returncode is None else self._output_tail
        lines = [_shown(line) for line in tail.decode("utf-8", "replace").split("\n")]
        return "\n".join([line for line in lines if line][-count:])

    def hang_up(self, grace_s: float) -> None:
        """Close the channel, which tells it to end; kill it where it has not in `grace_s` seconds."""
        self.channel.close()
        self._later(grace_s, self.kill)

    def kill(self) -> None:
        """Kill it, and hang up. `ended` follows soon. At any time; twice is fine."""
        self.channel.close()
        if self._killed:
            return
        self._killed = True
        if self._guarded:
            self._signal_group(signal.SIGTERM)
            self._later(GUARD_S, lambda: self._signal_group(signal.SIGKILL))
        else:
            self._signal_group(signal.SIGKILL)

    async def aclose(self, grace_s: float) -> None:
        """Hang up, and kill it where it has not ended in `grace_s` seconds, or where this is cancelled. When this returns or
        raises it has ended. Twice is fine."""
        self.channel.close()
        cancelled = None
        try:
            await asyncio.wait([self.ended], timeout=grace_s)
        finally:
            self.kill()
            cancelled = await wait_shielded(self.ended)
        if cancelled is not None:
            raise cancelled

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.ended.done():
            self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _signal_group(self, number: int) -> None:
        # Once it is reaped its number, and that of its group, may be another's.
        if self._popen.returncode is None:
            # PermissionError: macOS does not let anybody kill a zombie.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _on_end(self) -> None:
        # What it left behind.
        self._signal_group(signal.SIGKILL)
        if self._popen.poll() is None:
            return
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._output is not None:
            self._output_tail = self._read_tail()
            self._output.close()
        if self._timer is not None:
            self._timer.cancel()
        self.ended.set_result(None)

    def _read_tail(self) -> bytes:
        if self._output is None:
            return b""
        size = os.fstat(self._output.fileno()).st_size
        start = max(self._output_begin, size - _TAIL_BYTES)
        return os.pread(self._output.fileno(), max(0, size - start), start)


def open_output(path: Path | None) -> IO[bytes]:
    """The file to which the output of a child is appended; None: one without a name. Errors: OSError."""
    if path is None:
        return tempfile.TemporaryFile("ab+", buffering=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab+", buffering=0)


def _shown(line: str) -> str:
    """What a terminal would show of it last, without what a terminal obeys: a progress bar writes over itself."""
    line = line.rstrip().rpartition("\r")[2]
    shown = "".join(each if each.isprintable() or each == "\t" else "\N{REPLACEMENT CHARACTER}" for each in line)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}..."


def _start(
    command: Sequence[str],
    fds: Sequence[int],
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    folder: str | None,
) -> subprocess.Popen[bytes]:
    given = dict(environment)
    if not _HOME.endswith("-packages"):
        # The package is not installed: the child has to be told where it is.
        given["PYTHONPATH"] = os.pathsep.join(filter(None, (given.get("PYTHONPATH"), _HOME)))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        cwd=folder,
        env=given,
        start_new_session=True,
    )


def die_with_parent(parent: int) -> None:
    """In a child of process `parent`, as the first thing that it does: from now on the kernel kills us when it ends, and this ends
    us where it has ended already.

    To the kernel the parent is the thread that started us.
    """
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        # Nothing of ours is open yet, and nobody is left who would read an error.
        os._exit(1)


def signal_at_parents_end(number: int) -> None:
    """From now on the kernel sends us this signal when our parent ends (the thread that started us, that is); 0: none any more.
    A parent that has ended already sends none: look at `os.getppid()` afterwards. Nothing where there is no such signal (macOS)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
