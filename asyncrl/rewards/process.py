"""One reward worker process as the pool sees it: start, one request at a time, kill, end.

The process that is started here is the worker's guard (`guard.py`); the worker is its child. When the guard has ended, nothing
is left of the worker and of what it had started, and the guard's exit status is the worker's.

Guarantees: `destroy` is synchronous and safe at any moment, so that cancellation can never leak a process or a descriptor, and
`exited` is done soon after it; the exit status is known to whoever saw the worker die.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import anyio
import cloudpickle

from asyncrl.concurrency.child import Child

from . import guard
from .wire import HEADER_SIZE, Kind, WireError, pack, unpack

_READ_LIMIT = 1 << 20  # bytes buffered by asyncio before it stops reading the socket
_EXIT_GRACE_S = 1.0  # between the end of the socket and the end of the process
_LEAVE_GRACE_S = 2.0  # for the exit handlers of a worker that was sent home, before it is killed
_END_TIMEOUT_S = 10.0  # a killed worker that is still there is stuck in the kernel, or its guard was stopped


class WorkerDiedError(Exception):
    """The process ended in the middle of a request; `status` says how, in words."""

    def __init__(self, pid: int, status: str) -> None:
        super().__init__(f"worker {pid} {status}")
        self.pid = pid
        self.status = status


class WorkerProcess:
    """States: running, leaving (`hang_up`, `kill`), ended (`exited` is done). Made by `start`; `destroy` must be called."""

    def __init__(self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mark: str) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._last_id = 0
        self._killed = False
        self.pid = child.pid  # the guard's, until the worker has said its own
        self.mark = mark
        self.place = 0  # which of the pool's places it fills; replacements keep it
        self.usable = True  # False as soon as it may not take another request
        self.busy = False  # somebody has acquired it
        self.leaving = False  # its successor is there: it hangs up once it is not busy
        self.worn = False
        self._calls, self._grown = 0, 0
        self._forgiven = (0, 0)
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self.attention = asyncio.Event()  # for the keeper of its place: it has ended, or is worn
        child.watch(self._reap)

    @classmethod
    async def start(cls, folder: str, mark: str) -> WorkerProcess:
        """Start the process in `folder` (its working directory). It answers nothing yet: send INIT first.

        `mark`: what its descendants carry in their environment (`leftovers.py`).
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)
            except BaseException:
                ours.close()
                raise
            try:
                child = _start(theirs.fileno(), folder, mark)
            except BaseException:
                writer.transport.abort()
                raise
        return cls(child, reader, writer, mark)

    @property
    def hung_up(self) -> bool:
        """The worker closed its end: it is dead or dying, though its guard is still busy with what it started."""
        return self._reader.at_eof()

    @property
    def wear(self) -> tuple[int, int]:
        """Calls, and bytes gained since the first calls of its functions; since `forgive`, if there was one."""
        return self._calls - self._forgiven[0], self._grown - self._forgiven[1]

    def forgive(self) -> None:
        """Count its wear from here on."""
        self.worn = False
        self._forgiven = (self._calls, self._grown)

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
                    self._calls += kind is Kind.CALL
                    self._grown = header.grown
                    return header.kind, body
        except WireError:
            self.kill()
            raise WorkerDiedError(self.pid, "wrote bytes into the protocol's socket that are not ours") from None
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerDiedError(self.pid, await self._last_words()) from None

    async def _last_words(self) -> str:
        self.usable = False
        with anyio.move_on_after(_EXIT_GRACE_S):
            await asyncio.wait([self.exited])
            return self._child.ending
        self.kill()  # alive, but it closed its socket: nothing can be heard from it any more
        return "closed the protocol's socket"

    @property
    def guard_was_killed(self) -> bool:
        """Perhaps: not by us, and not the worker by itself, which looks the same. Nobody may have ended what it had started."""
        return self._child.status == -signal.SIGKILL and not self._killed

    def hang_up(self) -> None:
        """Close our end: an idle worker ends by itself, and is killed where it does not."""
        self.usable = False
        self._writer.close()
        if not self.exited.done():
            self._within(_LEAVE_GRACE_S, self.kill)

    def kill(self) -> None:
        """The worker and everything that it started is killed, by its guard; nothing where that has ended already."""
        self.usable = False
        if not self.exited.done():
            self._killed = True
            self._child.signal(signal.SIGTERM)
            self._within(_END_TIMEOUT_S, self._give_up)

    def destroy(self) -> None:
        """Kill it and close everything. May be called twice; must run on the loop that started the process."""
        self.kill()
        self._writer.transport.abort()

    def _within(self, seconds: float, act: Callable[[], None]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, act)

    def _give_up(self) -> None:
        """The guard did not do it: the worker dies with it, the rest is for `leftovers.py`."""
        self._killed = False
        self._child.signal(signal.SIGKILL)
        self._within(_EXIT_GRACE_S, self._ended)

    def _reap(self) -> None:
        if self._child.poll() is not None:
            self._ended()

    def _ended(self) -> None:
        if self.exited.done():
            return
        self.usable = False
        self._child.forget()
        if self._deadline is not None:
            self._deadline.cancel()
        self.exited.set_result(None)
        self.attention.set()


def _start(descriptor: int, folder: str, mark: str) -> Child:
    """The guard, which starts the worker."""
    # -P: no working directory in front of sys.path, where the user's files could shadow the standard library
    worker = [sys.executable, "-P", "-m", "asyncrl.rewards.worker", str(descriptor)]
    return Child(
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), mark, str(descriptor), *worker],
        fds=(descriptor,),
        environment=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        output=2,
        folder=folder,
    )
