"""A worker process as its rank sees it: what the worker was sent, what it reported, and how it died."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.concurrency.child import ChildProcess, open_output
from asyncrl.errors import ConfigError, DivergenceError, TransportError, WorkerDied
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import GenerationRequest

PROGRAM = "asyncrl.generation.worker.main"
# A worker that was asked to end is killed after this time.
LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Setup:
    """How a worker is started. `message`: the first message to the worker; `fds`: descriptors that it inherits, under the same
    numbers; `environment`: variables added to those of this process; `log`: file for its output; None: a temporary file."""

    message: Mapping[str, Any]
    fds: Sequence[int]
    environment: Mapping[str, str]
    log: Path | None


class Peer:
    """See the module docstring. `receive` runs until the process has ended. Call `process.aclose` afterwards."""

    def __init__(self, number: int, setup: Setup) -> None:
        """Start the process. Errors: OSError."""
        self.number = number
        # Whether the worker has loaded its model.
        self.ready = False
        # The version that the worker computes with, and the version that it was sent last. -1: none.
        self.version = self.sent_version = -1
        # From the newest report. `closure`: (name, running time in seconds) of the closure on the worker's lane; None: none runs.
        self.statistics: dict[str, float] = {}
        self.closure: tuple[str, float] | None = None
        # By the event loop's clock: when the newest message came, and when `hang_reason` last found that the CPU time had changed.
        self.last_message_at = self._computed_at = asyncio.get_running_loop().time()
        self._processor_s = 0.0
        self._leaving = False
        # Why the worker was killed.
        self._reason: str | None = None
        self._outbox: list[tuple[int, GenerationRequest | None]] = []
        self._ended_sessions: list[str] = []
        environment, output = os.environ | setup.environment, open_output(setup.log)
        self.process = ChildProcess(f"worker {number}", PROGRAM, fds=setup.fds, environment=environment, output=output)
        self.process.channel.send({"setup": {**setup.message, "number": number}})

    def put(self, number: int, request: GenerationRequest | None) -> None:
        """Send request `number`, or cancel it if `request` is None. One message has all requests of a loop iteration, in order."""
        self._flush_soon()
        self._outbox.append((number, request))

    def end_session(self, session: str) -> None:
        """Send the end of a session. The message also has the requests of this iteration, which the worker begins first."""
        self._flush_soon()
        self._ended_sessions.append(session)

    def send_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """Announce a version in `half` of the weight board. Between two closures the worker binds its modules to this half, and
        reports `bound`. Then it compares `outputs` with its own log-probs of the fixed row (models/outputs.py)."""
        self.sent_version = version
        self.process.channel.send({"weights": version, "half": half, "outputs": outputs})

    def _flush_soon(self) -> None:
        if not self._outbox and not self._ended_sessions:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        data = pickle.dumps((self._outbox, self._ended_sessions), pickle.HIGHEST_PROTOCOL)
        self.process.channel.send({"requests": len(self._outbox)}, data)
        self._outbox.clear()
        self._ended_sessions.clear()

    async def receive(self, recorder: Recorder, on_message: Callable[[Peer, dict[str, Any]], None]) -> None:
        """Receive messages until the worker ends, and store its reports. Errors: WorkerDied; DivergenceError for wrong weights;
        ConfigError if the worker's engine cannot run the model."""
        while True:
            try:
                message = await self.process.channel.receive()
            except (EOFError, TransportError) as error:
                self._leaving = True
                if isinstance(error, TransportError):
                    self.kill(str(error))
                # A worker that closed its channel may still write the error that ends it.
                await self.process.aclose(LEAVE_S)
                raise self._died() from None
            self.last_message_at = asyncio.get_running_loop().time()
            if "wrong" in message:
                raise DivergenceError(f"worker {self.number}: {message['wrong']}")
            if "refused" in message:
                raise ConfigError(str(message["refused"]))
            if "report" in message:
                report = message["report"]
                self.statistics = report["statistics"]
                self.closure = tuple(report["closure"]) if report["closure"] else None
                recorder.add_parcel(report["parcel"], f"worker{self.number}")
            if "ready" in message:
                self.ready = True
            if "bound" in message:
                self.version = int(message["bound"])
            on_message(self, message)

    def kill(self, reason: str) -> None:
        """Kill the worker at once; `receive` raises WorkerDied with this reason."""
        self._reason = reason
        self.process.kill()

    def _died(self) -> WorkerDied:
        status = self.process.status if self._reason is None else f"{self.process.status}: {self._reason}"
        return WorkerDied(self.number, self.process.pid, status, self.process.last_lines())

    def hang_reason(self, start_s: float, silent_s: float, closure_s: float) -> str | None:
        """Why a living worker hangs, or None. Call this regularly: it measures CPU time between calls. Limits: `silent_s` without a
        message, `closure_s` in one closure. While the worker starts, both limits are `start_s`. But a starting worker that
        sends no message and uses no CPU time for `silent_s` hangs: importing torch takes long, but uses CPU time."""
        if self._leaving:
            return None
        now, processor_s = asyncio.get_running_loop().time(), self.process.processor_s()
        if processor_s != self._processor_s:
            self._processor_s, self._computed_at = processor_s, now
        silent, idle = now - self.last_message_at, now - max(self.last_message_at, self._computed_at)
        if silent > (silent_s if self.ready else start_s) or idle > silent_s:
            return f"it has sent nothing for {silent:.0f} s: it is stopped, or its event loop is blocked"
        if self.closure is not None and self.closure[1] > (closure_s if self.ready else start_s):
            return f"its closure {self.closure[0]} has run for {self.closure[1]:.0f} s"
        return None
