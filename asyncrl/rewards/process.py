"""One reward worker process as the pool sees it: start, requests and their replies, kill, end.

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
from dataclasses import dataclass, field
from typing import Any

import anyio
import cloudpickle

from asyncrl.concurrency.child import Child

from . import guard
from .wire import Kind, WireError, pack, take_frame

_EXIT_GRACE_S = 1.0  # between the end of the socket and the end of the process
_LEAVE_GRACE_S = 2.0  # for the exit handlers of a worker that was sent home, before it is killed
_END_TIMEOUT_S = 10.0  # a killed worker that is still there is stuck in the kernel, or its guard was stopped


class WorkerDiedError(Exception):
    """The process ended in the middle of a request; `status` says how, in words."""

    def __init__(self, pid: int, status: str) -> None:
        super().__init__(f"worker {pid} {status}")
        self.pid = pid
        self.status = status


@dataclass(eq=False, slots=True)
class Call:
    """One call of a reward function, from when it waits for a worker on."""

    what: str
    alone: bool  # no other call begins in its worker meanwhile
    given: asyncio.Future[WorkerProcess]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)  # has its deadline


class WorkerProcess(asyncio.Protocol):
    """States: running, leaving (`hang_up`, `kill`), ended (`exited` is done). Made by `start`; `destroy` must be called."""

    pid: int
    _child: Child
    _transport: asyncio.Transport

    def __init__(self, mark: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._last_id = 0
        self._killed = False
        self._data = bytearray()  # received, and no whole frame
        self._replies: dict[int, asyncio.Future[tuple[Kind, bytes] | None]] = {}  # by request; None: there will be none
        self._status = ""  # how it ended, where its exit status does not say so
        self.mark = mark
        self.place = 0  # which of the pool's places it fills; replacements keep it
        self.usable = True  # False as soon as it may not take another request
        # It closed its end: it is dead or dying, though its guard is still busy with what it started.
        self.hung_up = False
        # It fills its place; not until its functions are loaded, and no longer once its successor does.
        self.serving = False
        self.calls: set[Call] = set()  # that it was given and has not ended
        self.died_with: frozenset[Call] = frozenset()  # those, when it died
        self.killed_for = ""  # the call because of which the pool killed it, in words
        self.worn = False
        self._calls, self._grown = 0, 0
        self._forgiven = (0, 0)
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self.attention = asyncio.Event()  # for the keeper of its place: it has ended, or is worn

    @classmethod
    async def start(cls, folder: str, mark: str) -> WorkerProcess:
        """Start the process in `folder` (its working directory). It answers nothing yet: send INIT first.

        `mark`: what its descendants carry in their environment (`leftovers.py`).
        """
        process = cls(mark)
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                process._transport, _ = await process._loop.create_connection(lambda: process, sock=ours)
            except BaseException:
                ours.close()
                raise
            try:
                process._child = _start(theirs.fileno(), folder, mark)
            except BaseException:
                process._transport.abort()
                raise
        process.pid = process._child.pid  # the guard's, until the worker has said its own
        process._child.watch(process._reap)
        return process

    @property
    def wear(self) -> tuple[int, int]:
        """Calls, and bytes gained since the first calls of its functions; since `forgive`, if there was one."""
        return self._calls - self._forgiven[0], self._grown - self._forgiven[1]

    def forgive(self) -> None:
        """Count its wear from here on."""
        self.worn = False
        self._forgiven = (self._calls, self._grown)

    def send(self, kind: Kind, content: dict[str, Any]) -> int:
        """Send a request. Returns its number, for `reply` and `cancel`."""
        payload = cloudpickle.dumps(content, protocol=5)
        self._last_id += 1
        reply = self._replies[self._last_id] = self._loop.create_future()
        if self.hung_up:
            reply.set_result(None)
        else:
            self._transport.write(pack(kind, self._last_id, len(payload)))
            self._transport.write(payload)
        return self._last_id

    def cancel(self, number: int) -> None:
        """End the coroutine of this request; its reply says that it has ended."""
        if not self.hung_up:
            self._transport.write(pack(Kind.CANCEL, number, 0))

    async def reply(self, number: int) -> tuple[Kind, bytes]:
        """Wait for the reply to this request. It may be waited for again after a cancellation. Errors: `WorkerDiedError`."""
        await asyncio.wait([reply := self._replies[number]])
        del self._replies[number]
        if (found := reply.result()) is None:
            raise WorkerDiedError(self.pid, self._status or await self._last_words())
        return found

    def data_received(self, data: bytes) -> None:
        """Of the transport. A reply to a request that is not open is discarded."""
        self._data += data
        try:
            while (frame := take_frame(self._data)) is not None:
                header, payload = frame
                self._calls += header.kind is not Kind.READY
                self._grown = header.grown
                reply = self._replies.get(header.request_id)
                if reply is not None and not reply.done():
                    reply.set_result((header.kind, payload))
        except WireError:
            self._status = "wrote bytes into the protocol's socket that are not ours"
            self.connection_lost(None)
            self.kill()
            self._transport.abort()

    def eof_received(self) -> None:
        """Of the transport, which then closes."""
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Of the transport."""
        if self.hung_up:
            return
        self.hung_up, self.usable, self.died_with = True, False, frozenset(self.calls)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(None)

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
        self._transport.close()
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
        self._transport.abort()

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
