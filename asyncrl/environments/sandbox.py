"""A tool that runs the policy's Python code in a process without network, rights and secrets (Linux only).

    async with Sandbox() as sandbox:
        reply = await policy.chat(messages, tools=[sandbox.python])

The process starts with the block, so it is ready before the policy has written its first call. It ends with the block, and whenever
a call is cancelled or reaches a limit. `jail.py` is the process; its docstring says what the code can see.

The kernel enforces the limits (namespaces of an ordinary user), so a bug of the kernel is a way out. Files in the folders of Python
and below /usr can be read. All processes of a sandbox together may use `processes` times `memory_mib`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from typing import ClassVar, Self

import anyio

from asyncrl.concurrency.shield import wait_shielded
from asyncrl.errors import PlatformError

from . import jail

_START_S = 60.0
# The kernel ends the processes of a sandbox within milliseconds, unless the machine is overloaded.
_END_S = 10.0
_LOST = "its variables and files are lost"
# Nothing of the run's environment, where keys may be.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/sandbox", "TMPDIR": "/sandbox", "OMP_NUM_THREADS": "1"}


class Sandbox:
    """`async with Sandbox() as sandbox` gives the tool `sandbox.python` to one episode.

    timeout_s: seconds of one call. memory_mib: of each process, and of all files together. processes: at the same time, threads
    included. output_bytes: what a call may print. keep_state: later calls see the variables and files of earlier calls.
    """

    _proved: ClassVar[bool] = False

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        memory_mib: int = 512,
        processes: int = 16,
        output_bytes: int = 16_384,
        keep_state: bool = True,
    ) -> None:
        self._timeout_s, self._output_bytes, self._keep_state = timeout_s, output_bytes, keep_state
        self._limits = (str(memory_mib << 20), str(processes))
        self._lock = asyncio.Lock()
        self._connection: socket.socket | None = None
        self._ready = False

    async def __aenter__(self) -> Self:
        """Errors: `PlatformError` if this machine does not let an ordinary user make namespaces."""
        try:
            connection = self._start()
            # A machine that allows no sandbox is refused here, and not in a call, where the policy would read the error.
            if not Sandbox._proved:
                await self._wait_ready(connection)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints. The value of a last line that is an expression is printed, too.

        Args:
            code: The code. It has no network. Files can be written in the working directory.
        """
        async with self._lock:
            usable = False
            try:
                # The start of a new process does not count as the code's time.
                connection = self._start()
                await self._wait_ready(connection)
                with anyio.move_on_after(self._timeout_s) as timer:
                    answer, usable = await self._exchange(connection, code.encode(errors="replace"))
                if timer.cancelled_caught:
                    answer = f"[the code ran longer than {self._timeout_s:g} s and was ended; {_LOST}]"
            finally:
                if not (usable and self._keep_state):
                    await self._end()
            self._start()
            return answer

    async def _exchange(self, connection: socket.socket, code: bytes) -> tuple[str, bool]:
        """(what the policy reads, whether the process can take another call)."""
        loop, mark, output = asyncio.get_running_loop(), secrets.token_bytes(16), bytearray()
        try:
            await loop.sock_sendall(connection, mark + len(code).to_bytes(4, "little") + code)
            while not output.endswith(mark) and len(output) <= self._output_bytes + len(mark):
                if not (piece := await loop.sock_recv(connection, 1 << 16)):
                    raise ConnectionError
                output += piece
        except ConnectionError:
            return f"{_text(output)}\n[the Python process ended; {_LOST}]", False
        if not output.endswith(mark):
            cause = f"the code printed more than {self._output_bytes} bytes and was ended"
            return f"{_text(output[: self._output_bytes])}\n[{cause}; {_LOST}]", False
        return _text(output[: -len(mark)]), True

    def _start(self) -> socket.socket:
        """The socket to the process. Starts the process if none runs."""
        if self._connection is not None:
            return self._connection
        if sys.platform != "linux":
            raise PlatformError("Sandbox needs Linux; give the policy a tool that runs code in a container of your own")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            descriptor = theirs.fileno()
            command = [sys.executable, "-I", "-X", "utf8", jail.__file__, str(descriptor), *self._limits]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], env=_ENVIRONMENT, cwd="/"
            )
            undo.pop_all()
        self._connection = ours
        return ours

    async def _wait_ready(self, connection: socket.socket) -> None:
        if self._ready:
            return
        with anyio.fail_after(_START_S):
            answer = await asyncio.get_running_loop().sock_recv(connection, 1000)
        if not answer.startswith(b"+"):
            raise PlatformError(
                f"this machine allows no sandbox ({_text(answer[1:]) or 'its process ended'}); allow user namespaces (Docker: "
                "--security-opt seccomp=unconfined; Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0), or give "
                "the policy a tool that runs code in a container of your own"
            )
        self._ready = Sandbox._proved = True

    async def _end(self) -> None:
        """Hang up, and wait until the kernel has ended all processes, even if this task is cancelled meanwhile."""
        connection, self._connection, self._ready = self._connection, None, False
        if connection is None:
            return
        connection.close()
        loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(self._process.pid)
        ended, timer = loop.create_future(), loop.call_later(_END_S, self._process.kill)
        loop.add_reader(pidfd, ended.cancel)
        cancelled = await wait_shielded(ended)
        timer.cancel()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        self._process.wait()
        if cancelled is not None:
            raise cancelled


def _text(output: bytes | bytearray) -> str:
    return output.decode(errors="replace").removesuffix("\n")
