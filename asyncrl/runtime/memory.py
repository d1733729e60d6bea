"""Estimates memory before it is allocated: a table, and a warning if too little is free. No run is refused because of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from asyncrl.config.check_losses import needs_reference, needs_second_buffer
from asyncrl.config.resolve import row_limit, slots, with_values
from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.errors import LESS_MEMORY, ConfigError
from asyncrl.generation.vllm.versions import BLOCK, GPU_WORKSPACE
from asyncrl.models.loading import adapter_sizes, describe_module, parameter_count
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.reward_model import predict_sizes
from asyncrl.training.memory import Lengths, predict_memory, route_bytes
from asyncrl.training.sharded import blocks_of

from .cards import GIB, Cards
from .inputs import PromptLengths
from .placement import Placement, place

# Bytes of a parameter that `replicate` keeps on each rank with bfloat16: master, gradient, two moments, working copy.
_STATE = 18
_MOST_STATE = 0.7  # of a GPU's memory; with more state the run uses fsdp
_MOST_USED = 0.85  # of a GPU's memory, as predicted, which is rough
logger = logging.getLogger("asyncrl.runtime")
_MICROBATCHES = (16384, 8192, 4096, 2048)
# A worker before it computes: Python, torch and transformers.
_PROCESS = 400 << 20
_VLLM_PROCESS = 900 << 20  # the same with vLLM
# CUDA's code and libraries for a worker. They take memory of the trainer's device too, because the worker opens the board there.
_CONTEXT = 600 << 20


class Cut(NamedTuple):
    """How a sharded model is cut. `shards`: number of ranks that hold one copy of the model together. `keep`: each rank keeps all
    weights in the matmul dtype and all gradients, so that a step gathers and reduces once and not once a microbatch."""

    shards: int
    keep: bool = False

    def line(self, ranks: int) -> str:
        """A sentence for the terminal."""
        whole = (
            "all ranks hold one copy of the model" if self.shards == ranks else f"each {self.shards} ranks hold a copy"
        )
        often = "step" if self.keep else "microbatch"
        return f"distributed.sharding: fsdp; {whole}; weights and gradients are exchanged once a {often}"


def predicted(
    config: Config,
    ranks: int = 1,
    prompts: PromptLengths | None = None,
    path: ModelPath | None = None,
    placement: Placement | None = None,
    *,
    cut: Cut | None = None,
) -> dict[str, int]:
    """Purpose -> bytes that one rank needs, computed from the model's configuration: nothing is allocated. `ranks`: number of
    ranks that train. `prompts`: result of `measure_prompts`; None: `data.max_prompt_tokens`. `path`: the model's path, if known.
    `placement`: of the engine; None: on the trainer's device. `cut`: of a sharded model; None: over all ranks."""
    assert config.engine.max_sequences is not None
    device = config.model.device if placement is None else placement.trainer.type
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cut = cut or Cut(ranks)
    rollout = config.rollout
    sizes_of_rows = _longest(config, prompts), rollout.max_tokens, rollout.group_size
    parts = predict_memory(
        config.model,
        config.train,
        max_sequences=config.engine.max_sequences,
        lengths=Lengths(*sizes_of_rows, ranks=config.distributed.context),
        kv_positions=kv_positions(config, prompts),
        needs_reference=needs_reference(config.algorithm),
        second_buffer=needs_second_buffer(config.algorithm),
        shards=cut.shards if config.distributed.sharding == "fsdp" else None,
        keep=cut.keep and config.distributed.sharding == "fsdp",
        path=path,
        device=torch.device(device).type,
    )
    sizes = [predict_sizes(model, config.model.dtype, batch_tokens(config)) for model in config.reward.model]
    if config.algorithm.router_replay and (bytes_per_token := route_bytes(config.model)):
        parts["routes"] = bytes_per_token * _routed_tokens(config, ranks // config.distributed.context, prompts)
    if placement is not None and placement.workers:
        parts |= _board_parts(config, parts)
        parts |= _parts_with_workers(config, parts, placement, kv_positions(config, prompts))
        if not placement.trains:
            parts = {name: parts[name] for name in ("weight_board", "workers", "kv_cache")} | _received_adapters(config)
    elif placement is not None and not placement.generates:
        del parts["kv_cache"]
        parts |= _board_parts(config, parts)
        if config.distributed.sharding == "fsdp" or not (config.model.lora.rank or config.model.dtype == "bfloat16"):
            # The board of each rank has only the rank's stripe.
            parts["weight_board"] //= ranks
    if sizes:
        parts["reward_models"] = sum(size.weights for size in sizes)
        parts["reward_scoring"] = max(size.working for size in sizes)
    return parts


def cut_model(
    config: Config, device: torch.device, world: World, placement: Placement | None = None, cards: Cards | None = None
) -> Cut:
    """How `distributed.sharding: fsdp` cuts the model. Depends on total memory, which is equal on all machines of one kind."""
    ranks, per_machine = len(world.roles.train), world.local_world_size
    memory = (cards or Cards()).memory(device) if device.type == "cuda" else _meminfo("MemTotal") // per_machine
    # If a machine has one rank, or training ranks do not fill machines, no machine can hold a copy of its own.
    fills_machines = ranks % per_machine == 0 and world.roles.train == tuple(range(ranks))
    shards = per_machine if per_machine > 1 and fills_machines else ranks
    for cut in (Cut(shards, True), Cut(shards)):
        if sum(predicted(config, ranks, placement=placement, cut=cut).values()) <= _MOST_USED * memory:
            return cut
    return Cut(ranks)


def fit_card(
    config: Config,
    device: torch.device,
    world: World,
    resolve: Callable[[Config], Config],
    cards: Cards | None = None,
) -> tuple[Config, list[str]]:
    """The resolved configuration, and lines for the user. If the trainer is on a GPU, `distributed.sharding` and
    `train.tokens_per_microbatch` are chosen if they were left out. All ranks must choose the same, so the choice depends on the
    total memory of a GPU and not on its free memory. Errors: ConfigError, those of `resolve`."""
    if device.type != "cuda" or config.train.kind != "torch":
        return resolve(config), []
    lines, cards = [], cards or Cards()
    memory, name = cards.memory(device), cards.describe(device)[0]
    state = _STATE * parameter_count(config.model)
    training = len(world.roles.train)
    if training > 1 and "sharding" not in config.distributed.model_fields_set and state > _MOST_STATE * memory:
        sharded = with_values(config, {"distributed.sharding": "fsdp"})
        holds = f"replicate would hold {state / GIB:.0f} GiB of state on each {name}"
        # Both calls refuse what does not work with FSDP.
        try:
            resolve(sharded)
            blocks_of(describe_module(config.model))
        except ConfigError as error:
            lines.append(
                f"distributed.sharding: replicate (left out; {holds.replace('would hold', 'holds')}, but {error})"
            )
        else:
            config = sharded
            lines.append(f"distributed.sharding: fsdp (left out; {holds})")
    if "tokens_per_microbatch" in config.train.model_fields_set:
        return resolve(config), lines
    for tokens in (size for size in _MICROBATCHES if size >= row_limit(config)):
        chosen = resolve(with_values(config, {"train.tokens_per_microbatch": tokens}))
        placement = place(chosen, device, replace(world, rank=0), None, cards)  # a rank that trains
        if sum(predicted(chosen, training, placement=placement).values()) <= _MOST_USED * memory:
            break
    else:
        chosen = resolve(config)
    lines.append(f"train.tokens_per_microbatch: {chosen.train.tokens_per_microbatch} (left out; chosen for {name})")
    return chosen, lines


def worker_parts(config: Config, placement: Placement, parts: dict[str, int]) -> dict[str, int]:
    """Bytes of a worker on another GPU than the trainer's. `parts`: those of a rank whose engine shares the trainer's device."""
    # The embedded engine copies both halves of the board. vLLM has its own parameters, or its part of them, and a copy of one half.
    half, split = parameter_count(config.model) * DTYPES[config.model.dtype].itemsize, placement.tensor_parallel
    process = _CONTEXT + (GPU_WORKSPACE if config.generation.engine == "vllm" else 0)
    return {
        "weights": half + half // split,
        "kv_cache": placement.share(parts["kv_cache"]) // split,
        "process": process,
    }


def _board_parts(config: Config, parts: dict[str, int]) -> dict[str, int]:
    board = 2 * parameter_count(config.model) * DTYPES[config.model.dtype].itemsize
    # Without adapters and FSDP the working copy is a half of the board (weights/sync.py).
    is_separate = config.model.lora.rank or config.distributed.sharding == "fsdp"
    return {"weight_board": board, "working_copy": parts["working_copy"] if is_separate else 0}


def _received_adapters(config: Config) -> dict[str, int]:
    """What a rank that only generates keeps beside its board: the adapters, and the frozen weights that they are merged with."""
    adapters, merged = adapter_sizes(config.model)
    itemsize = DTYPES[config.model.dtype].itemsize
    return {"adapters": adapters * max(itemsize, 4) + merged * itemsize} if adapters else {}


def _parts_with_workers(config: Config, parts: dict[str, int], placement: Placement, positions: int) -> dict[str, int]:
    """Workers and cache, in the memory of the trainer's device."""
    board = parts["weight_board"]
    if placement.trainer.type != "cpu":
        # Caches of workers on other GPUs are not counted.
        beside_trainer = sum(not placement.on_other_device(process) for process in range(len(placement.devices)))
        # vLLM has its own parameters. The embedded engine reads the board.
        own_bytes = board // 2 // placement.tensor_parallel + GPU_WORKSPACE if config.generation.engine == "vllm" else 0
        return {
            "workers": len(placement.devices) * _CONTEXT + beside_trainer * own_bytes,
            "kv_cache": parts["kv_cache"] * beside_trainer // len(placement.devices),
        }
    per_worker = parts["packed_weights"] + parts["compiled"] + _PROCESS
    if config.generation.engine == "vllm":
        assert config.engine.max_sequences is not None
        # A cache block that is not full yet, for each sequence.
        partial_positions = BLOCK * placement.share(config.engine.max_sequences)
        # The largest use comes at the start, with weights that are not packed yet.
        processes = placement.tensor_parallel * _VLLM_PROCESS
        per_worker = board // 2 + parts["kv_cache"] * partial_positions // positions + processes
    return {"workers": placement.workers * per_worker}


def _routed_tokens(config: Config, ranks: int, prompts: PromptLengths | None) -> int:
    """Tokens whose routes may be in memory at one time, on one of `ranks` ranks that build steps: tokens of running rows, of groups
    that wait for training, of the replay buffer, and of a packed step."""
    rollout, rows, prompt = config.rollout, config.engine.max_sequences, _longest(config, prompts)
    assert rows is not None
    context = prompt + rollout.max_tokens
    running = rows * context
    if config.generation.engine == "vllm":
        running = kv_positions(config, prompts) + rows * BLOCK
    elif config.engine.kv_after_update == "recompute":
        running += rows * prompt  # prompts keep the routes of their first prefill too
    groups = -(-slots(config) // ranks) + config.replay.size
    packed = -(-rollout.groups_per_step // ranks) * (prompt + rollout.group_size * rollout.max_tokens)
    return running + groups * rollout.group_size * context + packed


def batch_tokens(config: Config) -> int:
    """Tokens, padding included, that a reward model scores at once."""
    return config.train.tokens_per_microbatch


def kv_positions(config: Config, prompts: PromptLengths | None = None) -> int:
    """Positions of the engine's cache: as configured, or enough for all sequences at once with the longest of these prompts."""
    configured, sequences = config.engine.kv_positions, config.engine.max_sequences
    assert sequences is not None
    if configured is not None:
        return configured
    completion = config.rollout.max_tokens
    return max(sequences * (_longest(config, prompts) + completion), row_limit(config))


def _longest(config: Config, prompts: PromptLengths | None) -> int:
    return row_limit(config) - config.rollout.max_tokens if prompts is None else prompts.longest


def cache_line(config: Config, prompts: PromptLengths) -> str:
    """A line for the log on how the size of the cache was chosen."""
    return (
        f"cache: {kv_positions(config, prompts)} positions for {config.engine.max_sequences} sequences; prompts of up to "
        f"{prompts.longest} tokens ({prompts.how})"
    )


def _meminfo(name: str) -> int:
    """Bytes of a line of /proc/meminfo. Without this file (not Linux) a number above all memory."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    return int(fields[name].split()[0]) * 1024


def available(device: torch.device, cards: Cards | None = None) -> int:
    """Free bytes of the device that a run may take."""
    if device.type == "cuda":
        return (cards or Cards()).free(device)
    return _meminfo("MemAvailable")


def table(parts: dict[str, int]) -> str:
    """A line for each part in GiB, and one for their sum."""
    width = max(len(name) for name in parts)
    lines = [f"  {name:<{width}}  {size / GIB:8.3f} GiB" for name, size in parts.items()]
    return "\n".join([*lines, f"  {'total':<{width}}  {sum(parts.values()) / GIB:8.3f} GiB"])


def memory_warnings(parts: dict[str, int], device: torch.device, cards: Cards | None = None) -> list[str]:
    """A list with a warning if the prediction is above the free memory; else an empty list."""
    total, free = sum(parts.values()), available(device, cards)
    if total <= free:
        return []
    return [
        f"this run needs about {total / GIB:.1f} GiB on {device}, give or take a quarter, and {free / GIB:.1f} GiB are free; "
        f"if memory runs out, {LESS_MEMORY}"
    ]


def check_memory(
    config: Config,
    device: torch.device,
    ranks: int = 1,
    prompts: PromptLengths | None = None,
    placement: Placement | None = None,
    cut: Cut | None = None,
) -> int:
    """Bytes that the run will need. Logs a warning with the table if less is free."""
    parts = predicted(config, ranks, prompts, placement=placement, cut=cut)
    for line in memory_warnings(parts, device):
        logger.warning("%s\n%s", line, table(parts))
    return sum(parts.values())
