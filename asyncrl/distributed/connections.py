"""The lines from generating ranks to training ranks, beside the line to rank 0.

training rank    has a LineServer of its own, and announces its address to rank 0; rank 0 uses the server that all ranks know
generating rank  gets the address of a training rank from rank 0 when it first needs that rank

The addresses are keys and values at rank 0 (`KeyValues`). torch's process groups use another set of keys and values (`LineStore`).
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

_HERE, _WHERE = "training/here", "training/where"


class KeyValues:
    """Keys and values at rank 0, for one event loop. `answer` is a handler of the line."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def answer(self, peer: str, request: Any, values: Sequence[Buffer]) -> Answer:
        """[set, [key]] writes one value. [get, keys] waits for all keys."""
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
    """Such values as the store of torch's process groups. Its methods block: call them on other threads than the event loop."""

    def __init__(self, call: Callable[[Any, Sequence[Buffer]], Coroutine[Any, Any, Answer]]) -> None:
        """`call(request, buffers)` returns the answer of `KeyValues.answer`. Call this on the event loop."""
        super().__init__()
        self._request, self._loop = call, asyncio.get_running_loop()

    def set(self, key: str, value: str | bytes) -> None:
        """Returns after rank 0 has the value. Errors: those of the line."""
        self._call("set", [key], None, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value; waits for the key. Errors: those of the line."""
        return bytes(self._call("get", [key], None)[1][0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys. Errors: TimeoutError; those of the line."""
        self._call("get", keys, timeout)

    def _call(self, operation: str, keys: Sequence[str], timeout: timedelta | None, *values: bytes) -> Answer:
        call = asyncio.run_coroutine_threadsafe(self._request([operation, keys], values), self._loop)
        try:
            return call.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            call.cancel()
            raise TimeoutError(f"no other node has set {' and '.join(keys)} within {timeout}") from None
        except CancelledError as error:
            raise LifecycleError("the line was closed during a call of the store") from error


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
