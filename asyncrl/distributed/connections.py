"""The lines from generating ranks to training ranks, beside the line to rank 0.

training rank    has a LineServer of its own, and announces its address to rank 0; rank 0 uses the server that all ranks know
generating rank  gets the address of a training rank from rank 0 when it first needs that rank
"""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from typing import Any

import anyio

from ..concurrency.offload import offload
from .line import LineClient, LineServer
from .values import KeyValues

_HERE, _WHERE = "training/here", "training/where"


class Connections:
    """The lines of one rank. `async with` closes the lines that `Connections` opened."""

    def __init__(self, line: LineServer | LineClient, rank: int, secret: str) -> None:
        """`line`: the server of rank 0, or this rank's client of that server."""
        self._line, self._rank, self._secret = line, rank, secret
        self._stack = AsyncExitStack()
        self._clients: dict[int, LineClient] = {}
        self._lock = anyio.Lock()
        # On rank 0: training rank -> address of its server.
        self._addresses = KeyValues()
        if isinstance(line, LineServer):
            line.on(_HERE, self._addresses.answer)
            line.on(_WHERE, self._addresses.answer)

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def serve(self) -> LineServer:
        """The server of this training rank. Call it once, then register the handlers, then `announce`.
        Errors: OSError if this rank cannot listen."""
        if isinstance(self._line, LineServer):
            return self._line
        address = self._line.address
        host = await offload(lambda: _own_address(address), "own-address")
        server = LineServer(self._secret, f"rank {self._rank}", silence_s=self._line.silence_s)
        return await self._stack.enter_async_context(await server.open(host))

    async def announce(self, server: LineServer) -> None:
        """Announce the address of this rank's server to rank 0. Errors: RankLost."""
        if isinstance(self._line, LineClient):
            await self._line.ask(_HERE, ["set", [str(self._rank)]], [server.address.encode()])

    async def to(self, rank: int) -> LineClient:
        """The line to another training rank. Waits until that rank has announced its server. Errors: RankLost."""
        if rank == 0 and isinstance(self._line, LineClient):
            return self._line
        async with self._lock:
            if rank not in self._clients:
                line, get = self._line, ["get", [str(rank)]]
                request = line.ask(_WHERE, get) if isinstance(line, LineClient) else self._addresses.answer("", get, ())
                # If a training rank dies before it has announced its address, the run ends, and this line with it.
                address = bytes((await request)[1][0]).decode()
                name, server = f"rank {self._rank}", f"rank {rank}"
                client = LineClient(address, self._secret, name, server=server, silence_s=line.silence_s)
                self._clients[rank] = await self._stack.enter_async_context(client)
            return self._clients[rank]


def _own_address(address: str) -> str:
    """The address of this machine on the way to a server at `tcp://HOST:PORT`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # On a datagram socket `connect` sends nothing; it only chooses the route.
        probe.connect(target)
        return str(probe.getsockname()[0])
