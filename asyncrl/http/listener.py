"""The sockets of an HTTP door: a bounded number of connections, so that the run keeps its file descriptors.

    kernel's queue ──▶ accepted one by one, while there is room ──▶ aiohttp's handler of the connection
                              │ no room: the connection that has been without a request for longest is closed;
                              ▼ where all have one, nobody is accepted until one has ended

aiohttp itself closes a connection on which no request was complete for `IDLE_S`, be it silent or slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.abc

from .library import web

MOST_CONNECTIONS = 256  # environment servers open one for each request
IDLE_S = 15.0  # from the connection, or the last reply, until the headers of a request are there
GRACE_S = 1.0  # for a connection to bring its request, before it is closed for others
RETRY_S = 0.1  # until another look: nobody says that a connection or a descriptor came free
_BACKLOG = 128
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """Three quarters of the descriptors that this process may have are for the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, soft // 4))


@dataclass(frozen=True, slots=True)
class _Connection:
    transport: asyncio.Transport
    socket: socket.socket
    since: float  # it has been without a request, where it has none

    @property
    def ended(self) -> bool:
        return self.socket.fileno() == -1


class Listener:
    """`await listener.open(host, port)` listens, and `listener.run` in a task accepts for `server` until `close`."""

    def __init__(self, server: web.Server, most: int) -> None:
        self._server = server
        self._most = most
        self._sockets: list[socket.socket] = []
        # By protocol, the one without a request for longest first.
        self._open: dict[Any, _Connection] = {}
        self._busy: set[Any] = set()
        self._freed = anyio.Event()
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope(
            shield=True
        )  # a run that is cancelled still tells its environments that it is over

    async def open(self, host: str, port: int) -> list[tuple[str, int]]:
        """Listens; returns the addresses. Errors: OSError."""
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
                listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
                listening.setblocking(False)
                self._sockets.append(listening)
        except OSError:
            self._close_sockets()
            raise
        return [listening.getsockname()[:2] for listening in self._sockets]

    async def close(self) -> None:
        """Ends `run`: nobody is accepted any more; connections go on."""
        self._scope.cancel()
        await self._ended.wait()

    async def run(self) -> None:
        """Until `close`."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    for listening in self._sockets:
                        tasks.start_soon(self._accept, listening)
        finally:  # not before: the loop still looks at them
            self._close_sockets()
            self._ended.set()

    def _close_sockets(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    @contextlib.contextmanager
    def request(self, protocol: Any) -> Iterator[None]:
        """Around the handling of a request: its connection is not closed to make room for others."""
        self._busy.add(protocol)
        try:
            yield
        finally:
            self._busy.discard(protocol)
            if protocol in self._open:
                self._open[protocol] = replace(self._open.pop(protocol), since=time.monotonic())
            self._freed.set()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await anyio.wait_readable(listening)
            await self._room()
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, ConnectionError):  # the client has gone already
                continue
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                await anyio.sleep(RETRY_S)
                continue
            accepted.setblocking(False)
            with contextlib.suppress(OSError):  # gone, before it was ours
                transport, protocol = await loop.connect_accepted_socket(self._server, accepted)
                self._open[protocol] = _Connection(transport, accepted, time.monotonic())

    async def _room(self) -> None:
        while self._count() >= self._most:
            idle = next((protocol for protocol in self._open if protocol not in self._busy), None)
            if idle is None or time.monotonic() < self._open[idle].since + GRACE_S:
                self._freed = anyio.Event()
                with anyio.move_on_after(RETRY_S):
                    await self._freed.wait()
                continue
            self._open[idle].transport.abort()
            while not self._open[idle].ended:
                await anyio.lowlevel.checkpoint()  # the loop closes it in its next step

    def _count(self) -> int:
        self._open = {protocol: connection for protocol, connection in self._open.items() if not connection.ended}
        return len(self._open)
