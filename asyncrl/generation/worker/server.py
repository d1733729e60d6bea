"""What a worker does, from the setup to the end of its node.

It builds the form of the model, binds the parameters to the weight board, and serves the request queue with an engine: the one
that a node runs in `shared`, or vLLM's (`opening.py`); a lane for the closures, one owner task. The loop only moves messages while
a closure runs.

    {"setup": ...}              node -> worker    first of all
    {"stage": text}             worker -> node    while it starts
    {"ready": producer}         worker -> node    the model is there; `producer` is its name in the record ring
    {"weights": v, "half": h, "outputs": o}
                                node -> worker    these are the weights now, and what the trainer computes with them, if given
    {"bound": v}                worker -> node    every token from now on is sampled with them
    {"report": ...}             worker -> node    every `_REPORT_S`: statistics, what the lane does, what was recorded
    {"failed": n, "error": e}   worker -> node    request n cannot be served
    {"refused": text}           worker -> node    its engine cannot run this model, or has no memory: a ConfigError of the node
    {"wrong": text}             worker -> node    its weights are not those of the board: the run has to end
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
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
from asyncrl.errors import ConfigError, GenerationError, OutOfMemory, RingFull
from asyncrl.models.outputs import Comparisons
from asyncrl.telemetry.parcels import pack
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.transport.memory.halves import Looked, Passing
from asyncrl.transport.queues.tensor_receive import TensorReceiver, attach_queue
from asyncrl.transport.rings.producer import AsyncProducer
from asyncrl.types import Generation, GenerationRequest, PostedVersion

from .opening import open_serving, passed
from .serving import Serving
from .wire import read_item, sequence_plan

_REPORT_S = 0.1
_SLICE_S = 0.001  # between two closures, so that nobody who generates sees it


class Server:
    """What a worker does once its engine is open."""

    def __init__(
        self,
        control: Channel,
        engine: Serving,
        lane: ThreadLane,
        board: Board,
        producer: AsyncProducer,
    ) -> None:
        self._control = control
        self._engine = engine
        self._lane = lane
        self._board = board
        self._producer = producer
        self._recorder = engine.recorder
        self._comparisons = Comparisons(engine.bound)
        self._scopes: dict[int, anyio.CancelScope] = {}  # of the requests that it has, by number
        self._halves = [board.half(0), board.half(1)]
        self._half = -1  # what the modules read
        self._moved = anyio.Event()
        self._moving: PostedVersion | None = None
        self._next: PostedVersion | None = None  # newer than that
        self._told = anyio.Event()

    async def take(self, requests: TensorReceiver, tasks: TaskGroup) -> None:
        """For ever: requests begin, those together that the node sent together, and those that were given up end."""
        begun: list[tuple[int, GenerationRequest]] = []
        async for item in requests:
            with item:
                number, request, more = read_item(item)
            if request is not None:
                self._scopes[number] = anyio.CancelScope()
                begun.append((number, request))
            elif number in self._scopes:  # else it has ended, and the answer is on its way
                self._scopes[number].cancel()
            for each in () if more else begun:
                spawn(tasks, f"request {each[0]}", self._generate, *each)
            begun = begun if more else []

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        try:
            with self._scopes[number]:
                await self._put(number, await self._engine.generate(request))
        except GenerationError as error:
            if self._engine.failed:
                raise
            self._control.send({"failed": number, "error": str(error)})
        finally:
            del self._scopes[number]

    async def _put(self, number: int, generation: Generation) -> None:
        plan = sequence_plan(number, generation, self._engine.version)
        while True:
            with contextlib.suppress(RingFull):  # the node is late: its own watchdog knows
                return await self._producer.put(plan)

    def tell(self, move: PostedVersion) -> None:
        """The weights are these now; `follow` goes there. Told again what it is at: that is answered once."""
        if self._moving is None or self._moving[:2] != move[:2]:
            self._next = move
            self._told.set()

    async def follow(self) -> None:
        """For ever: to the newest weights that the node has told of."""
        while True:
            await self._told.wait()
            self._told = anyio.Event()
            while self._next is not None:
                self._moving, self._next = self._next, None
                await self.move(*self._moving)
                self._moving = None

    async def move(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        """To these weights, between two closures. `outputs`: what has to come out, computed after the node has its answer."""
        if self._board.copies and half != self._half:
            await passed(await self._lane.run(partial(self._board.fetch, half), name="engine/fetch", priority=1))

        def bind() -> tuple[int | None, Passing]:
            found = self._board.version(half)
            if found == version:
                self._engine.move_to(self._halves[half], version)
                self._half = half
            return found, self._board.leave()

        found, left = await self._lane.run(bind, name="engine/bind", priority=1)
        if found != version:
            return await self._say_wrong(f"the board holds version {found} where version {version} was announced")
        # No closure that reads the other half is left, and the next one notices the version: the node need not wait for it. What
        # closures of before have launched on a GPU is waited for here, beside those that follow.
        await passed(left)
        self._control.send({"bound": version})
        self._moved.set()
        self._moved = anyio.Event()
        if outputs is not None:
            await self._compare(version, outputs)

    async def _compare(self, version: int, outputs: Sequence[float]) -> None:
        theirs = [math.nan if each is None else each for each in outputs]  # JSON has no NaN
        found, wrong = self._comparisons.judge(await self._engine.outputs(), theirs)
        self._recorder.observe("weights/outputs_nats", found, reduce="max")
        if wrong is not None:
            await self._say_wrong(f"with the weights of version {version} it computes {wrong}")

    async def check(self) -> None:
        """For ever: after each move, every bucket that the modules read is compared with its checksum, some between two closures.

        A large model may move on before all were: the next version goes on with the bucket after the last one."""
        await self._moved.wait()
        following, buckets = 0, self._board.buckets
        while True:
            moved = self._moved
            version, left = self._engine.version, buckets
            while left and not moved.is_set():
                read, looked = await self._lane.run(partial(self._look, following, left), name="engine/check")
                following, left = (following + looked.buckets) % buckets, left - looked.buckets
                await passed(looked.passing)
                bucket = looked.wrong()
                if bucket is not None:
                    return await self._say_wrong(
                        f"bucket {bucket} of the weights of version {read} is not what the trainer wrote"
                    )
            if not left:
                self._recorder.observe("weights/checked_version", version, reduce="min")
            await moved.wait()

    async def _say_wrong(self, text: str) -> None:
        """The node ends the run, and us."""
        self._control.send({"wrong": text})
        await self._control.drain()

    def _look(self, first: int, most: int) -> tuple[int, Looked]:
        """On the lane, for `_SLICE_S`: the version that the modules read, and what is found of buckets of it."""
        looked = self._board.inspect(self._half, first, min(most, self._board.buckets - first), _SLICE_S)
        return self._engine.version, looked

    async def obey(self) -> None:
        """Until the node hangs up."""
        with contextlib.suppress(EOFError):
            while True:
                message = await self._control.receive()
                if "weights" in message:
                    self.tell(PostedVersion(int(message["weights"]), int(message["half"]), message["outputs"]))


async def report(control: Channel, lane: ThreadLane, recorder: Recorder, engines: Sequence[Serving]) -> None:
    """For ever, from the start on: what the node shows, and what it watches. `closure`: what the lane computes, and for how long.
    `engines`: the one, once it is there."""
    while True:
        current = lane.current()
        control.send(
            {
                "report": {
                    "statistics": engines[0].statistics() if engines else {},
                    "closure": current and [current[0], awake.now() - current[1]],
                    "parcel": pack(recorder),
                }
            }
        )
        # Where nobody reads them, such as a node that was stopped, reports do not pile up.
        await control.drain()
        await anyio.sleep(_REPORT_S)


async def serve(control: Channel) -> None:
    """All of it, from the setup to the end of the node."""
    setup = (await control.receive())["setup"]
    print(f"worker {setup['number']}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    config = schema_of(setup["config"]).model_validate(setup["config"])
    device = torch.device(setup["device"])
    recorder = Recorder(max_events=0)

    def on_start() -> None:
        torch.set_num_threads(setup["threads"])
        if device.type == "cuda":
            torch.cuda.set_device(device)

    async with ThreadLane(f"worker{setup['number']}", recorder, on_start) as lane, plain_task_group() as tasks:
        engines: list[Serving] = []
        spawn(tasks, "reports", report, control, lane, recorder, engines)
        try:
            engine, board = await open_serving(
                setup, config, device, lane, recorder, lambda text: control.send({"stage": text})
            )
        except (ConfigError, OutOfMemory) as error:
            traceback.print_exc()  # the sentence is for the node, the rest for the log
            control.send({"refused": str(error)})
            await control.drain()
            tasks.cancel_scope.cancel()
            return
        producer = await AsyncProducer.attach(setup["sequences"])
        requests = await attach_queue(setup["requests"])
        async with engine, producer:
            server = Server(control, engine, lane, board, producer)
            engines.append(engine)
            spawn(tasks, "requests", server.take, requests, tasks)
            spawn(tasks, "moves of the weights", server.follow)
            spawn(tasks, "checks of the weights", server.check)
            control.send({"ready": producer.identity.hex()})
            await server.obey()
            tasks.cancel_scope.cancel()


async def main(descriptor: int) -> None:
    """Serve the node behind this socket."""
    line = Channel(socket.socket(fileno=descriptor), "the node")
    try:
        with awake.on_loop(asyncio.get_running_loop()):  # `report` reads it
            await serve(line)
    finally:
        line.close()
