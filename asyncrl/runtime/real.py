"""Opens the model, the trainer and the engine of a run that is no dry run. The engine is on the trainer's lane, or in workers."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.check_losses import needs_reference, needs_second_buffer
from asyncrl.config.resolve import row_limit, versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.data.texts import eos_token_ids
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.engine import EmbeddedEngine, cache_shape
from asyncrl.generation.worker.engine import WorkerEngine, WorkerLimits
from asyncrl.generation.worker.names import segment_name
from asyncrl.generation.worker.peer import Setup
from asyncrl.models.loading import Choose, load_policy, load_served, parameter_count, require_ids_fit, require_saveable
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.reading import describe_extras
from asyncrl.models.reward_model import RewardModel, load_reward_model
from asyncrl.models.routing import RoutesShape, has_experts, require_routing
from asyncrl.ports import Engine, Trainer, WeightSink
from asyncrl.training.lane_trainer import LaneTrainer
from asyncrl.training.sharded import ShardedTrainer
from asyncrl.training.trainer import TorchTrainer
from asyncrl.transport.memory.board import Board, SlabHalves
from asyncrl.weights.sync import SharedWeights, WeightPublisher

from .gate import check_run_model
from .inputs import measure_prompts
from .memory import GIB, batch_tokens, check_memory, kv_positions
from .opened import OpenRun
from .performance import measure_rates
from .placement import Placement, longest_row, place

_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"


async def open_real(run: OpenRun) -> tuple[Trainer, Engine, tuple[WeightSink]]:
    """Lane, policy, trainer and engine, on one device or with workers beside it. Errors: ConfigError, PlatformError,
    OutOfMemory, WorkerDied."""
    decided, config, world, device, recorder = run.decided, run.config, run.world, run.decided.device, run.recorder
    transformers_logging.disable_progress_bar()  # a bar would break the live view
    run.stages.show("measuring prompts and memory")
    placement = await offload(lambda: place(config, device, world, parameter_count(config.model)), "placement")
    run.placed = placement.line
    own_environment = decided.environment is not None
    prompts = await offload(lambda: measure_prompts(config, decided.rows, own_environment), "prompts")
    ranks = world.world_size
    needed = await offload(lambda: check_memory(config, device, ranks, prompts, placement=placement), "memory")

    def on_start() -> None:
        # OpenMP has a number of threads for each calling thread, so the lane sets its own number.
        torch.set_num_threads(placement.trainer_threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            recorder.register_device(name, partial(torch.cuda.Event, enable_timing=True))

    name = device.type if device.index is None else f"{device.type}{device.index}"
    lane = await run.stack.enter_async_context(ThreadLane(name, recorder, on_start))
    run.lanes = (lane,)
    run.stages.show(f"loading: about {needed / GIB:.2f} GiB for the run")
    with recorder.wait("runtime", "the model", on="disk", cause="start"):
        core = await lane.run(lambda: _load(run), name="start/load")
        run.reward_models = await lane.run(lambda: _load_reward_models(config, device), name="start/reward_models")
    trainer = LaneTrainer(core, lane, recorder)
    if isinstance(core, ShardedTrainer):
        run.round = trainer.train_round
    open_engine = partial(open_workers, run, placement) if placement.workers else partial(_open_shared, run)
    engine, sink = await open_engine(kv_positions(config, prompts))
    return trainer, engine, (sink,)


async def _open_shared(run: OpenRun, kv_positions: int) -> tuple[EmbeddedEngine, SharedWeights]:
    """The engine on the trainer's lane. The engine reads the trainer's weights without a copy."""
    config, lane, policy = run.config, run.lanes[0], _policy(run)
    assert config.engine.max_sequences is not None
    engine = EmbeddedEngine(
        policy,
        run.tokenizer,
        lane,
        run.recorder,
        max_sequences=config.engine.max_sequences,
        max_context=row_limit(config),
        kv_positions=kv_positions,
        prefill_tokens=config.engine.prefill_tokens,
        kv_after_update=config.engine.kv_after_update or "keep",
        record_routes=config.algorithm.router_replay,
    )
    await run.stack.enter_async_context(engine)
    return engine, SharedWeights(policy, engine, lane)


def _policy(run: OpenRun) -> PolicyModel:
    assert run.policy is not None
    return run.policy


def _load_reward_models(config: Config, device: torch.device) -> list[RewardModel]:
    tokens, dtype, seed = batch_tokens(config), config.model.dtype, config.seed
    return [load_reward_model(model, dtype, device, tokens, seed) for model in config.reward.model]


def _load(run: OpenRun) -> TorchTrainer:
    """Load the model, on the lane. Sets `policy`, `tokenizer`, `core`, `rates` and `verdict` of the run."""
    config, device = run.config, run.decided.device

    def choose(module: PreTrainedModel) -> ModelPath:
        run.verdict = check_run_model(config, module, device, run.stages.show)
        return run.verdict.path

    policy, tokenizer, core = _build(config, run.world, device, choose)
    require_ids_fit(policy.module, tokenizer)
    require_saveable(policy.module, tokenizer)
    if config.algorithm.router_replay:
        require_routing(policy.routing, policy.module, "algorithm.router_replay is true")
    run.policy, run.tokenizer, run.core, run.rates = policy, tokenizer, core, measure_rates(device, policy.dtype)
    return core


def _build(config: Config, world: World, device: torch.device, choose: Choose) -> tuple[PolicyModel, Any, TorchTrainer]:
    rows = row_limit(config)
    options: dict[str, Any] = {
        "max_completion_length": config.rollout.max_tokens,
        "needs_reference": needs_reference(config.algorithm),
        "updates_per_batch": versions_per_batch(config),
        "mismatch_gate": config.algorithm.mismatch_gate,
    }
    if config.distributed.sharding == "fsdp":
        policy, model, tokenizer = load_served(config.model, device, config.seed, choose, rows)
        sharded = ShardedTrainer(policy, model, config.train, world, **options)
        world.before_leaving(sharded.sharded.parameters.release)
        return policy, tokenizer, sharded
    policy, tokenizer = load_policy(config.model, device, config.seed, choose, rows)
    second_buffer = needs_second_buffer(config.algorithm)
    return policy, tokenizer, TorchTrainer(policy, config.train, world, second_buffer=second_buffer, **options)


async def open_workers(run: OpenRun, placement: Placement, kv_positions: int) -> tuple[WorkerEngine, WeightPublisher]:
    """The engine, once every worker computes with the trainer's weights, and the sink that sends later versions to the workers.
    `kv_positions`: sum over the workers of this rank. Errors: WorkerDied, PlatformError and OutOfMemory for the board, ConfigError
    for a model that the engine cannot run."""
    config, world, policy, stack = run.config, run.world, _policy(run), run.stack
    board = await offload(lambda: _create_board(policy), "weight-board")
    stack.push_async_callback(offload, board.close, "weight-board")
    assert config.engine.max_sequences is not None
    context = row_limit(config)
    routes = policy.routing.shape if config.algorithm.router_replay and policy.routing is not None else None
    limits = WorkerLimits(
        workers=placement.workers,
        max_sequences=placement.share(config.engine.max_sequences),
        max_context=context,
        vocabulary=int(policy.config.get_text_config().vocab_size),
        has_tokenizer=run.tokenizer is not None,
        start_s=config.watchdog.stage_timeout_s,
        silent_s=config.watchdog.loop_timeout_s,
        closure_s=config.watchdog.lane_timeout_s,
        ranks=world.world_size if config.preset == "sync" else None,
    )
    vllm = config.generation.engine == "vllm"
    message: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "path": asdict(policy.path),
        "board": board.description,
        "board_fd": board.fd,
        "max_sequences": limits.max_sequences,
        "max_context": context,
        "kv_positions": max(placement.share(kv_positions), context),
        "threads": placement.threads,
        "form": _vllm_form(policy, run.tokenizer, context, routes) if vllm else _embedded_form(policy, run.tokenizer),
    }
    logs = None if run.directory is None else run.directory.workers
    if logs is not None and world.world_size > 1:
        logs = logs / f"rank_{world.rank}"

    def setup(number: int) -> Setup:
        return Setup(
            message | {"device": str(placement.devices[number]), "copies": placement.on_other_device(number)},
            (board.fd,),
            dict.fromkeys(_THREADS, str(placement.threads)),
            None if logs is None else logs / f"worker-{number}.log",
        )

    engine = WorkerEngine(limits, setup, run.recorder, show_stage=run.stages.show)
    publisher = WeightPublisher(policy, board, engine, run.lanes[0])
    # The workers read the board. They end before the board is closed, because `engine` is entered later.
    stack.callback(publisher.close)
    engine.begin_with(*await publisher.post_first())
    await stack.enter_async_context(engine)
    with run.recorder.wait("runtime", "the workers", on="their models", cause="start"):
        await engine.all_serve()
    return engine, publisher


def _embedded_form(policy: PolicyModel, tokenizer: Any) -> dict[str, Any]:
    """The description of the model, without its weights, that the embedded engine needs, in JSON types."""
    return {"rest": describe_extras(policy), "stop_ids": eos_token_ids(policy.module, tokenizer)}


def _vllm_form(policy: PolicyModel, tokenizer: Any, context: int, routes: RoutesShape | None) -> dict[str, Any]:
    """The description of the model, without its weights, that vLLM needs, in JSON types. `context`: tokens of the longest row.
    `routes`: shape of the routes; None: routes are not recorded. Errors: ConfigError."""
    if policy.path.name == "plain":
        raise ConfigError(
            f"generation.engine is vllm, and {type(policy.module).__name__} runs on the plain path, whose states and caches have "
            "not been compared with vLLM's; use generation.engine=embedded"
        )
    text = policy.config.get_text_config()
    longest = longest_row(text)
    if longest is not None and context > longest:
        raise ConfigError(
            f"generation.engine is vllm, and rows may have {context} tokens (data.max_prompt_tokens + rollout.max_tokens), but "
            f"the model has positions for {longest} (max_position_embeddings), beyond which vLLM does not go; make "
            "data.max_prompt_tokens or rollout.max_tokens smaller, or use generation.engine=embedded"
        )
    config = json.loads(policy.config.to_json_string(use_diff=False))
    return {
        "config": config | {"architectures": [type(policy.module).__name__]},
        "layout": asdict(policy.weights.layout()),
        "vocabulary": int(text.vocab_size),
        "stop_ids": eos_token_ids(policy.module, tokenizer),
        "position_bytes": cache_shape(policy.config, 1, 1).nbytes(policy.dtype),
        "routes": None if routes is None else asdict(routes),
        "routed": has_experts(policy.module),
    }


def _create_board(policy: PolicyModel) -> Board:
    """The board, on the trainer's device: the trainer writes it without a copy. Errors: OutOfMemory, PlatformError."""
    weights = policy.weights
    slab: SlabHalves | None = None
    if policy.device.type != "cpu":
        slab = SlabHalves.create(segment_name(), weights.size, policy.dtype, policy.device)
    return Board.create(weights.size, policy.dtype, weights.layout_digest(), slab)
