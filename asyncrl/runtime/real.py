"""Opens the model, the trainer and the engine for `train.kind: torch`. The engine is on the trainer's lane, or in workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import orjson
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.check_losses import needs_reference
from asyncrl.config.resolve import last_version, row_limit
from asyncrl.config.schema import Config
from asyncrl.distributed.line import LineClient
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.attention.context import require_context
from asyncrl.models.loading import (
    Choose,
    describe_module,
    load_policy,
    load_served,
    load_tokenizer_of,
    parameter_count,
    require_ids_fit,
    require_saveable,
)
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.reward_model import RewardModel, load_reward_model
from asyncrl.models.routing import require_routing
from asyncrl.ports import Engine, Trainer, WeightSink
from asyncrl.pumps.follow import EngineVersion
from asyncrl.training.lane_trainer import LaneTrainer
from asyncrl.training.sharded import ShardedTrainer
from asyncrl.training.trainer import TorchTrainer
from asyncrl.weights.sync import SharedWeights

from .build import Absent
from .gate import check_run_model
from .inputs import PromptLengths, measure_prompts
from .memory import GIB, Cut, cut_model, kv_positions, memory_warnings, predicted, table
from .opened import REWARD_MODELS, OpenRun
from .performance import stated_peak
from .placement import Placement, embedded_on_plain_path, place
from .workers import open_generating, open_sender, open_workers, take_engine

logger = logging.getLogger("asyncrl.runtime")


async def open_real(run: OpenRun) -> tuple[Trainer, Engine, Sequence[WeightSink]]:
    """Open lane, policy, trainer and engine, as far as the role of this rank needs them. Returns (trainer, engine, sinks).
    Errors: ConfigError, PlatformError, OutOfMemory, WorkerDied, RankLost."""
    decided, config, world, device, recorder = run.decided, run.config, run.world, run.decided.device, run.recorder
    transformers_logging.disable_progress_bar()  # a bar would break the live view
    run.stages.show("measuring prompts and memory")
    placement = await offload(lambda: place(config, device, world, parameter_count(config.model)), "placement")
    run.placement_line = placement.line
    # Checked now, because reading the weights may take minutes.
    require = partial(require_context, path=None, siblings=config.distributed.context)
    await offload(lambda: require(describe_module(config.model).config), "model")
    prompts = await offload(lambda: measure_prompts(config, decided.rows, decided.environment is not None), "prompts")
    ranks = len(world.roles.train)
    cut = Cut(ranks)
    if config.distributed.sharding == "fsdp":
        cut = await offload(lambda: cut_model(config, device, world, placement), "memory")
    needed = await offload(lambda: _predict_and_warn(config, device, ranks, prompts, placement, cut), "memory")

    def on_start() -> None:
        # OpenMP keeps the number of threads per calling thread, so the number must be set on the lane.
        torch.set_num_threads(placement.trainer_threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            recorder.register_device(name, partial(torch.cuda.Event, enable_timing=True))

    name = device.type if device.index is None else f"{device.type}{device.index}"
    lane = await run.stack.enter_async_context(ThreadLane(name, recorder, on_start))
    run.lanes = (lane,)
    run.stages.show(f"loading: about {needed / GIB:.2f} GiB for the run")
    positions = kv_positions(config, prompts)
    with recorder.wait("runtime", "the model", on="disk", cause="start"):
        if world.generates:
            run.reward_models = await lane.run(lambda: _load_reward_models(config, device), name="start/reward_models")
            await _compare_reward_models(run)
        if not world.trains:
            run.tokenizer = await offload(lambda: load_tokenizer_of(config.model), "tokenizer")
            workers, receiver = await open_generating(run, placement, positions)
            run.engine_version = EngineVersion(receiver.next)
            # On a rank without a trainer only `trainer.version` is read.
            return cast(Trainer, run.engine_version), workers, ()
        core = await lane.run(lambda: _load(run, cut), name="start/load")
    if decided.engine_was_auto:
        run.config, lines = embedded_on_plain_path(config, _policy(run).path.name)
        for line in lines:
            run.journal.live.note(line)
    chosen = run.config.generation.engine.encode()
    of_rank_0, *_ = await lane.run(lambda: world.train.all_gather_bytes(chosen), name="start/engine")
    if world.generates:
        placement = await take_engine(run, placement, of_rank_0.decode())
    trainer = LaneTrainer(core, lane, recorder)
    if isinstance(core, ShardedTrainer) and not core.keep:
        run.round = trainer.train_round
    if not world.generates:
        return trainer, Absent(), [await open_sender(run)] if world.roles.sends else []
    open_engine = partial(open_workers, run, placement) if placement.workers else partial(_open_shared, run)
    engine, sink = await open_engine(positions)
    return trainer, engine, [sink]


def _predict_and_warn(
    config: Config, device: torch.device, ranks: int, prompts: PromptLengths, placement: Placement, cut: Cut
) -> int:
    """The forecast of the run's memory in bytes. Logs a warning with the table if less memory is free."""
    parts = predicted(config, ranks, prompts, placement=placement, cut=cut)
    for line in memory_warnings(parts, device):
        logger.warning("%s\n%s", line, table(parts))
    return sum(parts.values())


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
        kept_prefix_max_age=config.engine.kept_prefix_max_age or 0,
        record_routes=config.algorithm.router_replay,
    )
    await run.stack.enter_async_context(engine)
    return engine, SharedWeights(policy, engine, lane)


def _policy(run: OpenRun) -> PolicyModel:
    assert run.policy is not None
    return run.policy


def _load_reward_models(config: Config, device: torch.device) -> list[RewardModel]:
    tokens, dtype, seed = config.train.tokens_per_microbatch, config.model.dtype, config.seed
    return [load_reward_model(model, dtype, device, tokens, seed) for model in config.reward.model]


async def _compare_reward_models(run: OpenRun) -> None:
    """Errors: ConfigError if a reward model of this rank differs from that of the rank that was first to load its reward models."""
    rank, models = run.world.rank, run.reward_models
    if run.line is None or not models:
        return
    found = await run.lanes[0].run(lambda: [model.digest() for model in models], name="start/digest")
    if isinstance(run.line, LineClient):
        (first, expected), _ = await run.line.ask(REWARD_MODELS, [rank, found])
    else:
        first, expected = run.first_rewards = run.first_rewards or (rank, found)
    for model, settings, digest, expected_digest in zip(models, run.config.reward.model, found, expected, strict=True):
        if digest != expected_digest:
            raise ConfigError(
                f"reward.model: {model.name!r} ({settings.path}) has other weights, another vocabulary or another chat template on "
                f"rank {rank} than on rank {first}; give all ranks the same files"
            )


def _load(run: OpenRun, cut: Cut) -> TorchTrainer:
    """Load the model. Call on the lane. Sets `policy`, `tokenizer`, `core`, `peak_flops` and `verdict` of the run."""
    config, device = run.config, run.decided.device

    def choose(module: PreTrainedModel) -> ModelPath:
        run.verdict = check_run_model(config, module, device, run.stages.show)
        return run.verdict.path

    policy, tokenizer, core = _build(run, choose, cut)
    require_ids_fit(policy.module, tokenizer)
    require_saveable(policy.module, tokenizer)
    if config.algorithm.router_replay:
        require_routing(policy.routing, policy.module, "algorithm.router_replay is true")
    run.policy, run.tokenizer, run.core = policy, tokenizer, core
    run.peak_flops = stated_peak(torch.cuda.get_device_name(device), policy.dtype) if device.type == "cuda" else None
    return core


def _build(run: OpenRun, choose: Choose, cut: Cut) -> tuple[PolicyModel, Any, TorchTrainer]:
    config, world, device, rows = run.config, run.world, run.decided.device, row_limit(run.config)
    options: dict[str, Any] = {
        "max_completion_length": config.rollout.max_tokens,
        "needs_reference": needs_reference(config.algorithm),
        "total_steps": last_version(config, run.base, run.decided.row_count),
        "mismatch_gate": config.algorithm.mismatch_gate,
        "siblings": world.siblings,
    }
    if config.distributed.sharding == "fsdp":
        policy, model, tokenizer = load_served(config.model, device, config.seed, choose, rows)
        _receive_weights(policy, world)
        # All ranks need the same cut. If the ranks have chosen different cuts, one copy of the weights is cut over all ranks.
        cuts = [orjson.loads(each) for each in world.train.all_gather_bytes(orjson.dumps([*cut]))]
        shards, keep = cuts[0] if all(each == cuts[0] for each in cuts) else Cut(world.train.world_size)
        sharded = ShardedTrainer(policy, model, config.train, world.train, **options, shards=shards, keep=keep)
        world.before_leaving(sharded.sharded.parameters.release)
        return policy, tokenizer, sharded
    policy, tokenizer = load_policy(config.model, device, config.seed, choose, rows)
    _receive_weights(policy, world)
    return policy, tokenizer, TorchTrainer(policy, config.train, world.train, **options)


def _receive_weights(policy: PolicyModel, world: World) -> None:
    """Overwrite the weights that this rank has loaded with those of rank 0: the files of the ranks may differ."""
    for values in policy.loaded_tensors():
        world.train.broadcast_(values)
    policy.flat.refresh()
