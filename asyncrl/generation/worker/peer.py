"""One worker as the node sees it, for one life of its process: what it was sent, what it said, and how it ended."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from asyncrl.concurrency.child import ChildProcess, open_output
from asyncrl.errors import ConfigError, DivergenceError, TransportError, WorkerDied
from asyncrl.telemetry.parcels import unpack
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.tensor_queue import TensorSender, share_queue
from asyncrl.types import GenerationRequest

from .names import segment_name
from .wire import ABOUT_BYTES, item_of

PROGRAM = "asyncrl.generation.worker.main"
_ALIGNMENT = 256  # of the two arrays of a request in the queue's arena, at most
_LEAVE_S = 5.0  # for a worker that was asked to end, before it is killed


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is made of. `message`: what it is told first; `fds`: what it inherits, under the same numbers."""

    message: Mapping[str, Any]
    fds: Sequence[int]
    environment: Mapping[str, str]  # beside ours
    log: Path | None
    capacity: int  # requests that it may have
    longest: int  # tokens of a prompt


@dataclass(slots=True)
class Said:
    """The newest of what a worker reported."""

    heard: float  # loop time
    statistics: dict[str, float] = field(default_factory=dict)
    closure: tuple[str, float] | None = None  # what its lane computes, and for how many seconds


class Peer:
    """See the module docstring. Made by `start`; `hear` goes on until the process has ended."""

    def __init__(self, number: int, process: ChildProcess, requests: TensorSender) -> None:
        self.number = number
        self.process = process
        self.ready = False  # it has loaded its model
        self.producer = b""  # by which the record ring knows it
        self.bound = -1  # version of the weights that it computes with
        self.told = -1  # version that it was told last
        self.said = Said(asyncio.get_running_loop().time())
        self._processor_s, self._computed = 0.0, self.said.heard  # what it had computed when it last had more, and when
        self._leaving = False  # it hung up
        self._reason: str | None = None  # why it was killed
        self._requests = requests
        self._outbox: deque[tuple[int, GenerationRequest | None]] = deque()
        self._sendable = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def start(cls, number: int, setup: Setup, ring: str) -> AsyncIterator[Peer]:
        """Process and request queue; both are gone at the end, whatever the end is. `ring`: for what it finishes."""
        name = segment_name("requests", number)
        size = setup.capacity * (4 * setup.longest + ABOUT_BYTES + _ALIGNMENT)
        async with share_queue(name, setup.capacity, size, linger_s=0) as sender:
            environment, output = os.environ | setup.environment, open_output(setup.log)
            process = ChildProcess(f"worker {number}", PROGRAM, fds=setup.fds, environment=environment, output=output)
            try:
                edges = {"number": number, "requests": name, "sequences": ring}
                process.channel.send({"setup": {**setup.message, **edges}})
                yield cls(number, process, sender)
            finally:
                await process.aclose(_LEAVE_S)

    def put(self, number: int, request: GenerationRequest | None) -> None:
        """Send a request, or (None) that it was given up, in order; at once, or as soon as there is room."""
        self._outbox.append((number, request))
        self._sendable.set()

    def tell(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """These are the weights now: it moves to them between two closures, and says so; then it compares."""
        self.told = version
        self.process.channel.send({"weights": version, "half": half, "outputs": outputs})

    async def send(self) -> None:
        """What was put goes out; for ever, or until the other side hung up."""
        while True:
            while self._outbox:
                try:
                    await self._requests.put(item_of(*self._outbox[0], more=len(self._outbox) > 1))
                except anyio.BrokenResourceError:
                    return  # it has ended, as `hear` tells, or has to: see `culprit`
                self._outbox.popleft()
            self._sendable = anyio.Event()
            await self._sendable.wait()

    async def hear(self, recorder: Recorder, on: Callable[[Peer, dict[str, Any]], None]) -> None:
        """Until it ends: keep what it says, and pass it on. Errors: WorkerDied; DivergenceError where its weights are wrong;
        ConfigError where its engine refused."""
        while True:
            try:
                message = await self.process.channel.receive()
            except (EOFError, TransportError) as error:
                self._leaving = True
                if isinstance(error, TransportError):
                    self.kill(str(error))
                await self.process.aclose(_LEAVE_S)  # who hung up may be writing its last lines
                raise self._died() from None
            self.said.heard = asyncio.get_running_loop().time()
            if "wrong" in message:
                raise DivergenceError(f"worker {self.number}: {message['wrong']}")
            if "refused" in message:
                raise ConfigError(str(message["refused"]))
            if "report" in message:
                report = message["report"]
                self.said.statistics = report["statistics"]
                self.said.closure = tuple(report["closure"]) if report["closure"] else None
                unpack(recorder, report["parcel"], f"worker{self.number}")
            if "ready" in message:
                self.ready = True
                self.producer = bytes.fromhex(message["ready"])
            if "bound" in message:
                self.bound = int(message["bound"])
            on(self, message)

    def kill(self, reason: str) -> None:
        """At once; `hear` ends with the reason."""
        self._reason = reason
        self.process.kill()

    def _died(self) -> WorkerDied:
        status = self.process.status if self._reason is None else f"{self.process.status}: {self._reason}"
        return WorkerDied(self.number, self.process.pid, status, self.process.last_lines())

    def culprit(self, start_s: float, silent_s: float, closure_s: float) -> str | None:
        """What is wrong with a process that lives, in words; None: nothing is. `start_s`: of silence, or in one closure, for one
        that is starting. That one may import torch in silence, but has `silent_s` alone where it does not even compute."""
        if self._leaving:
            return None
        if self.ready and not self._requests.has_receiver:
            return "it has closed its request queue"
        now, processor_s = asyncio.get_running_loop().time(), self.process.processor_s()
        if processor_s != self._processor_s:
            self._processor_s, self._computed = processor_s, now
        silent, still = now - self.said.heard, now - max(self.said.heard, self._computed)
        if silent > (silent_s if self.ready else start_s) or still > silent_s:
            return f"it has said nothing for {silent:.0f} s: it is stopped, or its event loop is blocked"
        if self.said.closure is not None and self.said.closure[1] > (closure_s if self.ready else start_s):
            return f"its closure {self.said.closure[0]} has run for {self.said.closure[1]:.0f} s"
        return None
