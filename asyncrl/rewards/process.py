"""One reward worker process as the pool sees it: start, one request at a time, kill, reap.

Guarantees: `destroy` is synchronous and safe at any moment, so that cancellation can never leak a process or a
descriptor; the process (its whole session, children of the user's function included) is killed before it is reaped, so
that a process id is never reused under our hands; the exit status is known to whoever saw the worker die.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import cloudpickle

from .wire import HEADER_SIZE, Kind, WireError, pack, unpack

_HOME = str(Path(__file__).resolve().parents[2])  # where the package `asyncrl` lies
_READ_LIMIT = 1 << 20  # bytes buffered by asyncio before it stops reading the socket
_EXIT_GRACE_S = 1.0  # between the end of the socket and the end of the process
_REAP_TIMEOUT_S = 10.0  # a killed process that is still there is stuck in the kernel; nothing can be done then


class WorkerDiedError(Exception):
    """The process ended in the middle of a request; `status` says how, in words."""

    def __init__(self, pid: int, status: str) -> None:
        super().__init__(f"worker {pid} {status}")
        self.pid = pid
        self.status = status


class WorkerProcess:
    """States: running, dead (reaped or about to be), destroyed. Made by `start`; `destroy` must be called."""

    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd: int | None = None
        self._last_id = 0
        self.place = 0  # which of the pool's places it fills; replacements keep it
        self.usable = True  # False as soon as it may not take another request
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(popen.pid)
            self._loop.add_reader(self._pidfd, self._reap)
        else:  # this platform has no descriptor for a process: a thread waits, and ends with the process
            self._loop.run_in_executor(None, popen.wait).add_done_callback(lambda _: self._reap())

    @classmethod
    async def start(cls, folder: str) -> WorkerProcess:
        """Start the process in `folder` (its working directory). It answers nothing yet: send INIT first."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)
            except BaseException:
                ours.close()
                raise
            try:
                popen = _spawn(theirs.fileno(), folder)
            except BaseException:
                writer.transport.abort()
                raise
        return cls(popen, reader, writer)

    @property
    def pid(self) -> int:
        """Its process number, also after its end."""
        return self._popen.pid

    async def request(self, kind: Kind, content: dict[str, Any]) -> tuple[Kind, bytes]:
        """Send one request and wait for its reply; replies with another id are discarded.

        Errors: `WorkerDiedError`. If it is cancelled the worker must be destroyed: it may still be at work.
        """
        self._last_id += 1
        payload = cloudpickle.dumps(content, protocol=5)
        try:
            self._writer.write(pack(kind, self._last_id, len(payload)))
            self._writer.write(payload)
            await self._writer.drain()
            while True:
                header = unpack(await self._reader.readexactly(HEADER_SIZE))
                body = await self._reader.readexactly(header.length)
                if header.request_id == self._last_id:
                    return header.kind, body
        except WireError:
            self.kill()
            raise WorkerDiedError(self.pid, "wrote bytes into the protocol's socket that are not ours") from None
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerDiedError(self.pid, await self._last_words()) from None

    async def _last_words(self) -> str:
        self.usable = False
        with anyio.move_on_after(_EXIT_GRACE_S):
            await self._exited.wait()
            return self._status()
        self.kill()  # alive, but it closed its socket: nothing can be heard from it any more
        return "closed the protocol's socket"

    def _status(self) -> str:
        code = self._popen.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
            return f"was killed by signal {-code}"
        return f"exited with status {code}"

    async def wait_exit(self) -> None:
        """Return once the process has ended and is reaped."""
        await self._exited.wait()

    def hang_up(self) -> None:
        """Close our end: an idle worker ends by itself."""
        self.usable = False
        self._writer.close()

    def kill(self) -> None:
        """SIGKILL to the worker and the processes it started; nothing where it is reaped already."""
        self.usable = False
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def _reap(self) -> None:
        if self._exited.is_set():
            return
        self.kill()  # also what the worker left behind in its session, while its id is still ours
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_TIMEOUT_S)  # it is dead or dying: microseconds to a few milliseconds
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._exited.set()

    def destroy(self) -> None:
        """Kill, reap and close everything. May be called twice; must run on the loop that started the process."""
        self._reap()
        self._writer.transport.abort()


def _spawn(descriptor: int, folder: str) -> subprocess.Popen[bytes]:
    """exec in a session of its own: Ctrl-C in the terminal reaches us, not the workers; one kill reaches all of it.

    The kernel ties the worker's life to the *thread* that starts it: this has to run on the loop's thread, never in a
    helper thread that ends early.
    """
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if not _HOME.endswith("-packages"):  # not installed: the worker has to be told
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), _HOME)))
    return subprocess.Popen(
        # -P: no working directory in front of sys.path, where the user's files could shadow the standard library
        [sys.executable, "-P", "-m", "asyncrl.rewards.worker", str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(descriptor,),
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
