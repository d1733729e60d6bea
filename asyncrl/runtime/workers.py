"""Opens the weight board of a rank (memory with two versions of the weights), and the parts that read or write the board.

rank                   who writes the board         who reads it                                                opened by
trains and generates   the trainer                  its workers, and the nodes that only generate, if any       open_workers
only trains            the trainer                  the nodes that only generate                                open_sender
only generates         broadcasts of the trainers   its workers                                                 open_generating
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import row_limit, with_values
from asyncrl.data.texts import eos_token_ids
from asyncrl.distributed.line import LineClient
from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.generation.worker.engine import WorkerEngine, WorkerLimits
from asyncrl.generation.worker.names import segment_name
from asyncrl.generation.worker.peer import Setup
from asyncrl.models.loading import parameter_count
from asyncrl.models.policy import DTYPES, PolicyModel
from asyncrl.models.reading import describe_extras
from asyncrl.models.routing import has_experts
from asyncrl.transport.memory.board import Board, weight_slab
from asyncrl.weights.broadcast import AllReaders, GeneratingNodes, Stripes, WeightReceiver, stripes
from asyncrl.weights.orders import LineOrders, OrderDesk
from asyncrl.weights.sync import BoardWorkers, WeightPublisher

from .opened import OpenRun
from .placement import PLAIN_MESSAGE, Placement, longest_row, place

_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"


async def open_workers(run: OpenRun, placement: Placement, kv_positions: int) -> tuple[WorkerEngine, WeightPublisher]:
    """(the engine, the sink for later versions of the weights). Returns when every worker computes with the trainer's weights.
    `kv_positions`: cache positions of all workers of this rank. Errors: WorkerDied; PlatformError and OutOfMemory for the board;
    ConfigError for a model that the engine cannot run."""
    assert run.policy is not None
    model = describe_model(run, run.policy)
    board = await _open_board(run, model)
    engine = _make_engine(run, placement, kv_positions, board, model)
    nodes = await _open_nodes(run, board, model) if run.world.roles.sends else None
    readers = engine if nodes is None else AllReaders(engine, nodes)
    publisher = _make_publisher(run, board, readers, () if nodes is None else nodes.adapters)
    first = await publisher.post_first()
    if nodes is not None:
        await nodes.update_weights(*first)
    engine.set_first_weights(*first)
    await _open_engine(run, engine)
    return engine, publisher


async def open_sender(run: OpenRun) -> WeightPublisher:
    """The sink that sends the trainer's weights to the nodes that only generate. Errors: RankLost, and those of `open_workers` for
    the board and the model."""
    assert run.policy is not None
    policy, model, part, whole_bytes = run.policy, describe_model(run, run.policy), None, None
    if policy.lora is None and not policy.flat.has_working_copy:
        # The trainer copies each version onto the board. As no worker reads the board, the board has only the stripe of this rank.
        names = sorted(f"rank {rank}" for rank in run.world.roles.train)
        whole_bytes = policy.weights.working.nbytes
        start, end = stripes(whole_bytes, len(names))[names.index(f"rank {run.world.rank}")]
        part = slice(start // policy.dtype.itemsize, end // policy.dtype.itemsize)
    elements = part.stop - part.start if part else model["elements"]
    board = await _open_board(run, model | {"elements": elements})
    nodes = await _open_nodes(run, board, model, whole_bytes)
    publisher = _make_publisher(run, board, nodes, nodes.adapters, part)
    await nodes.update_weights(*await publisher.post_first())
    return publisher


async def open_generating(run: OpenRun, placement: Placement, kv_positions: int) -> tuple[WorkerEngine, WeightReceiver]:
    """On a rank that only generates: (the engine, the receiver of later versions). Returns when every worker computes with weights
    of the training ranks. This rank reads no weights from files. Errors: RankLost, and those of `open_workers`."""
    orders = LineOrders(cast(LineClient, run.line))
    with run.recorder.wait("runtime", "the model", on="rank 0", cause="start"):
        run.model_description = model = await orders.model()
    placement = await take_engine(run, placement, model["engine"])
    if (here := run.decided.device.type) != model["device"]:
        raise ConfigError(
            f"the weights of rank 0 are on {model['device']} and model.device is {here} on rank {run.world.rank}, so they cannot "
            "be sent; set model.device, or use a machine of the same kind"
        )
    board = await _open_board(run, model)
    engine = _make_engine(run, placement, kv_positions, board, model)
    receiver = WeightReceiver(board, engine, *await _open_stripes(run, orders), orders, model["lora"])
    with run.recorder.wait("runtime", "the weights", on="the training ranks", cause="start"):
        engine.set_first_weights(*await receiver.post_first())
    await _open_engine(run, engine)
    return engine, receiver


def _make_publisher(
    run: OpenRun, board: Board, readers: BoardWorkers, adapters: Sequence[Tensor], part: slice | None = None
) -> WeightPublisher:
    assert run.policy is not None
    publisher = WeightPublisher(run.policy, board, readers, run.lanes[0], adapters, part)
    # Registered before the workers. So the publisher is closed after the workers, which read the board.
    run.stack.callback(publisher.close)
    return publisher


async def _open_nodes(
    run: OpenRun, board: Board, model: Mapping[str, Any], whole_bytes: int | None = None
) -> GeneratingNodes:
    """The nodes that only generate, as readers of this rank's board. `whole_bytes`: see `GeneratingNodes`."""
    assert run.policy is not None
    orders, lora = run.orders, run.policy.lora
    desk = orders or LineOrders(cast(LineClient, run.line))
    nodes = GeneratingNodes(board, *await _open_stripes(run, desk), desk, lora, whole_bytes)
    if orders is not None:
        orders.describe(model)
        task = asyncio.create_task(orders.orders.run())
        # Retrieves the task's error, so that asyncio does not log it. Every call of `nodes` raises this error.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        run.stack.callback(task.cancel)
    return nodes


async def _open_stripes(run: OpenRun, desk: OrderDesk) -> tuple[Stripes, ThreadLane]:
    world, device = run.world, run.decided.device
    on_start = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    # `in_budget=False` leaves this lane out of `idle/*`: the trainer's lane uses the device while this lane waits for a broadcast.
    lane = await run.stack.enter_async_context(ThreadLane("weights", run.recorder, on_start, in_budget=False))
    stripes = Stripes(f"rank {world.rank}", desk.store, device, run.config.watchdog.loop_timeout_s)
    run.stack.push_async_callback(lane.run, stripes.close, name="weights/close")
    return stripes, lane


async def take_engine(run: OpenRun, placement: Placement, engine: str) -> Placement:
    """Set `generation.engine` to `engine`, the choice of rank 0. Returns the placement of this rank with that engine."""
    if engine != run.config.generation.engine:
        run.config = with_values(run.config, {"generation.engine": engine})
        print(f"asyncrl: rank {run.world.rank}: generation.engine: {engine}, as on rank 0", flush=True)
    if engine == run.decided.config.generation.engine:
        return placement
    config, device, world = run.config, run.decided.device, run.world
    placement = await offload(lambda: place(config, device, world, parameter_count(config.model)), "placement")
    run.placement_line = placement.line
    await run.lanes[0].run(lambda: torch.set_num_threads(placement.trainer_threads), name="start/threads")
    return placement


def describe_model(run: OpenRun, policy: PolicyModel) -> dict[str, Any]:
    """What a worker needs to build the model, in JSON types, without weights. Errors: ConfigError if vLLM cannot run the model."""
    config, context = run.config, row_limit(run.config)
    routes = policy.routing.shape if config.algorithm.router_replay and policy.routing is not None else None
    embedded = {"extras": describe_extras(policy), "stop_ids": eos_token_ids(policy.module, run.tokenizer)}
    return {
        "device": run.decided.device.type,
        "path": asdict(policy.path),
        "engine": config.generation.engine,
        "elements": policy.weights.size,
        "layout": policy.weights.layout_digest(),
        "vocabulary": int(policy.config.get_text_config().vocab_size),
        "routes": None if routes is None else astuple(routes),
        "lora": policy.lora and policy.lora.describe(),
        "for_engine": _for_vllm(policy, run.tokenizer, context) if config.generation.engine == "vllm" else embedded,
    }


async def _open_board(run: OpenRun, model: Mapping[str, Any]) -> Board:
    dtype, device = DTYPES[run.config.model.dtype], run.decided.device
    board = await offload(lambda: create_board(model["elements"], dtype, model["layout"], device), "weight-board")
    run.stack.push_async_callback(offload, board.close, "weight-board")
    return board


def create_board(elements: int, dtype: torch.dtype, layout: str, device: torch.device) -> Board:
    """A new board in memory of the rank's device, so the trainer writes without a copy. Errors: OutOfMemory, PlatformError."""
    slab = None if device.type == "cpu" else weight_slab(segment_name(), elements, dtype, device)
    return Board.create(elements, dtype, layout, slab)


def _make_engine(
    run: OpenRun, placement: Placement, kv_positions: int, board: Board, model: Mapping[str, Any]
) -> WorkerEngine:
    config, world, context = run.config, run.world, row_limit(run.config)
    assert config.engine.max_sequences is not None
    limits = WorkerLimits(
        workers=placement.workers,
        max_sequences=placement.share(config.engine.max_sequences),
        max_context=context,
        vocabulary=model["vocabulary"],
        has_tokenizer=run.tokenizer is not None,
        start_s=config.watchdog.stage_timeout_s,
        silent_s=config.watchdog.loop_timeout_s,
        closure_s=config.watchdog.lane_timeout_s,
        ranks=world.world_size if config.preset == "sync" else None,
    )
    message: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "path": model["path"],
        "board": board.description,
        "board_fd": board.fd,
        "max_sequences": limits.max_sequences,
        "max_context": context,
        "kv_positions": max(placement.share(kv_positions), context),
        "threads": placement.threads,
        "for_engine": model["for_engine"],
    }
    logs = None if run.directory is None else run.directory.workers
    if logs is not None and world.world_size > 1:
        logs = logs / f"rank_{world.rank}"

    def setup(number: int) -> Setup:
        return Setup(
            message | placement.message(number),
            (board.fd,),
            dict.fromkeys(_THREADS, str(placement.threads)),
            None if logs is None else logs / f"worker-{number}.log",
        )

    return WorkerEngine(limits, setup, run.recorder, show_stage=run.stages.show)


async def _open_engine(run: OpenRun, engine: WorkerEngine) -> None:
    await run.stack.enter_async_context(engine)
    with run.recorder.wait("runtime", "the workers", on="their models", cause="start"):
        await engine.wait_until_serving()


def _for_vllm(policy: PolicyModel, tokenizer: Any, context: int) -> dict[str, Any]:
    """What vLLM needs to build the model, in JSON types, without weights. `context`: tokens of the longest row.
    Errors: ConfigError."""
    if policy.path.name == "plain":
        raise ConfigError(
            f"generation.engine is vllm, and {type(policy.module).__name__} {PLAIN_MESSAGE}; use generation.engine=embedded"
        )
    text = policy.config.get_text_config()
    longest = longest_row(text)
    if longest is not None and context > longest:
        raise ConfigError(
            f"generation.engine is vllm, and rows may have {context} tokens (rollout.max_context, or data.max_prompt_tokens + "
            f"rollout.max_tokens), but the model has positions for {longest} (max_position_embeddings), beyond which vLLM does not "
            "go; make these settings smaller, or use generation.engine=embedded"
        )
    config = json.loads(policy.config.to_json_string(use_diff=False))
    cache = cache_shape(policy.config, 1, 1)
    return {
        "config": config | {"architectures": [type(policy.module).__name__]},
        "layout": asdict(policy.weights.layout()),
        "vocabulary": int(text.vocab_size),
        "stop_ids": eos_token_ids(policy.module, tokenizer),
        "position_bytes": cache.nbytes(policy.dtype),
        "kv_heads": cache.heads,
        "routed": has_experts(policy.module),
    }
