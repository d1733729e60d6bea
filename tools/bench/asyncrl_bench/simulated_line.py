"""The line of a simulated run: its real messages, numbers, windows and answers, without a socket, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from asyncrl.distributed.exchange import ASK, TELL, Exchange
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.pumps.travel import KIND

# Processor time of an event loop for a request with its answer, and of a record of 16 x 256 tokens (tools/results/nodes.md).
MESSAGE_S, RECORD_S = 41e-6, 2.2e-3
LATENCY_S, BYTES_PER_S, BUCKET_BYTES = 1e-4, 12.5e9, 64 << 20
SECRET = "the secret of a simulated run"


class Process:
    """The event loop and the link of a rank. `serial`: the loop handles one message after the other."""

    def __init__(self, name: str, *, serial: bool) -> None:
        self.name, self.serial = name, serial
        self.busy = self._free_at = self._link_free_at = 0.0
        self.handled: Counter[str] = Counter()  # kind of message -> number

    def spend(self, seconds: float) -> float:
        """The time at which the loop has done this."""
        now = asyncio.get_running_loop().time()
        if not self.serial:
            return now
        self.busy += seconds
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at

    def send(self, frames: Sequence[Any], to: Process, exchange: Exchange) -> None:
        """Send a message to the other end, whose exchange receives it."""
        asks = frames[0][1] - ord("0") in (ASK, TELL)
        # An answer is part of the time of its request.
        ready = self.spend(MESSAGE_S / 2) if asks else asyncio.get_running_loop().time()
        self._link_free_at = max(self._link_free_at, ready) + sum(map(len, frames)) / BYTES_PER_S
        at = self._link_free_at + LATENCY_S
        asyncio.get_running_loop().call_at(at, to._arrived, asks, [bytes(frames[0]), *frames[1:]], exchange)

    def _arrived(self, asks: bool, frames: Sequence[Any], exchange: Exchange) -> None:
        message = orjson.loads(frames[0])
        kind = message[4]
        if asks:
            self.handled[f"{kind} {message[5][0]}" if kind == "ledger" else kind] += 1
        done = self.spend(RECORD_S if kind == KIND else MESSAGE_S if asks else MESSAGE_S / 2)
        buffers = [memoryview(frame) for frame in frames[1:]]
        if self.serial:
            asyncio.get_running_loop().call_at(done, exchange.receive, message, buffers)
        else:
            exchange.receive(message, buffers)


class Server(LineServer):
    """A `LineServer` without a socket."""

    def __init__(self, process: Process) -> None:
        super().__init__(SECRET, process.name)
        self.process = process
        self.clients: dict[str, Client] = {}
        self.on_wait: Callable[[str, str], None] = lambda peer, state: None

    def on(self, kind: str, handler: Any) -> None:
        async def run(peer: str, header: Any, buffers: Any) -> Any:
            admits = kind == "ledger" and header[0] == "admit"
            if admits:
                self.on_wait(peer, "slots")
            try:
                return await handler(peer, header, buffers)
            finally:
                if admits:
                    self.on_wait(peer, "rank 0")

        super().on(kind, run)

    def _send(self, frames: Sequence[Any]) -> None:
        client = self.clients[bytes(frames[0]).decode()]
        self.process.send(frames[1:], client.process, client.link)

    async def aclose(self) -> None:
        self._closed = True


class Client(LineClient):
    """A `LineClient` without a socket."""

    def __init__(self, process: Process, server: Server) -> None:
        super().__init__("simulated", SECRET, process.name, server=server.name)
        self.process, self.server, self._server_id = process, server, "simulated"
        name = process.name.encode()
        server.clients[process.name] = self
        self._there = server._peers[process.name] = Exchange(
            server.name, process.name, "", server._handlers, lambda frames: server._send([name, *frames])
        )

    @property
    def link(self) -> Exchange:
        return self._exchange

    def _send(self, frames: Sequence[Any]) -> None:
        self.process.send(frames, self.server.process, self._there)

    async def aclose(self) -> None:
        self._closed = True
