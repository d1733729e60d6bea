"""A worker process as the node sees it: start, control line, output, end.

Guarantees
* The process is started by exec and dies with the node, however that ends: the kernel kills it (`die_with_parent`, which its
  program calls first), and its control line ends.
* When it has ended, nothing is left of what it started in its process group, and of the descriptors by which it was watched.
* `kill` is synchronous and safe at any moment; a stopped process is killed all the same. `aclose` leaves nothing, wherever it is
  cancelled.
* Its output goes to a file and to nobody's terminal; the end of it can be read, also after the process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import anyio

from ...concurrency.child import Child
from ...concurrency.shield import wait_shielded
from ...errors import WorkerDied
from .control import ControlLine

PROGRAM = "asyncrl.generation.worker.main"
_TAIL = 1 << 16  # bytes of output in which the last lines are looked for
_LONGEST_LINE = 500  # characters shown of one


class WorkerProcess:
    """States: running, ended (`exited` is done). Made by `start`; `aclose`, or `kill` and the end of `exited`, must follow."""

    def __init__(self, number: int, child: Child, control: ControlLine, output: _Output) -> None:
        self.number = number
        self.pid = child.pid
        self.control = control
        self.processor_s = child.processor_s
        self._child = child
        self._output = output
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = loop.create_future()  # its exit status, below zero for a signal
        self._over: asyncio.Future[None] = loop.create_future()  # the same, and nobody else can cancel it
        child.watch(self._ended)

    @classmethod
    async def start(
        cls,
        number: int,
        *,
        fds: Sequence[int],
        log: Path | None,
        environment: Mapping[str, str],
        program: str = PROGRAM,
    ) -> WorkerProcess:
        """Start worker `number`: `python -m PROGRAM CONTROL NODE`, the descriptor of its control line and our process number.

        `fds`: descriptors that it inherits under their numbers. `log`: the file to which its output is appended; None: one without
        a name. `environment`: what it finds beside ours. Errors: OSError.

        Call it from the loop's own thread: the kernel ends the worker with the thread that started it. Nothing waits in here, so
        that no cancellation can come between a process and who has to end it.
        """
        with contextlib.ExitStack() as undo:
            output = _Output(log)
            undo.callback(output.close)
            ours, theirs = socket.socketpair()
            control = ControlLine(ours, f"worker {number}")
            undo.callback(control.close)
            with theirs:
                descriptor = theirs.fileno()
                # -P: no working directory in front of sys.path, where the user's files could shadow the standard library
                child = Child(
                    [sys.executable, "-P", "-m", program, str(descriptor), str(os.getpid())],
                    fds=(descriptor, *fds),
                    environment=os.environ | environment,
                    output=output.fileno(),
                )
            undo.pop_all()
        return cls(number, child, control, output)

    @property
    def status(self) -> str:
        """How it is, in words: "is running", or how it ended."""
        return self._child.ending if self._over.done() else "is running"

    def last_lines(self, count: int = 20) -> str:
        """The end of its output, made fit to be shown; at any time."""
        return self._output.last_lines(count)

    def died(self) -> WorkerDied:
        """The error to raise for an end that nobody asked for."""
        return WorkerDied(self.number, self.pid, self.status, self.last_lines())

    def kill(self) -> None:
        """Kill it with its process group, and hang up. `exited` follows soon. At any time; twice is fine."""
        self.control.close()
        self._child.kill_group()

    async def aclose(self, grace_s: float) -> None:
        """Hang up, which tells it to end; kill it where it has not in `grace_s` seconds, or where this is cancelled. When this
        returns or raises it has ended. Twice is fine."""
        self.control.close()
        cancelled = None
        try:
            with anyio.move_on_after(grace_s):
                await asyncio.wait([self._over])
        finally:
            self.kill()
            cancelled = await wait_shielded(self._over)
        if cancelled is not None:
            raise cancelled

    def _ended(self) -> None:
        self._child.kill_group()  # what it left behind; as long as it is not reaped its number is its own
        status = self._child.poll()
        if status is None:
            return
        self._child.forget()
        self._output.close()
        self._over.set_result(None)
        if not self.exited.done():  # whoever awaits a future without a shield may cancel it
            self.exited.set_result(status)


class _Output:
    """What one worker writes to its standard output and error: in a file that may have begun with those before it."""

    def __init__(self, path: Path | None) -> None:
        self._file = _open(path)
        self._begin = os.fstat(self._file.fileno()).st_size
        self._tail = b""

    def fileno(self) -> int:
        return self._file.fileno()

    def last_lines(self, count: int) -> str:
        text = (self._tail if self._file.closed else self._read()).decode("utf-8", "replace")
        lines = [_shown(line) for line in text.split("\n")]
        return "\n".join([line for line in lines if line][-count:])

    def _read(self) -> bytes:
        size = os.fstat(self._file.fileno()).st_size
        start = max(self._begin, size - _TAIL)
        return os.pread(self._file.fileno(), max(0, size - start), start)

    def close(self) -> None:
        """Keep the end of it for `last_lines`. Twice is fine."""
        if not self._file.closed:
            self._tail = self._read()
            self._file.close()


def _open(path: Path | None) -> IO[bytes]:
    if path is None:
        return tempfile.TemporaryFile("ab+", buffering=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab+", buffering=0)


def _shown(line: str) -> str:
    """What a terminal would show of it last, without what a terminal obeys: a progress bar writes over itself."""
    line = line.rstrip().rpartition("\r")[2]
    shown = "".join(each if each.isprintable() or each == "\t" else "\N{REPLACEMENT CHARACTER}" for each in line)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}..."
