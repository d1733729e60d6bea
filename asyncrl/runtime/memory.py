"""Estimates memory before it is allocated: a table, and a warning if too little is free. No run is refused because of it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from asyncrl.config.check_losses import needs_reference, needs_second_buffer
from asyncrl.config.resolve import slots
from asyncrl.config.schema import Config
from asyncrl.errors import LESS_MEMORY
from asyncrl.generation.vllm.versions import BLOCK
from asyncrl.models.loading import parameter_count
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.reward_model import predict_sizes
from asyncrl.training.memory import Lengths, predict_memory, route_bytes

from .inputs import PromptLengths
from .placement import Placement

logger = logging.getLogger("asyncrl.runtime")

GIB = 1 << 30
# A worker before it computes: Python, torch and transformers.
_PROCESS = 400 << 20
_VLLM_PROCESS = 900 << 20  # the same with vLLM
# CUDA's code and libraries for a worker. They lie on the trainer's device too, because the worker opens the board there.
_CONTEXT = 600 << 20


def predicted(
    config: Config,
    ranks: int = 1,
    prompts: PromptLengths | None = None,
    path: ModelPath | None = None,
    placement: Placement | None = None,
) -> dict[str, int]:
    """Bytes of one of `ranks` by purpose, from the model's configuration alone (nothing is allocated). `prompts`: result of
    `measure_prompts`; None: `data.max_prompt_tokens`. `path`: the model's path, if known. `placement`: of the engine; None: on the
    trainer's device."""
    assert config.engine.max_sequences is not None
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = predict_memory(
        config.model,
        config.train,
        max_sequences=config.engine.max_sequences,
        lengths=Lengths(_longest(config, prompts), config.rollout.max_tokens, config.rollout.group_size),
        kv_positions=kv_positions(config, prompts),
        needs_reference=needs_reference(config.algorithm),
        second_buffer=needs_second_buffer(config.algorithm),
        shards=ranks if config.distributed.sharding == "fsdp" else None,
        path=path,
        device=torch.device(device).type,
    )
    sizes = [predict_sizes(model, config.model.dtype, batch_tokens(config)) for model in config.reward.model]
    token = route_bytes(config.model) if config.algorithm.router_replay else 0  # bytes
    if token:
        parts["routes"] = token * _routed_tokens(config, ranks, prompts)
    if placement is not None and placement.workers:
        parts |= _of_workers(config, parts, placement, kv_positions(config, prompts))
    if sizes:
        parts["reward_models"] = sum(each.weights for each in sizes)
        parts["reward_scoring"] = max(each.working for each in sizes)
    return parts


def _of_workers(config: Config, parts: dict[str, int], placement: Placement, positions: int) -> dict[str, int]:
    """The parts that change with workers, on the memory that they share with the trainer."""
    board = 2 * parameter_count(config.model) * DTYPES[config.model.dtype].itemsize
    # Without adapters and FSDP the working copy is a half of the board (weights/sync.py).
    apart = config.model.lora.rank or config.distributed.sharding == "fsdp"
    working = parts["working_copy"] if apart else 0
    if placement.trainer.type != "cpu":
        # Caches of workers on other GPUs are not counted.
        here = sum(not placement.is_apart(number) for number in range(placement.workers))
        return {
            "weight_board": board,
            "workers": placement.workers * _CONTEXT,
            "kv_cache": parts["kv_cache"] * here // placement.workers,
            "working_copy": working,
        }
    each = parts["packed_weights"] + parts["compiled"] + _PROCESS
    if config.generation.engine == "vllm":
        assert config.engine.max_sequences is not None
        begun = BLOCK * placement.share(config.engine.max_sequences)  # positions
        # The largest use comes at the start, with weights that are not packed yet.
        each = board // 2 + parts["kv_cache"] * begun // positions + _VLLM_PROCESS
    return {"weight_board": board, "workers": placement.workers * each, "working_copy": working}


def _routed_tokens(config: Config, ranks: int, prompts: PromptLengths | None) -> int:
    """Tokens whose routes may lie in memory at one time: those of running rows, of groups that wait for training, of the replay
    buffer, and of a packed step."""
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
    given, sequences = config.engine.kv_positions, config.engine.max_sequences
    assert sequences is not None
    if given is not None:
        return given
    completion = config.rollout.max_tokens
    return max(sequences * (_longest(config, prompts) + completion), config.data.max_prompt_tokens + completion)


def _longest(config: Config, prompts: PromptLengths | None) -> int:
    return config.data.max_prompt_tokens if prompts is None else prompts.longest


def cache_line(config: Config, prompts: PromptLengths) -> str:
    """A line for the log on how the size of the cache was chosen."""
    return (
        f"cache: {kv_positions(config, prompts)} positions for {config.engine.max_sequences} sequences; prompts of up to "
        f"{prompts.longest} tokens ({prompts.how})"
    )


def available(device: torch.device) -> int:
    """Free bytes of the device that a run may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: no cheap and honest number
        return 1 << 62
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def table(parts: dict[str, int]) -> str:
    """A line for each part in GiB, and one for their sum."""
    width = max(len(name) for name in parts)
    lines = [f"  {name:<{width}}  {size / GIB:8.3f} GiB" for name, size in parts.items()]
    return "\n".join([*lines, f"  {'total':<{width}}  {sum(parts.values()) / GIB:8.3f} GiB"])


def warn_of(parts: dict[str, int], device: torch.device) -> list[str]:
    """A warning if the prediction is above the free memory, else nothing."""
    total, free = sum(parts.values()), available(device)
    if total <= free:
        return []
    return [
        f"this run needs about {total / GIB:.1f} GiB on {device}, give or take a quarter, and {free / GIB:.1f} GiB are free; "
        f"where memory runs out, {LESS_MEMORY}"
    ]


def check_memory(
    config: Config,
    device: torch.device,
    ranks: int = 1,
    prompts: PromptLengths | None = None,
    placement: Placement | None = None,
) -> int:
    """Bytes that the run will need. Logs a warning with the table if less is free."""
    parts = predicted(config, ranks, prompts, placement=placement)
    for line in warn_of(parts, device):
        logger.warning("%s\n%s", line, table(parts))
    return sum(parts.values())
