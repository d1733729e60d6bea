"""The real half of a run: one device, its lane, the policy that trainer and embedded engine share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.offload import offload
from asyncrl.config.check_losses import needs_reference, needs_second_buffer
from asyncrl.config.resolve import row_limit, versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.loading import Choose, load_policy, load_served, parameter_count, require_rows, require_saveable
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.reward_model import RewardModel, load_reward_model
from asyncrl.models.routing import require_routing
from asyncrl.ports import Engine, WeightSink
from asyncrl.pumps.pipeline import Round
from asyncrl.training.lane_trainer import LaneTrainer
from asyncrl.training.sharded import ShardedTrainer
from asyncrl.training.trainer import TorchTrainer
from asyncrl.weights.sync import SharedWeights

from .gate import Verdict, check_for
from .memory import GIB, batch_tokens, check_memory, kv_positions
from .parts import Parts, Site
from .performance import DeviceRates, measure_rates
from .placement import place
from .prompts import measure_prompts
from .starting import Say
from .workers import Sampler, open_workers


async def open_real(site: Site) -> Parts:
    """Lane, policy, trainer and engine, on one device or with workers beside it. Errors: ConfigError, PlatformError,
    OutOfMemory, WorkerDied."""
    config, world, device, recorder, say = site.config, site.world, site.device, site.recorder, site.say
    transformers_logging.disable_progress_bar()  # "Writing model shards" in the middle of the live view
    say("measuring prompts and memory")
    placement = await offload(lambda: place(config, device, world, parameter_count(config.model)), "placement")
    prompts = await offload(lambda: measure_prompts(config, site.rows, site.own_environment), "prompts")
    ranks = world.world_size
    needed = await offload(lambda: check_memory(config, device, ranks, prompts, placement=placement), "memory")

    def on_start() -> None:
        # OpenMP's count belongs to the calling thread: set it on the lane
        torch.set_num_threads(placement.trainer_threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    name = device.type if device.index is None else f"{device.type}{device.index}"
    lane = await site.stack.enter_async_context(ThreadLane(name, recorder, on_start))
    say(f"loading: about {needed / GIB:.2f} GiB for the run")
    with recorder.wait("runtime", "the model", on="disk", cause="start"):
        policy, tokenizer, core, rates, verdict = await lane.run(
            lambda: _load(config, world, device, say), name="start/load"
        )
        judges = await lane.run(lambda: _load_reward_models(config, device), name="start/reward_models")
    trainer = LaneTrainer(core, lane, recorder)
    round_: Round | None = trainer.train_round if isinstance(core, ShardedTrainer) else None
    sampler = Sampler(policy, tokenizer, lane, kv_positions(config, prompts))
    engine, sink = await (open_workers(site, placement, sampler) if placement.workers else _open_shared(site, sampler))
    return Parts(
        engine, trainer, (sink,), (lane,), tokenizer, policy, core, rates, round_, verdict, judges, placement.line
    )


async def _open_shared(site: Site, sampler: Sampler) -> tuple[Engine, WeightSink]:
    """The engine on the trainer's lane, which reads the trainer's weights."""
    config = site.config
    assert config.engine.max_sequences is not None
    engine = EmbeddedEngine(
        sampler.policy,
        sampler.tokenizer,
        sampler.lane,
        site.recorder,
        max_sequences=config.engine.max_sequences,
        max_context=row_limit(config),
        kv_positions=sampler.kv_positions,
        prefill_tokens=config.engine.prefill_tokens,
        kv_after_update=config.engine.kv_after_update or "keep",
        record_routes=config.algorithm.router_replay,
    )
    await site.stack.enter_async_context(engine)
    return engine, SharedWeights(sampler.policy, engine, sampler.lane)


def _load_reward_models(config: Config, device: torch.device) -> list[RewardModel]:
    tokens, dtype, seed = batch_tokens(config), config.model.dtype, config.seed
    return [load_reward_model(model, dtype, device, tokens, seed) for model in config.reward.model]


def _load(
    config: Config, world: World, device: torch.device, say: Say
) -> tuple[PolicyModel, Any, TorchTrainer, DeviceRates, Verdict]:
    found: list[Verdict] = []

    def choose(module: PreTrainedModel) -> ModelPath:
        found.append(check_for(config, module, device, say))
        return found[0].path

    build = _build_sharded if config.distributed.sharding == "fsdp" else _build
    policy, tokenizer, core = build(config, world, device, choose)
    require_rows(policy.module, tokenizer)
    require_saveable(policy.module, tokenizer)
    if config.algorithm.router_replay:
        require_routing(policy.routing, policy.module, "algorithm.router_replay is true")
    return policy, tokenizer, core, measure_rates(device, policy.dtype), found[0]


def _build(config: Config, world: World, device: torch.device, choose: Choose) -> tuple[PolicyModel, Any, TorchTrainer]:
    policy, tokenizer = load_policy(config.model, device, config.seed, choose, row_limit(config))
    core = TorchTrainer(
        policy,
        config.train,
        world,
        max_completion_length=config.rollout.max_tokens,
        needs_reference=needs_reference(config.algorithm),
        updates_per_batch=versions_per_batch(config),
        mismatch_gate=config.algorithm.mismatch_gate,
        second_buffer=needs_second_buffer(config.algorithm),
    )
    return policy, tokenizer, core


def _build_sharded(
    config: Config, world: World, device: torch.device, choose: Choose
) -> tuple[PolicyModel, Any, TorchTrainer]:
    policy, model, tokenizer = load_served(config.model, device, config.seed, choose, row_limit(config))
    core = ShardedTrainer(
        policy,
        model,
        config.train,
        world,
        max_completion_length=config.rollout.max_tokens,
        needs_reference=needs_reference(config.algorithm),
        updates_per_batch=versions_per_batch(config),
        mismatch_gate=config.algorithm.mismatch_gate,
    )
    world.before_leaving(core.sharded.parameters.release)
    return policy, tokenizer, core
