"""Where the engine runs: on the trainer's device, or in workers beside it. Settled once, before memory is predicted."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm.versions import require_vllm


@dataclass(frozen=True, slots=True)
class Placement:
    """`devices`: of this rank's workers, one each; none: `shared`. `threads`: of a worker; `trainer_threads`: of the trainer's
    lane. `line`: for people, what was chosen and why."""

    devices: tuple[torch.device, ...]
    threads: int
    trainer_threads: int
    line: str

    @property
    def workers(self) -> int:
        """How many there are; 0: trainer and engine share a lane."""
        return len(self.devices)

    def share(self, total: int) -> int:
        """Of what all sequences together take, the part of one engine, rounded up."""
        return -(-total // max(self.workers, 1))


def place(config: Config, device: torch.device, world: World) -> Placement:
    """Of this rank, whose trainer is on `device`. Errors: ConfigError for a device whose memory workers cannot share,
    and where the engine that was asked for is not installed."""
    generation, cores = config.generation, os.cpu_count() or 1
    vllm = generation.engine == "vllm"
    given = bool(generation.workers or generation.threads)
    wanted = generation.placement == "worker" or (generation.placement == "auto" and (given or vllm))
    if not wanted or config.engine.kind == "dry_run":
        why = _why_shared(config, device)
        return Placement((), 0, config.threads or cores, f"generation: shared, on the trainer's {device} ({why})")
    if device.type != "cpu":
        raise ConfigError(
            f"generation.placement is worker and the trainer is on {device}: weights are handed to workers in the memory of CPUs "
            "alone so far; use shared"
        )
    engine = f" with vLLM {require_vllm()}" if vllm else ""
    count = generation.workers or 1
    per_worker = generation.threads or max(1, cores // world.local_world_size // (count + 1))
    trainer = config.threads or max(1, cores // world.local_world_size - count * per_worker)
    why = "auto: workers or threads are given" if given else "auto: vLLM runs in workers"
    why = "as set" if generation.placement == "worker" else why
    line = f"generation: {count} worker(s){engine} on {device}, {per_worker} thread(s) each, {trainer} for the trainer ({why})"
    return Placement((device,) * count, per_worker, trainer, line)


def _why_shared(config: Config, device: torch.device) -> str:
    if config.engine.kind == "dry_run":
        return "engine.kind is dry_run"
    if config.generation.placement == "shared":
        return "as set"
    return "auto: a worker on a GPU of its own is still to come" if device.type == "cuda" else "auto: no second device"
