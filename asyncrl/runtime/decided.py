"""What a run is, decided before anything of it is opened: device and dtype, resolved settings, and the objects of the program.

What `model.dtype: auto` is:

    CUDA, compute capability 8 or more     bfloat16
    CPU with AVX512-BF16 or AMX            bfloat16
    anything else                          float32

Measured on SmolLM2-135M, bfloat16 takes so many times the CPU seconds of float32 in training (decoding 32 sequences): 0.56 (0.59)
with AVX512-BF16, 2.3 (2.2) with AVX-512 alone, 17 (2.6) with AVX2.

By instructions and not by a measurement, so that every start on a machine, and `--dry-run`, choose the same. A run that is resumed
keeps the dtype it was started with, wherever it goes on: weights, bounds and the saved state belong to it. It also keeps the day
that a chat template writes into its prompts.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.concurrency.offload import offload
from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config, DtypeName
from asyncrl.data.prompts_files import PromptRows
from asyncrl.data.prompts_sources import load_rows
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.ports import Environment
from asyncrl.pumps.hooks import Hooks
from asyncrl.rewards.pool import RewardSpec
from asyncrl.telemetry.machine import BFLOAT16, cpu_flags, instruction_set

from .directory import RunDirectory
from .inputs import check_code, check_inputs
from .progress import Stages


@dataclass(frozen=True, slots=True)
class Decided:
    """See the module docstring. Nothing of it is open: `directory` is not locked, and the ranks of `world` have not met."""

    config: Config  # resolved: nothing in it is left to be derived
    world: World
    device: torch.device
    lines: tuple[str, ...] = ()  # for people: which dtype and why
    directory: RunDirectory | None = None  # None: the run writes nothing
    # What the program brings, in the place of what the configuration would name.
    rewards: Sequence[RewardSpec] = ()
    environment: Environment | None = None
    hooks: Hooks | None = None
    rows: PromptRows | None = None


async def decide(
    config: Config,
    stages: Stages,
    *,
    rewards: Sequence[RewardSpec] = (),
    environment: Environment | None = None,
    hooks: Hooks | None = None,
    prompts: Any = None,
    write: bool = True,
    checked: bool = False,
) -> Decided:
    """The arguments are those of a Runtime. Files and code that the settings name are checked here. Errors: ConfigError,
    DataError."""
    stages.begin("looking at the device, the settings and the files they name")
    world = World.from_env()
    config, device, lines = await offload(
        lambda: choose_dtype(config, world.local_rank, world.local_world_size), "device"
    )
    submitted = prompts is None and config.data.train is None and config.door.ring is None
    resolved = resolve(
        config,
        world.world_size,
        embedding=submitted or prompts is not None,
        submitted=submitted,
        own_environment=environment is not None,
    )
    brought = prompts is not None, bool(rewards), environment is not None, hooks is not None
    await offload(lambda: check_code(resolved) if checked else check_inputs(resolved, *brought), "inputs")
    directory = await offload(lambda: RunDirectory(resolved), "run-directory") if write else None
    stages.begin("reading the prompts")
    rows = None if prompts is None else await offload(lambda: load_rows(prompts), "prompts")
    return Decided(resolved, world, device, lines, directory, rewards, environment, hooks, rows)


def choose_dtype(config: Config, local_rank: int = 0, ranks: int = 1) -> tuple[Config, torch.device, tuple[str, ...]]:
    """(the configuration with `model.dtype` and `data.date` filled in, the device, lines for people), before `resolve`, for one of
    the `ranks` of this machine. Blocks for milliseconds. Errors: ConfigError for a device that is not here."""
    if config.train.kind != "torch":
        return config, torch.device("cpu"), ()
    device = choose_device(config.model.device, local_rank, ranks)
    dtype, reason, saved = config.model.dtype, "model.dtype", _saved(config)
    if config.model.dtype == "auto":
        dtype, reason = best_dtype(device)
        started = "auto" if saved is None else saved.model.dtype
        if started not in ("auto", dtype):
            dtype, reason = started, f"the run was started with it, though this machine would take {dtype}: {reason}"
    lines = [f"products in {dtype} on {device.type} ({reason})"]
    if dtype == "bfloat16" and best_dtype(device)[0] != dtype:
        lines.append(
            f"note: this {device.type.upper()} has no instructions for bfloat16 and emulates it, which takes 2 to 17 times as "
            "long as float32: set model.dtype to float32, or to auto, in a new run"
        )
    model = config.model.model_copy(update={"dtype": dtype})
    day = config.data.date or (str(datetime.date.today()) if saved is None else saved.data.date)
    data = config.data.model_copy(update={"date": day})
    return config.model_copy(update={"model": model, "data": data}), device, tuple(lines)


def choose_device(name: str, local_rank: int, ranks: int = 1) -> torch.device:
    """`auto`: the GPU of this rank where there is one, else the CPU. `cuda`: that GPU. A GPU has its number, always: torch's own
    calls ask for it. Errors: ConfigError where there is no such GPU, or not one for each of the `ranks` of this machine."""
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name}, and torch finds no CUDA device here; use cpu or auto")
    count = torch.cuda.device_count()
    if device.index is not None:
        if ranks > 1:
            raise ConfigError(
                f"model.device is {name}, and {ranks} ranks of this machine would share it; use cuda, and each takes its own"
            )
        if device.index >= count:
            raise ConfigError(f"model.device is {name}, and torch sees {count} GPU(s) here: cuda:0 to cuda:{count - 1}")
        return device
    # A launcher may show each rank one GPU alone; `meet` finds ranks that share it.
    if count == 1:
        return torch.device("cuda", 0)
    if count < ranks:
        raise ConfigError(
            f"{ranks} ranks on this machine, and torch sees {count} GPUs: start as many ranks as there are GPUs, show more of "
            "them (CUDA_VISIBLE_DEVICES), or set model.device=cpu"
        )
    return torch.device("cuda", local_rank)


def best_dtype(device: torch.device) -> tuple[DtypeName, str]:
    """What `auto` is there, and why."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        reason = f"auto: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        return ("bfloat16" if major >= 8 else "float32"), reason
    if not cpu_flags().isdisjoint(BFLOAT16) and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16", f"auto: bfloat16 instructions; this processor has {instruction_set()}"
    return "float32", f"auto: no bfloat16 instructions that torch may use; this processor has {instruction_set()}"


def meet(world: World, config: Config, device: torch.device) -> None:
    """Open the world; every rank must have the same dtype, and no two the same GPU. Blocks until the others are there.
    Errors: ConfigError, and those of `World.open`."""
    world.open(device, alone=config.distributed.sharding == "fsdp")
    if world.world_size == 1:
        return
    dtype = config.model.dtype
    store = world.store("dtype")
    if world.is_first:
        store.set("rank 0", dtype)
    elif (first := store.get("rank 0").decode()) != dtype:
        raise ConfigError(
            f"model.dtype is auto, which is {first} on the machine of rank 0 and {dtype} on that of rank {world.rank}; set it "
            "to one of them"
        )
    if device.type != "cuda":
        return
    card = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"card of rank {world.rank}", card)
    for other in range(world.rank):
        if store.get(f"card of rank {other}").decode() == card:
            raise ConfigError(
                f"ranks {other} and {world.rank} have the same GPU ({device}, {card}): start as many ranks as there are "
                "GPUs, or show each rank its own (CUDA_VISIBLE_DEVICES)"
            )


def _saved(config: Config) -> Config | None:
    """What the run that goes on was started with."""
    directory = RunDirectory(config)
    return load_config([directory.config_file]) if directory.goes_on and directory.config_file.exists() else None
