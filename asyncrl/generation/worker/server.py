"""The program of a generation worker. `rank` is the process that started the worker.

A worker builds the model, takes the weights from the weight board (it *binds* a version), and serves requests with an engine: the
embedded engine or vLLM (`opening.py`). Closures of the engine run on the lane (device thread). The event loop only moves messages.

    {"setup": ...}              rank -> worker    the first message
    {"stage": text}             worker -> rank    progress of the start
    {"ready": true}             worker -> rank    the model is loaded
    {"weights": v, "half": h, "outputs": o}
                                rank -> worker    move to version v, in half h of the board; o: see `PostedVersion`
    {"bound": v}                worker -> rank    from now on tokens are sampled with this version
    {"report": ...}             worker -> rank    every `_REPORT_S`: statistics, running closure, telemetry
    {"requests": count}         rank -> worker    with a pickle: [(number, request; None cancels it), ...], [ended session, ...]
    {"sequence": n}             worker -> rank    with a pickle: the `Generation` of request n
    {"failed": n, "error": e}   worker -> rank    request n cannot be served
    {"refused": text}           worker -> rank    the engine cannot run this model, or lacks memory: the rank raises ConfigError
    {"wrong": text}             worker -> rank    the board has another version, or log-probs differ: the run ends
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import time
import traceback
from collections.abc import Sequence
from functools import partial

import anyio
import torch
from anyio.abc import TaskGroup

from asyncrl.concurrency import awake
from asyncrl.concurrency.channel import Channel
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.config.schema import schema_of
from asyncrl.errors import ConfigError, GenerationError, OutOfMemory
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.types import GenerationRequest, PostedVersion
from asyncrl.weights.sync import WeightReader

from .opening import Serving, create_engine

_REPORT_S = 0.1


class Server:
    """Serves the requests of the rank with an open engine."""

    def __init__(self, control: Channel, engine: Serving, lane: ThreadLane, board: Board) -> None:
        self._control = control
        self._engine = engine
        self.weights = WeightReader(board, engine, lane, control.send)
        # Number of a running request -> its cancel scope.
        self._scopes: dict[int, anyio.CancelScope] = {}

    async def receive(self, tasks: TaskGroup) -> None:
        """Until the rank closes the channel: set the version to move to, start requests, cancel requests, end sessions."""
        with contextlib.suppress(EOFError):
            while True:
                message = await self._control.receive()
                if "weights" in message:
                    weights = PostedVersion(int(message["weights"]), int(message["half"]), message["outputs"])
                    self.weights.set_target(weights)
                if "requests" not in message:
                    continue
                requests, ended_sessions = pickle.loads(message["data"])
                for number, request in requests:
                    if request is not None:
                        self._scopes[number] = anyio.CancelScope()
                        spawn(tasks, f"request {number}", self._generate, number, request)
                    # A request without a scope has ended, and its answer was sent.
                    elif number in self._scopes:
                        self._scopes[number].cancel()
                for session in ended_sessions:
                    self._engine.end_session(session)

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        try:
            with self._scopes[number]:
                generation = await self._engine.generate(request)
                self._control.send({"sequence": number}, pickle.dumps(generation, pickle.HIGHEST_PROTOCOL))
        except GenerationError as error:
            if self._engine.failure is not None:
                raise
            self._control.send({"failed": number, "error": str(error)})
        finally:
            del self._scopes[number]


async def report(control: Channel, lane: ThreadLane, recorder: Recorder, engines: Sequence[Serving]) -> None:
    """Send reports until cancelled, also during the start. `engines`: empty until the engine is open. A report has the name and the
    seconds of the closure that the lane runs now."""
    while True:
        current = lane.current()
        closure = None if current is None else [current[0], awake.now() - current[1]]
        statistics = engines[0].statistics() if engines else {}
        control.send({"report": {"statistics": statistics, "closure": closure, "parcel": recorder.take_parcel()}})
        # Reports must not pile up while the rank is stopped and does not read them.
        await control.drain()
        await anyio.sleep(_REPORT_S)


async def serve(control: Channel) -> None:
    """Serve from the setup message until the rank closes the channel."""
    setup = (await control.receive())["setup"]
    print(f"worker {setup['number']}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    config = schema_of(setup["config"]).model_validate(setup["config"])
    device = torch.device(setup["devices"][0])
    name, recorder = f"worker{setup['number']}", Recorder(max_events=0)

    def on_start() -> None:
        torch.set_num_threads(setup["threads"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
            recorder.register_device(name, partial(torch.cuda.Event, enable_timing=True))

    async with ThreadLane(name, recorder, on_start) as lane, plain_task_group() as tasks:
        engines: list[Serving] = []
        spawn(tasks, "reports", report, control, lane, recorder, engines)
        try:
            engine, board = await create_engine(
                setup, config, device, lane, recorder, lambda text: control.send({"stage": text})
            )
        except (ConfigError, OutOfMemory) as error:
            traceback.print_exc()  # into the worker's log; the rank gets only the message
            control.send({"refused": str(error)})
            await control.drain()
            tasks.cancel_scope.cancel()
            return
        async with engine:
            server = Server(control, engine, lane, board)
            engines.append(engine)
            spawn(tasks, "moves of the weights", server.weights.run)
            control.send({"ready": True})
            await server.receive(tasks)
            tasks.cancel_scope.cancel()


async def main(descriptor: int) -> None:
    """Serve the rank behind this socket."""
    channel = Channel(socket.socket(fileno=descriptor), "the rank")
    try:
        with awake.on_loop(asyncio.get_running_loop()):  # `report` reads this clock
            await serve(channel)
    finally:
        channel.close()
