"""What `distributed.sharding: fsdp` does not go with. Every complaint names the value, the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from .check_losses import needs_second_buffer
from .schema import Config


def check_distributed(config: Config) -> Iterator[str]:
    """Models with a module for each expert are refused where the model is known (training/sharded.py)."""
    if config.distributed.sharding != "fsdp":
        return
    what = "distributed.sharding is fsdp and "
    if config.train.kind == "dry_run":
        yield what + "train.kind is dry_run, which has no weights to cut; use distributed.sharding=replicate"
    if config.model.lora.rank:
        yield (
            what
            + f"model.lora.rank is {config.model.lora.rank}: adapters are small, and the frozen weights under them are "
            "not cut; use distributed.sharding=replicate"
        )
    if needs_second_buffer(config.algorithm):
        yield (
            what
            + "algorithm.entropy.second_gradient_buffer is true: the two gradients of a microbatch would need two backward "
            "passes over ranks; use preset=one_off or sync without it, or distributed.sharding=replicate"
        )
