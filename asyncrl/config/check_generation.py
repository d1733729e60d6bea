"""What placements and engines do not go with. Every complaint names the value, the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from .schema import Config


def check_generation(config: Config) -> Iterator[str]:
    """What of it is known without the model."""
    if config.generation.placement == "worker" and config.engine.kind == "dry_run":
        yield (
            "generation.placement is worker but engine.kind is dry_run, which has no model that a worker could load; leave the "
            "placement out (dry_run.shared_device=false simulates a second device)"
        )
    if config.generation.engine != "vllm":
        return
    if config.engine.kind == "dry_run":
        yield "generation.engine is vllm but engine.kind is dry_run, which samples from no model; leave generation.engine out"
    if config.model.dtype == "float64":
        yield (
            "generation.engine is vllm but model.dtype is float64, in which vLLM does not compute; use float32 or bfloat16, or "
            "generation.engine=embedded"
        )
