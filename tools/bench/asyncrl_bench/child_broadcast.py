"""`child.py broadcast`: versions of a model's weights to nodes that are processes of this machine, over gloo.

    broadcast   what a run does: the order of rank 0, the broadcast by buckets into the free half, the move, the answers
    bare        one `broadcast` of torch.distributed of the same bytes, between the same memory, in a group of the same processes

Both in turns. With `decodes` the one node samples all the time, with an engine that reads the board: see `nodes_weights.py`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import LoraConfig, ModelConfig
from asyncrl.data.texts import eos_token_ids
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.loading import load_policy, load_reader, load_tokenizer_of
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.reading import ModelSkeleton
from asyncrl.telemetry.recorder import LANE_PREFIX, Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl.weights.broadcast import GeneratingNodes, Stripes, WeightReceiver
from asyncrl.weights.orders import LineOrders, ServedOrders
from asyncrl.weights.sync import WeightPublisher, WeightReader

from .child_weights import seen
from .job import BroadcastJob, new_loop

SECRET, CPU, DEADLINE_S = "of a benchmark", torch.device("cpu"), 120.0
PROMPT, CONTEXT = 32, 512  # tokens


class Moved:
    """Stands for workers: they move at once."""

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        return None

    def reads(self, half: int) -> bool:
        return False

    async def wait_unread(self, half: int) -> None:
        return None


class Sampler(Moved):
    """An engine in this process that reads the board, and always has `sequences` requests."""

    def __init__(self, job: BroadcastJob, board: Board) -> None:
        self._job, self._board = job, board
        self.recorder = Recorder(nvtx=False)

    async def open(self, stack: AsyncExitStack, path: Any) -> None:
        job, config = self._job, ModelConfig(path=self._job.model, dtype=self._job.dtype)
        lane = await stack.enter_async_context(
            ThreadLane("worker0", self.recorder, partial(torch.set_num_threads, job.threads))
        )
        policy = await lane.run(lambda: load_reader(config, CPU, 0, path, CONTEXT), name="load")
        self.engine = EmbeddedEngine(
            policy,
            await lane.run(lambda: load_tokenizer_of(config), name="tokenizer"),
            lane,
            self.recorder,
            max_sequences=job.sequences,
            max_context=CONTEXT,
            kv_positions=job.sequences * CONTEXT,
            prefill_tokens=512,
            kv_after_update="keep",
            eos=tuple(eos_token_ids(policy.module, None)),
        )
        await stack.enter_async_context(self.engine)
        self._reader = WeightReader(self._board, self.engine, lane, self._on_message)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "wrong" in message:
            raise RuntimeError(message["wrong"])

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        await self._reader.move(version, half, outputs)

    async def sample(self, number: int) -> None:
        """One request after the other, without end."""
        prompt = np.random.default_rng(number).integers(3, 90, PROMPT).astype(np.int32)
        sampling = SamplingParams(max_tokens=CONTEXT - PROMPT - 1, ignore_eos=True)
        for seed in range(number, 1 << 30, self._job.sequences):
            await self.engine.generate(GenerationRequest(prompt, sampling, seed))


class BenchNode:
    """The process of one rank. Rank 0 sends."""

    def __init__(self, job: BroadcastJob, rank: int, store: dist.Store, pipe: Any) -> None:
        self.job, self.rank, self.pipe = job, rank, pipe
        self.names = [f"rank {number}" for number in range(job.receivers + 1)]
        self.store = store
        self.bare: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("bare", store), rank, len(self.names), timedelta(seconds=DEADLINE_S)
        )

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            self.stack = stack
            self.lane = await stack.enter_async_context(ThreadLane("weights"))
            self.stripes = Stripes(self.names[self.rank], self.store, CPU, DEADLINE_S)
            stack.push_async_callback(self.lane.run, self.stripes.close, name="close")
            skeleton = ModelSkeleton(ModelConfig(path=self.job.model, dtype=self.job.dtype))
            dtype = DTYPES[self.job.dtype]
            self.board = await asyncio.to_thread(Board.create, skeleton.layout.size, dtype, skeleton.digest())
            stack.push_async_callback(asyncio.to_thread, self.board.close)
            await (self.send() if self.rank == 0 else self.receive())

    async def meet(self) -> None:
        await self.lane.run(lambda: self.bare.allreduce([torch.zeros(1)]).wait(), name="meet")

    async def bare_s(self, half: int) -> float:
        """One broadcast in one piece, between the halves of the boards."""
        data = self.board.half(half).view(torch.uint8)
        await self.meet()
        began = time.perf_counter()
        await self.lane.run(lambda: self.bare.broadcast([data], dist.BroadcastOptions()).wait(), name="bare")
        await self.meet()
        return time.perf_counter() - began

    async def send(self) -> None:
        job, arrived = self.job, asyncio.Semaphore(0)

        async def on_arrived(*_: object) -> None:
            arrived.release()

        async def all_have() -> None:
            for _ in range(job.receivers):
                await arrived.acquire()

        server = LineServer(SECRET, "rank 0")
        orders = ServedOrders(server, self.names[:1], self.names[1:], DEADLINE_S, lambda node, reason: None)
        server.on("arrived", on_arrived)
        await self.stack.enter_async_context(server)
        own = await self.stack.enter_async_context(ThreadLane("trainer", on_start=partial(torch.set_num_threads, 1)))
        config = ModelConfig(path=job.model, dtype=job.dtype, lora=LoraConfig(rank=job.lora_rank))
        policy, _ = await own.run(lambda: load_policy(config, CPU), name="load")
        lora = policy.lora and policy.lora.describe()
        orders.describe({"path": [policy.path.name, policy.path.attention, policy.path.padded], "lora": lora})
        self.store.set("line", server.address)
        nodes = GeneratingNodes(self.board, self.stripes, self.lane, orders, policy.lora)
        publisher = WeightPublisher(policy, self.board, nodes, own, nodes.adapters)
        running = asyncio.create_task(orders.orders.run())
        self.stack.callback(running.cancel)
        await nodes.update_weights(*await publisher.post_first())
        await all_have()
        seconds: dict[str, list[float]] = {"broadcast": [], "bare": []}
        for number in range(1, job.versions + 1):
            await asyncio.sleep(job.pause_s)
            version = await own.run(policy.advance, name="step")
            outputs = await own.run(lambda: fixed_logprobs(policy), name="outputs")
            half = number % 2
            await own.run(partial(self.board.write, half, version, policy.weights.working), name="write")
            if nodes.adapters:
                nodes.adapters[half].copy_(policy.flat.master)
            if not job.decodes and number % 2 == 0:
                seconds["bare"].append(await self.bare_s(half))
            began = time.perf_counter()
            await nodes.update_weights(version, half, outputs)
            await all_have()
            seconds["broadcast"].append(time.perf_counter() - began)
            if not job.decodes and number % 2 == 1:
                seconds["bare"].append(await self.bare_s(half))
            self.board.clear(1 - half)
        sent = nodes.adapters[0].nbytes if nodes.adapters else self.board.nbytes
        self.pipe.send({**seconds, "bytes": self.board.nbytes, "sent": sent})

    async def receive(self) -> None:
        job = self.job
        address = await asyncio.to_thread(lambda: self.store.get("line").decode())
        client = await self.stack.enter_async_context(LineClient(address, SECRET, self.names[self.rank]))
        workers = Sampler(job, self.board) if job.decodes else Moved()
        orders = LineOrders(client)
        model = await orders.model()
        receiver = WeightReceiver(self.board, workers, self.stripes, self.lane, orders, model["lora"])
        first = await receiver.post_first()
        if isinstance(workers, Sampler):
            await workers.open(self.stack, ModelPath(*model["path"]))
            await workers.update_weights(*first)
            tasks = [asyncio.create_task(workers.sample(number)) for number in range(job.sequences)]
            self.stack.callback(lambda: [task.cancel() for task in tasks])
        await receiver.next()
        await client.tell("arrived")
        for number in range(1, job.versions + 1):
            if not job.decodes and number % 2 == 0:
                await self.bare_s(number % 2)
            await receiver.next()
            await client.ask("arrived")
            if not job.decodes and number % 2 == 1:
                await self.bare_s(number % 2)
        if isinstance(workers, Sampler):
            await asyncio.sleep(job.pause_s)
            self.pipe.send(pauses(workers.recorder))


def pauses(recorder: Recorder) -> dict[str, float]:
    """Of the engine's lane, in ms: medians over the moves."""
    lane = sorted((e for e in recorder.events() if e.track == f"{LANE_PREFIX}worker0"), key=lambda e: e.start)
    binds = [event.start for event in lane if event.name == "engine/bind"][1:]
    found = []
    for at, until in zip(binds, [*binds[1:], float("inf")], strict=True):
        around = [e for e in lane if at - 2.0 < e.start < min(until, at + 2.0)]
        found.append(seen(around, ("engine/decode",)))
    kept = [each for each in found if each]
    if not kept:
        raise RuntimeError("no sequence was sampled around a move: the model ends its requests too soon")
    return {name: float(np.median([each[name] for each in kept])) for name in kept[0]} | {"moves": len(kept)}


def run_node(job: BroadcastJob, rank: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE_S))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(BenchNode(job, rank, store, pipe).run())


def run_broadcast(job: BroadcastJob) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE_S), False)
    ours, theirs = context.Pipe()
    started = [
        context.Process(target=run_node, args=(job, rank, store.port, theirs), daemon=True)
        for rank in range(job.receivers + 1)
    ]
    for process in started:
        process.start()
    theirs.close()
    found: dict[str, Any] = {}
    for _ in range(1 + job.decodes):
        found |= ours.recv()
    for process in started:
        process.join()
    return found
