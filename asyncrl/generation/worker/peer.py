"""One worker as the node sees it, for one life of its process: what it was sent, what it reported, and how it ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.concurrency.child import ChildProcess, open_output
from asyncrl.errors import ConfigError, DivergenceError, TransportError, WorkerDied
from asyncrl.telemetry.parcels import unpack
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import GenerationRequest

from .wire import requests_message

PROGRAM = "asyncrl.generation.worker.main"
# For a worker that was asked to end, before it is killed.
LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is made of. `message`: the first that it is sent; `fds`: what it inherits, under the same numbers;
    `environment`: beside ours; `log`: the file of its output."""

    message: Mapping[str, Any]
    fds: Sequence[int]
    environment: Mapping[str, str]
    log: Path | None


class Peer:
    """See the module docstring. `process.aclose` must follow; `receive` goes on until the process has ended."""

    def __init__(self, number: int, setup: Setup) -> None:
        """Starts the process. Errors: OSError."""
        self.number = number
        # It has loaded its model.
        self.ready = False
        # Versions of the weights: that it computes with, and that it was sent last.
        self.bound = self.target = -1
        # Of its newest report. `closure`: what its lane computes, and for how many seconds.
        self.statistics: dict[str, float] = {}
        self.closure: tuple[str, float] | None = None
        # Loop times: of its newest message, and when its processor time was last seen to grow.
        self.heard = self._computed = asyncio.get_running_loop().time()
        self._processor_s = 0.0
        self._leaving = False
        # Why it was killed.
        self._reason: str | None = None
        self._outbox: list[tuple[int, GenerationRequest | None]] = []
        environment, output = os.environ | setup.environment, open_output(setup.log)
        self.process = ChildProcess(f"worker {number}", PROGRAM, fds=setup.fds, environment=environment, output=output)
        self.process.channel.send({"setup": {**setup.message, "number": number}})

    def put(self, number: int, request: GenerationRequest | None) -> None:
        """Send a request, or (None) that it was given up, in order. Those of one turn of the loop go together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((number, request))

    def send_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """These are the weights now: it moves to them between two closures, and answers; then it compares."""
        self.target = version
        self.process.channel.send({"weights": version, "half": half, "outputs": outputs})

    def _flush(self) -> None:
        message, data = requests_message(self._outbox)
        self._outbox.clear()
        self.process.channel.send(message, data)

    async def receive(self, recorder: Recorder, on_message: Callable[[Peer, dict[str, Any]], None]) -> None:
        """Until it ends: keep what it reports, and pass its messages on. Errors: WorkerDied; DivergenceError where its weights are
        wrong; ConfigError where its engine refused."""
        while True:
            try:
                message = await self.process.channel.receive()
            except (EOFError, TransportError) as error:
                self._leaving = True
                if isinstance(error, TransportError):
                    self.kill(str(error))
                # Who hung up may be writing its last lines.
                await self.process.aclose(LEAVE_S)
                raise self._died() from None
            self.heard = asyncio.get_running_loop().time()
            if "wrong" in message:
                raise DivergenceError(f"worker {self.number}: {message['wrong']}")
            if "refused" in message:
                raise ConfigError(str(message["refused"]))
            if "report" in message:
                report = message["report"]
                self.statistics = report["statistics"]
                self.closure = tuple(report["closure"]) if report["closure"] else None
                unpack(recorder, report["parcel"], f"worker{self.number}")
            if "ready" in message:
                self.ready = True
            if "bound" in message:
                self.bound = int(message["bound"])
            on_message(self, message)

    def kill(self, reason: str) -> None:
        """At once; `receive` ends with the reason."""
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
        now, processor_s = asyncio.get_running_loop().time(), self.process.processor_s()
        if processor_s != self._processor_s:
            self._processor_s, self._computed = processor_s, now
        silent, still = now - self.heard, now - max(self.heard, self._computed)
        if silent > (silent_s if self.ready else start_s) or still > silent_s:
            return f"it has said nothing for {silent:.0f} s: it is stopped, or its event loop is blocked"
        if self.closure is not None and self.closure[1] > (closure_s if self.ready else start_s):
            return f"its closure {self.closure[0]} has run for {self.closure[1]:.0f} s"
        return None
