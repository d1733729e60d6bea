"""A node of a broadcast as a process: `python broadcast_helpers.py JSON`. Rank 0 serves the line and the store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm
from ports import reserved_port
from torch import Tensor
from weights_helpers import Trained, module_of, trained

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import AsyncrlError, DivergenceError
from asyncrl.models.outputs import BOUNDS, bound_of, fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory import words
from asyncrl.transport.memory.board import Board
from asyncrl.weights import broadcast, sync
from asyncrl.weights.broadcast import GeneratingNodes, Stripes, WeightReceiver
from asyncrl.weights.orders import LineOrders, OrderDesk, ServedOrders
from asyncrl.weights.sync import WeightPublisher, WeightReader

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a secret of the tests"
CPU = torch.device("cpu")


@dataclass
class NodeJob:
    """What a node does. `paced`: each version has arrived before the next is made. `faults`: (what, at which version, bucket)."""

    name: str
    senders: list[str]
    receivers: list[str]
    port: int
    kind: str = "float32"
    versions: int = 5
    paced: bool = True
    deadline_s: float = 20.0
    silence_s: float = 20.0
    bucket_bytes: int = 1 << 16
    faults: list[list[Any]] = field(default_factory=list)


def create_board(policy: PolicyModel, part: slice | None = None) -> Board:
    weights = policy.weights
    return Board.create(weights.working[part or slice(None)].numel(), policy.dtype, weights.layout_digest())


def digest(half: Tensor) -> str:
    return hashlib.sha256(half.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class OneWorker:
    """The workers of a node: one, in this process, that says the hash of each version that it has."""

    recorder = Recorder(max_events=0)

    def __init__(self, board: Board, kind: str, lane: ThreadLane) -> None:
        self._board, self._lane = board, lane
        self._policy = PolicyModel(module_of(seed=9), kind.rpartition(" ")[2], served=True)
        self.output_bound = bound_of(BOUNDS, self._policy.dtype, False)
        self._reader = WeightReader(board, self, lane, self._on_message)

    def move_to(self, half: Tensor, version: int) -> None:
        self._policy.flat.move_to(half)
        say(version=version, sha=digest(half))

    async def outputs(self) -> list[float]:
        return await self._lane.run(lambda: fixed_logprobs(self._policy), name="outputs")

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "wrong" in message:
            raise DivergenceError(message["wrong"])

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        assert outputs is not None
        await self._reader.move(version, half, outputs)

    def reads(self, half: int) -> bool:
        return False

    async def wait_unread(self, half: int) -> None:
        raise AssertionError("no worker is pinned")


class Node:
    """One process."""

    def __init__(self, job: NodeJob) -> None:
        self.job, self.stack = job, AsyncExitStack()
        self.first = job.name == job.senders[0]
        self.arrived = asyncio.Semaphore(0)  # at rank 0: a receiver has the version
        self.over = asyncio.Event()
        self.left = {*job.receivers}

    async def run(self) -> None:
        broadcast.BUCKET_BYTES, sync.OUTPUTS_SHARE = self.job.bucket_bytes, math.inf
        job, stack = self.job, self.stack
        async with stack:
            self.store = await asyncio.to_thread(
                dist.TCPStore, "127.0.0.1", job.port, None, self.first, timedelta(seconds=60), False
            )
            self.lane = await stack.enter_async_context(ThreadLane("weights"))
            self.own = await stack.enter_async_context(ThreadLane("cpu", on_start=lambda: torch.set_num_threads(1)))
            case = trained(job.kind)
            self.part = self._part_of(case)
            self.board = stack.enter_context(create_board(case.policy, self.part))
            desk = await (self._serve() if self.first else self._connect())
            self.stripes = Stripes(job.name, desk.store, CPU, job.deadline_s)
            stack.push_async_callback(self.lane.run, self.stripes.close, name="close")
            if job.name in job.senders:
                await self._send(case, desk)
            else:
                await self._receive(desk, case.policy.lora and case.policy.lora.describe())

    def _part_of(self, case: Trained) -> slice | None:
        """What this node's board has of the weights of a cut model, if the node sends."""
        if case.shards is None or self.job.name not in self.job.senders:
            return None
        rows = broadcast.stripes(case.policy.weights.working.nbytes, len(self.job.senders))
        start, end = rows[self.job.senders.index(self.job.name)]
        return slice(start // case.policy.dtype.itemsize, end // case.policy.dtype.itemsize)

    async def _serve(self) -> ServedOrders:
        job = self.job

        def on_end(peer: str, error: Exception | None) -> None:
            if error is not None or peer in job.receivers:
                desk.orders.lose(peer, str(error or f"{peer} has left"))
            self._leave(peer)

        def on_lost(node: str, reason: str) -> None:
            if not reason.endswith("has left"):
                say(lost=node, reason=reason)
            self._leave(node)

        async def on_arrived(*_: object) -> None:
            self.arrived.release()

        async def on_over(*_: object) -> None:
            await self.over.wait()

        self.server = LineServer(SECRET, job.name, silence_s=job.silence_s, on_end=on_end)
        desk = ServedOrders(self.server, job.senders, job.receivers, job.deadline_s, on_lost)
        self.server.on("arrived", on_arrived)
        self.server.on("over", on_over)
        await self.stack.enter_async_context(self.server)
        self.store.set("line", self.server.address)
        running = asyncio.create_task(desk.orders.run())
        # An error is raised by `wrote`, too.
        running.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.stack.callback(running.cancel)
        return desk

    def _leave(self, node: str) -> None:
        self.arrived.release()
        self.left.discard(node)
        if not self.left:
            self.over.set()

    async def _connect(self) -> LineOrders:
        address = await asyncio.to_thread(lambda: self.store.get("line").decode())
        self.client = LineClient(address, SECRET, self.job.name, silence_s=self.job.silence_s)
        await self.stack.enter_async_context(self.client)
        return LineOrders(self.client)

    async def _send(self, case: Trained, desk: OrderDesk) -> None:
        weights = case.policy.weights
        whole_bytes = None if self.part is None else weights.working.nbytes
        nodes = GeneratingNodes(self.board, self.stripes, self.lane, desk, case.policy.lora, whole_bytes)
        publisher = WeightPublisher(case.policy, self.board, nodes, self.own, nodes.adapters, self.part)
        first = await publisher.post_first()
        say(version=0, sha=digest(weights.working))
        await nodes.update_weights(*first)
        for version in range(1, self.job.versions + 1):
            await self._pace()
            self._break(version)
            await self.own.run(case.step, name="step")
            await publisher.update_weights(version)
            say(version=version, sha=digest(weights.working))
        if not self.first:
            await self.client.ask("over")
            return
        await self.over.wait()
        while self.server.peers:  # noqa: ASYNC110  # the answers of "over"
            await asyncio.sleep(0.01)

    async def _pace(self) -> None:
        if self.job.paced and self.first:
            for _ in self.job.receivers:
                await self.arrived.acquire()

    async def _receive(self, desk: OrderDesk, lora: dict[str, Any] | None) -> None:
        worker = OneWorker(self.board, self.job.kind, self.own)
        receiver = WeightReceiver(self.board, worker, self.stripes, self.lane, desk, lora)
        await worker.update_weights(*await receiver.post_first())
        while (version := await receiver.next()) < self.job.versions:
            await self.client.tell("arrived")
            self._break(version + 1, receiver)
            if not self.job.paced:
                await asyncio.sleep(0.3)

    def _break(self, version: int, receiver: WeightReceiver | None = None) -> None:
        """Plant the faults of this version."""
        for what, at, bucket in self.job.faults:
            if at == version:
                self._plant(what, version, bucket, receiver)

    def _plant(self, what: str, version: int, bucket: int, receiver: WeightReceiver | None) -> None:
        if what == "swaps":
            right = broadcast.buckets
            # The last bucket may be smaller.
            broadcast.buckets = lambda *given: [[row[1], row[0], *row[2:]] for row in right(*given)]
        elif what == "skips":
            assert receiver is not None and receiver._current is not None
            receiver._current = receiver._current._replace(version=version - 2)
        elif what == "forgets":
            # The broadcast takes place, and its bytes go nowhere.
            right_half = self.board.half
            self.board.half = lambda index: right_half(index).clone()  # type: ignore[method-assign]  # the fault
        else:
            number = getattr(signal, what)
            words.FAULT = lambda label: label == f"weights.bucket.{bucket}" and os.kill(os.getpid(), number)


@contextmanager
def nodes(senders: int, receivers: int, **options: Any) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One process per node, by name. `faults`: name -> faults."""
    faults = options.pop("faults", {})
    sending = [f"rank {rank}" for rank in range(senders)]
    receiving = [f"rank {rank}" for rank in range(senders, senders + receivers)]
    with reserved_port() as port:
        started = dict[str, subprocess.Popen[str]]()
        try:
            for name in (*sending, *receiving):
                job = NodeJob(name, sending, receiving, port, **options, faults=faults.get(name, []))
                started[name] = warm.Popen(
                    [sys.executable, __file__, json.dumps(asdict(job))],
                    cwd=ROOT,
                    env={
                        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/weights'}", "PATH": "/usr/bin:/bin",
                        "OMP_NUM_THREADS": "1",
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )  # fmt: skip
            yield started
        finally:
            for process in started.values():
                process.kill()
                process.communicate()


def outcome(process: subprocess.Popen[str], timeout: float = 120) -> tuple[list[dict[str, Any]], str, int]:
    """(lines, standard error, exit code)."""
    out, err = process.communicate(timeout=timeout)
    process.communicate = lambda: (out, err)  # type: ignore[method-assign]  # its pipes are closed
    return [json.loads(line) for line in out.splitlines()], err, process.returncode


if __name__ == "__main__":
    try:
        asyncio.run(Node(NodeJob(**json.loads(sys.argv[1]))).run())
    except AsyncrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
