"""Memory, predicted before it is allocated: an error with a table instead of a killed process."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.config.check_losses import needs_second_buffer
from asyncrl.config.schema import Config
from asyncrl.errors import PlatformError
from asyncrl.training.memory import predict_memory

GIB = 1 << 30


def predicted(config: Config, ranks: int = 1) -> dict[str, int]:
    """Bytes by what they are for, of one of `ranks`, from the model's configuration alone (nothing is allocated)."""
    assert config.engine.max_sequences is not None
    return predict_memory(
        config.model,
        config.train,
        max_sequences=config.engine.max_sequences,
        max_context=config.data.max_prompt_tokens + config.rollout.max_tokens,
        needs_reference=config.algorithm.kl_coef > 0,
        second_buffer=needs_second_buffer(config.algorithm),
        shards=ranks if config.distributed.sharding == "fsdp" else None,
    )


def available(device: torch.device) -> int:
    """Free bytes of the device that a run may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: no cheap and honest number
        return 1 << 62
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def table(parts: dict[str, int]) -> str:
    width = max(len(name) for name in parts)
    lines = [f"  {name:<{width}}  {size / GIB:8.3f} GiB" for name, size in parts.items()]
    return "\n".join([*lines, f"  {'total':<{width}}  {sum(parts.values()) / GIB:8.3f} GiB"])


def check_memory(config: Config, device: torch.device, ranks: int = 1) -> None:
    """Errors: PlatformError where the prediction exceeds what is free."""
    parts = predicted(config, ranks)
    total, free = sum(parts.values()), available(device)
    if total > free:
        raise PlatformError(
            f"this run needs about {total / GIB:.1f} GiB on {device} and {free / GIB:.1f} GiB are free:\n{table(parts)}\n"
            "Smaller: engine.max_sequences, rollout.max_tokens, data.max_prompt_tokens, train.tokens_per_microbatch; "
            "train.gradient_checkpointing=true"
        )
