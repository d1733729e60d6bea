"""A tool that runs Python code of the policy in a process without network, privileges or secrets (Linux only).

    async with Sandbox() as sandbox:
        reply = await policy.chat(messages, tools=[sandbox.python])

The process starts with the `async with` block, to be ready for the policy's first call. It ends with the block, and after a call
that was cancelled, ran too long or printed too much (`keep_state=False`: after each call). `jail.py` says what the code sees.

Linux namespaces isolate the process, so a bug of the kernel is a way out. The code can read files in the folders of Python and
below /usr. The processes of a sandbox together may use `processes` x `memory_mib` of memory. Its files may use `memory_mib` more.
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
from asyncrl.errors import LifecycleError, PlatformError

from . import jail

_START_S = 60.0  # for the process to get ready
# A jail that has not ended after this time is killed. Usually all processes of a sandbox end within milliseconds.
_END_S = 10.0
_LOST = "its variables and files are lost"
# The sandbox gets no environment variable of the run, because the run may have secret keys there.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/sandbox", "TMPDIR": "/sandbox", "OMP_NUM_THREADS": "1"}


class Sandbox:
    """`async with Sandbox() as sandbox` gives the tool `sandbox.python` to one episode.

    timeout_s: seconds of one call. memory_mib: of each process, and of all files together. processes: at the same time, threads
    included. output_bytes: what a call may print. keep_state: later calls see the variables and files of earlier calls.
    """

    _proved: ClassVar[bool] = False  # a sandbox has started in this run

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
        self._open = self._ready = False

    async def __aenter__(self) -> Self:
        """Errors: `PlatformError` if this machine allows no sandbox, for example if it forbids user namespaces."""
        self._open = True
        try:
            connection = self._start()
            # If the machine allows no sandbox, raise here: an error in a call would become a text for the policy.
            if not Sandbox._proved:
                await self._wait_ready(connection)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        await self._end()

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints. The value of a last line that is an expression is printed, too.

        Args:
            code: The code. It has no network. Files can be written in the working directory.
        """
        async with self._lock:
            usable = False
            try:
                # Before the timer: the start of a process does not count as time of the code.
                connection = self._start()
                await self._wait_ready(connection)
                with anyio.move_on_after(self._timeout_s) as timer:
                    answer, usable = await self._exchange(connection, code.encode(errors="replace"))
                if timer.cancelled_caught:
                    answer = f"[the code ran longer than {self._timeout_s:g} s and was ended; {_LOST}]"
            finally:
                if not (usable and self._keep_state):
                    await self._end()
            if self._open:
                self._start()  # so that a process is ready for the next call
            return answer

    async def _exchange(self, connection: socket.socket, code: bytes) -> tuple[str, bool]:
        """(text for the policy, whether the process can take another call)."""
        loop, mark, output = asyncio.get_running_loop(), secrets.token_bytes(16), bytearray()
        try:
            await loop.sock_sendall(connection, mark + len(code).to_bytes(4, "little") + code)
            while not output.endswith(mark) and len(output) <= self._output_bytes + len(mark):
                if not (piece := await loop.sock_recv(connection, 1 << 16)):
                    raise ConnectionError
                output += piece
        except ConnectionError:
            return f"{_text(output)}\n[the Python process ended; {_LOST}]", False
        # The mark may have come together with too much output.
        if len(output) > self._output_bytes + len(mark):
            cause = f"the code printed more than {self._output_bytes} bytes and was ended"
            return f"{_text(output[: self._output_bytes])}\n[{cause}; {_LOST}]", False
        return _text(output[: -len(mark)]), True

    def _start(self) -> socket.socket:
        """The socket to the process. Starts a process if none runs."""
        if self._connection is not None:
            return self._connection
        if not self._open:
            raise LifecycleError("the sandbox is not open; call its tool `python` inside the `async with` block")
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
        answer = b"-its process did not answer"
        with anyio.move_on_after(_START_S):
            answer = await asyncio.get_running_loop().sock_recv(connection, 1000)
        if not answer.startswith(b"+"):
            raise PlatformError(
                f"this machine allows no sandbox ({_text(answer[1:]) or 'its process ended'}); allow user namespaces (Docker: "
                "--security-opt seccomp=unconfined; Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0), or give "
                "the policy a tool that runs code in a container of your own"
            )
        self._ready = Sandbox._proved = True

    async def _end(self) -> None:
        """Close the socket, and wait until all processes have ended, even if this task is cancelled meanwhile."""
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
