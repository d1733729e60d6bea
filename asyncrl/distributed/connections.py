"""The lines (TCP connections, `line.py`) from generating to training ranks. Every rank except rank 0 also has a line to rank 0.

training rank    opens a LineServer and announces its address to rank 0. All ranks know the address of rank 0's own server
generating rank  asks rank 0 for the address of a training rank when it first sends to that rank

Rank 0 keeps the addresses in a `KeyValues`. Process groups that send weights use a second `KeyValues`, through a `LineStore`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import anyio
import torch.distributed as dist

from ..concurrency.offload import offload
from ..errors import LifecycleError
from .exchange import Answer, Buffer
from .line import LineClient, LineServer

_ANNOUNCE, _FIND = "training/here", "training/where"


class KeyValues:
    """A dictionary at rank 0 that other ranks write and read. `answer` is the handler of their messages, on the event loop."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def answer(self, peer: str, request: Any, values: Sequence[Buffer]) -> Answer:
        """["set", [key]] stores one value. ["get", keys] waits until all keys are set, and answers with their values."""
        operation, keys = request
        if operation == "set":
            self._values[keys[0]] = bytes(values[0])
            self._changed.set()
            self._changed = asyncio.Event()
            return None, ()
        while not self._values.keys() >= {*keys}:
            await self._changed.wait()
        return None, [self._values[key] for key in keys]

    def keep(self, prefix: str) -> None:
        """Delete the values whose keys do not begin with `prefix`."""
        self._values = {key: value for key, value in self._values.items() if key.startswith(prefix)}


class LineStore(dist.Store):
    """A `torch.distributed.Store` of the values in a `KeyValues`. The methods block: never call them on the event loop's thread."""

    def __init__(self, call: Callable[[Any, Sequence[Buffer]], Coroutine[Any, Any, Answer]]) -> None:
        """`call(request, buffers)` returns the answer of `KeyValues.answer`. Construct the store on the event loop."""
        super().__init__()
        self._request, self._loop = call, asyncio.get_running_loop()

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value at rank 0, and wait until rank 0 has it. Errors: those of the line."""
        self._call("set", [key], None, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value of the key. Blocks until the key is set. Errors: those of the line."""
        return bytes(self._call("get", [key], None)[1][0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set. Errors: TimeoutError; those of the line."""
        self._call("get", keys, timeout)

    def _call(self, operation: str, keys: Sequence[str], timeout: timedelta | None, *values: bytes) -> Answer:
        call = asyncio.run_coroutine_threadsafe(self._request([operation, keys], values), self._loop)
        try:
            return call.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            call.cancel()
            raise TimeoutError(f"no other rank has set {' and '.join(keys)} within {timeout}") from None
        except CancelledError as error:
            raise LifecycleError("the line was closed during a call of the store") from error


class Connections:
    """The lines of one rank. `async with` closes the servers and clients that this object opened."""

    def __init__(self, line: LineServer | LineClient, rank: int, secret: str) -> None:
        """`line`: the server of rank 0, or this rank's client of that server."""
        self._line, self._rank, self._secret = line, rank, secret
        self._stack = AsyncExitStack()
        self._clients: dict[int, LineClient] = {}
        self._lock = anyio.Lock()
        # On rank 0: training rank -> address of its server.
        self._addresses = KeyValues()
        if isinstance(line, LineServer):
            line.on(_ANNOUNCE, self._addresses.answer)
            line.on(_FIND, self._addresses.answer)

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def serve(self) -> LineServer:
        """The server of this training rank. Call this once, register the handlers, then `announce`. Errors: OSError."""
        if isinstance(self._line, LineServer):
            return self._line
        address = self._line.address
        host = await offload(lambda: _own_address(address), "own-address")
        server = LineServer(self._secret, f"rank {self._rank}", silence_s=self._line.silence_s)
        return await self._stack.enter_async_context(await server.open(host))

    async def announce(self, server: LineServer) -> None:
        """Announce the address of this rank's server to rank 0. On rank 0: does nothing. Errors: RankLost."""
        if isinstance(self._line, LineClient):
            await self._line.ask(_ANNOUNCE, ["set", [str(self._rank)]], [server.address.encode()])

    async def to(self, rank: int) -> LineClient:
        """The line to the training rank `rank`. Waits until `rank` has announced its server. Errors: RankLost."""
        if rank == 0 and isinstance(self._line, LineClient):
            return self._line
        async with self._lock:
            if rank not in self._clients:
                line, get = self._line, ["get", [str(rank)]]
                request = line.ask(_FIND, get) if isinstance(line, LineClient) else self._addresses.answer("", get, ())
                # No timeout: if a training rank dies before it has announced its address, the run ends and closes this line.
                address = bytes((await request)[1][0]).decode()
                name, server = f"rank {self._rank}", f"rank {rank}"
                client = LineClient(address, self._secret, name, server=server, silence_s=line.silence_s)
                self._clients[rank] = await self._stack.enter_async_context(client)
            return self._clients[rank]


def _own_address(address: str) -> str:
    """The local IP address from which this machine reaches the server at `tcp://HOST:PORT`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # On a datagram socket `connect` sends nothing; it only chooses the route.
        probe.connect(target)
        return str(probe.getsockname()[0])
