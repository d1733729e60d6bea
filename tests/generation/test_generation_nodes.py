"""Workers of a node without a trainer: their weights come by broadcast, and they sample what the trainer's own engine samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from generation_models import change_weights, generate_all
from test_generation_worker_engine import CONTEXT, MODEL, REWARDS, assert_same, many

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.load import load_config
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.distributed.world import World
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.loading import load_policy
from asyncrl.models.policy import PolicyModel
from asyncrl.runtime import workers as runtime_workers
from asyncrl.runtime.decided import Decided
from asyncrl.runtime.directory import RunDirectory
from asyncrl.runtime.opened import OpenRun
from asyncrl.runtime.placement import Placement
from asyncrl.runtime.progress import Listeners, Stages
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.weights.broadcast import GeneratingNodes, Stripes, WeightReceiver
from asyncrl.weights.orders import LineOrders, ServedOrders
from asyncrl.weights.sync import BoardWorkers, WeightPublisher

CPU = torch.device("cpu")


@asynccontextmanager
async def two_nodes(
    policy: PolicyModel, lane: ThreadLane, board: Board, workers: BoardWorkers
) -> AsyncIterator[tuple[WeightPublisher, WeightReceiver]]:
    """A trainer's publisher, and a receiver that fills `board` and moves `workers`, with a line between them."""
    store, ends = dist.HashStore(), list[Any]()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(LineServer("secret", "rank 0"))
        orders = ServedOrders(server, ["rank 0"], ["rank 1"], 30.0, lambda node, reason: None)
        client = await stack.enter_async_context(LineClient(server.address, "secret", "rank 1"))
        for name in ("rank 0", "rank 1"):
            own = await stack.enter_async_context(ThreadLane(name))
            stripes = Stripes(name, store, CPU, 30.0)
            stack.push_async_callback(own.run, stripes.close, name="close")
            ends.append((stripes, own))
        weights = policy.weights
        sending = await asyncio.to_thread(Board.create, weights.size, policy.dtype, weights.layout_digest())
        stack.push_async_callback(asyncio.to_thread, sending.close)
        nodes = GeneratingNodes(sending, *ends[0], orders)
        publisher = WeightPublisher(policy, sending, nodes, lane)
        stack.callback(publisher.close)
        running = asyncio.create_task(orders.orders.run())
        stack.callback(running.cancel)
        await nodes.update_weights(*await publisher.post_first())
        receiver = WeightReceiver(board, workers, *ends[1], LineOrders(client))
        yield publisher, receiver


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
async def test_worker_processes_of_a_node_that_reads_no_weights(dtype: str, tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path}", f"model.path={MODEL}:build", f"model.dtype={dtype}", f"data.train={MODEL}:rows",
        f"reward={REWARDS}:share", f"data.max_prompt_tokens={CONTEXT - 40}", "rollout.max_tokens=40", "engine.max_sequences=6",
        "rollout.group_size=4", "seed=1",
    ]  # fmt: skip
    config = await asyncio.to_thread(load_config, [], overrides)
    directory = await asyncio.to_thread(RunDirectory, config)
    async with AsyncExitStack() as stack:
        lane = await stack.enter_async_context(ThreadLane("trainer"))
        policy, tokenizer = await lane.run(lambda: load_policy(config.model, CPU, config.seed), name="load")
        run = OpenRun(
            Decided(config, World.from_env(), CPU, directory=directory),
            Recorder(nvtx=False),
            Listeners(),
            Stages(),
            stack,
        )
        run.tokenizer = tokenizer
        model = runtime_workers.describe_model(run, policy)
        board = await asyncio.to_thread(
            runtime_workers.create_board, model["elements"], policy.dtype, model["layout"], CPU
        )
        stack.push_async_callback(asyncio.to_thread, board.close)
        engine = runtime_workers._make_engine(run, Placement((CPU,) * 2, 1, 1, ""), 6 * CONTEXT, board, model)
        publisher, receiver = await stack.enter_async_context(two_nodes(policy, lane, board, engine))
        engine.set_first_weights(*await receiver.post_first())
        await stack.enter_async_context(engine)
        await engine.wait_until_serving()
        assert await receiver.next() == 0
        for seed in (1, 2, 3):
            version = await lane.run(lambda seed=seed: change_weights(policy, seed), name="step")
            await publisher.update_weights(version)
            assert await receiver.next() == version
            assert torch.equal(board.half(receiver.current.half), policy.weights.working)
            requests = many(6, first=seed)
            own = EmbeddedEngine(policy, tokenizer, lane, Recorder(nvtx=False), max_sequences=8, max_context=CONTEXT)
            async with own:
                expected = await generate_all(own, requests)
            assert_same(await generate_all(engine, requests), expected)
