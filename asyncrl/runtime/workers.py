"""Opens the engine of a run whose generation has processes of its own: weight board, workers, and the sink that moves versions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.concurrency.lane import Lane
from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import row_limit
from asyncrl.data.texts import eos_token_ids
from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.generation.worker.engine import Limits, WorkerEngine
from asyncrl.generation.worker.names import segment_name
from asyncrl.generation.worker.peer import Setup
from asyncrl.models.policy import PolicyModel
from asyncrl.models.reading import describe_rest
from asyncrl.models.routing import RoutesShape, has_experts
from asyncrl.transport.memory.board import Board
from asyncrl.transport.memory.halves import SlabHalves
from asyncrl.weights.sync import WeightPublisher

from .parts import Site
from .placement import Placement

_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Sampler:
    """What an engine needs to know of the trainer's model, and how much it may take."""

    policy: PolicyModel
    tokenizer: Any
    lane: Lane  # the trainer's
    kv_positions: int  # of all engines of this rank together


def _form(sampler: Sampler) -> dict[str, Any]:
    """What the embedded engine needs to know of the model beside its weights, as JSON takes it."""
    return {
        "rest": describe_rest(sampler.policy),
        "stop_ids": eos_token_ids(sampler.policy.module, sampler.tokenizer),
    }


def _form_for_vllm(sampler: Sampler, context: int, routes: RoutesShape | None) -> dict[str, Any]:
    """What vLLM needs to know of the model beside its weights, as JSON takes it. `context`: tokens of the longest row; `routes`:
    where they are recorded. Errors: ConfigError."""
    policy = sampler.policy
    if policy.path.name == "plain":
        raise ConfigError(
            f"generation.engine is vllm, and {type(policy.module).__name__} is run on the plain path, whose states and caches of "
            "their own have not been compared with vLLM's; use generation.engine=embedded"
        )
    text = policy.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and context > longest and not _is_stretched(text):
        raise ConfigError(
            f"generation.engine is vllm, and rows may have {context} tokens (data.max_prompt_tokens + rollout.max_tokens) where "
            f"the model has positions for {longest} (max_position_embeddings), beyond which vLLM does not go; make "
            "data.max_prompt_tokens or rollout.max_tokens smaller, or use generation.engine=embedded"
        )
    config = json.loads(policy.config.to_json_string(use_diff=False))
    return {
        "config": config | {"architectures": [type(policy.module).__name__]},
        "layout": asdict(policy.weights.layout()),
        "vocabulary": int(text.vocab_size),
        "stop_ids": eos_token_ids(policy.module, sampler.tokenizer),
        "position_bytes": cache_shape(policy.config, 1, 1).nbytes(policy.dtype),
        "routes": None if routes is None else asdict(routes),
        "routed": has_experts(policy.module),
    }


def _is_stretched(text: Any) -> bool:
    """Whether its rotary positions are scaled by a factor: how far vLLM then goes is for vLLM to say."""
    rope = getattr(text, "rope_parameters", None) or {}
    return any("factor" in part for part in (rope, *rope.values()) if isinstance(part, dict))


def _create_board(policy: PolicyModel) -> Board:
    """On the trainer's device, where it writes without a copy across. Errors: OutOfMemory, PlatformError."""
    weights = policy.weights
    slab: SlabHalves | None = None
    if policy.device.type != "cpu":
        slab = SlabHalves.create(segment_name("weights", 0), weights.size, policy.dtype, policy.device)
    return Board.create(weights.size, policy.dtype, weights.layout_digest(), slab)


async def open_workers(site: Site, placement: Placement, sampler: Sampler) -> tuple[WorkerEngine, WeightPublisher]:
    """The engine, once every worker computes with the weights that the trainer has, and the sink that moves it to later ones.
    Errors: WorkerDied, PlatformError and OutOfMemory for the board, ConfigError for what the engine cannot run."""
    config, world, policy = site.config, site.world, sampler.policy
    logs = site.logs and (site.logs / f"rank_{world.rank}" if world.world_size > 1 else site.logs)
    board = await offload(lambda: _create_board(policy), "weight-board")
    site.stack.push_async_callback(offload, board.close, "weight-board")
    assert config.engine.max_sequences is not None
    context = row_limit(config)
    routes = policy.routing.shape if config.algorithm.router_replay and policy.routing is not None else None
    limits = Limits(
        workers=placement.workers,
        max_sequences=placement.share(config.engine.max_sequences),
        max_context=context,
        vocabulary=int(policy.config.get_text_config().vocab_size),
        has_tokenizer=sampler.tokenizer is not None,
        start_s=config.watchdog.stage_timeout_s,
        silent_s=config.watchdog.loop_timeout_s,
        closure_s=config.watchdog.lane_timeout_s,
        route_bytes=0 if routes is None else routes.token_bytes,
        ranks=site.world.world_size if config.preset == "sync" else None,
    )
    message: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "path": asdict(policy.path),
        "board": board.description,
        "board_fd": board.fd,
        "max_sequences": limits.max_sequences,
        "max_context": context,
        "kv_positions": max(placement.share(sampler.kv_positions), context),
        "threads": placement.threads,
    }

    vllm = config.generation.engine == "vllm"
    message["form"] = _form_for_vllm(sampler, context, routes) if vllm else _form(sampler)

    def setup(number: int) -> Setup:
        return Setup(
            message | {"device": str(placement.devices[number]), "copies": placement.is_apart(number)},
            (board.fd,),
            dict.fromkeys(_THREADS, str(placement.threads)),
            None if logs is None else logs / f"worker-{number}.log",
            limits.capacity,
            context,
        )

    engine = WorkerEngine(limits, setup, site.recorder, say=site.say)
    posted = WeightPublisher(policy, board, engine, sampler.lane)
    site.stack.callback(posted.close)  # after the engine, whose workers read the board
    engine.begin_with(*await posted.post_first())
    await site.stack.enter_async_context(engine)
    with site.recorder.wait("runtime", "the workers", on="their models", cause="start"):
        await engine.all_serve()
    return engine, posted
