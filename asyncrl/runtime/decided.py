"""What is decided before any part of a run is opened: device, dtype, resolved settings, and the objects that the program passed.

`model.dtype: auto` means:

    CUDA, compute capability 8 or more     bfloat16
    CPU with AVX512-BF16 or AMX            bfloat16
    other devices                          float32

The rule for CPUs follows a measured ratio: the time with bfloat16 divided by the time with float32. Training of SmolLM2-135M: 0.56
with AVX512-BF16, 2.3 with AVX-512 alone, 17 with AVX2. Decoding of 32 sequences, on the same CPUs: 0.59, 2.2 and 2.6.

A resumed run keeps its first dtype on any machine, because the saved weights and optimizer state have that dtype. A resumed run
also keeps the date that a chat template writes into prompts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asyncrl.concurrency.offload import offload
from asyncrl.config.fields import get
from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config, DtypeName
from asyncrl.data.prompts_files import PromptRows
from asyncrl.data.prompts_sources import load_rows
from asyncrl.distributed.joining import require_secret
from asyncrl.distributed.roles import Roles
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.ports import Environment
from asyncrl.pumps.hooks import Hooks
from asyncrl.rewards.pool import RewardSpec
from asyncrl.telemetry.machine import BFLOAT16, cpu_flags, instruction_set

from .directory import RunDirectory
from .inputs import check_code, check_inputs, require_free_lanes, row_count
from .memory import fit_gpu
from .placement import Gpus, choose_engine
from .progress import Stages


@dataclass(frozen=True, slots=True)
class Decided:
    """The result of `decide`. `directory` is not locked yet, and the ranks of `world` are not connected yet."""

    config: Config  # resolved
    world: World
    device: torch.device
    lines: tuple[str, ...] = ()  # for the terminal: automatic choices and their reasons
    directory: RunDirectory | None = None  # None: no files are written
    # Objects of the program, used instead of those that the configuration names.
    rewards: Sequence[RewardSpec] = ()
    environment: Environment | Callable[..., Any] | None = None
    hooks: Hooks | None = None
    rows: PromptRows | None = None
    row_count: int | None = None  # rows of `data.train` or of the program; None: no rows
    engine_was_auto: bool = False  # whether `decide` chose `generation.engine`


async def decide(
    config: Config,
    stages: Stages,
    *,
    rewards: Sequence[RewardSpec] = (),
    environment: Environment | Callable[..., Any] | None = None,
    hooks: Hooks | None = None,
    prompts: Any = None,
    write: bool = True,
    checked: bool = False,
    world: World | None = None,
) -> Decided:
    """Check and resolve the settings of a run. The arguments are those of `Runtime`. `checked`: check only the user's code, because
    the files were checked before. Errors: ConfigError and DataError for the settings, and for the files and code that they name."""
    stages.begin("checking the device, the settings and the files that they name")
    if world is None:
        world = World.from_env()
        world.roles = Roles.resolve(config.distributed, world.world_size)
        if world.roles.listens:
            require_secret("distributed.listen is set, so nodes that know the secret of the run may join")
    engine_was_auto = config.generation.engine == "auto"
    # If there is no source of prompts, the program that embeds the Runtime submits groups.
    submitted = prompts is None and config.data.train is None and config.door.ring is None
    require_free_lanes(config, world.roles)
    if submitted and world.roles.differ and config.train.kind == "torch":
        raise ConfigError(
            "distributed.roles, distributed.listen or distributed.context is set and there are no prompts: groups of a program do "
            "not travel between ranks; leave all three out, or set data.train"
        )
    program: dict[str, Any] = {"embedding": submitted or prompts is not None, "submitted": submitted}
    program |= {"own_environment": environment is not None, "own_rewards": bool(rewards)}
    resolved, device, lines = await offload(lambda: choose_settings(config, world, **program), "device")
    objects = {"prompts": prompts, "rewards": rewards or None, "environment": environment, "hooks": hooks}
    passed = [name for name, value in objects.items() if value is not None]
    await offload(lambda: check_code(resolved) if checked else check_inputs(resolved, passed), "inputs")
    directory = await offload(lambda: RunDirectory(resolved), "run-directory") if write else None
    stages.begin("reading the prompts")
    rows = None if prompts is None else await offload(lambda: load_rows(prompts), "prompts")
    count = await offload(lambda: row_count(resolved, rows), "prompts")
    return Decided(resolved, world, device, lines, directory, rewards, environment, hooks, rows, count, engine_was_auto)


def choose_settings(
    config: Config, world: World, gpus: Gpus | None = None, **program: Any
) -> tuple[Config, torch.device, tuple[str, ...]]:
    """(the resolved configuration, the device, sentences about automatic choices). Blocks. `gpus`: the GPUs; None: those that
    torch sees. `program`: further arguments of `resolve`. Errors: ConfigError."""
    config, device, lines = choose_dtype(config, world.local_rank, world.local_world_size, gpus)
    config, engine_lines = choose_engine(config, device)
    roles = world.roles
    resolve_settings = partial(resolve, world_size=len(roles.leaders), generating=len(roles.generate), **program)
    config, gpu_lines = fit_gpu(config, device, world, resolve_settings, gpus)
    return config, device, (*lines, *gpu_lines, *engine_lines)


def choose_dtype(
    config: Config, local_rank: int = 0, ranks: int = 1, gpus: Gpus | None = None
) -> tuple[Config, torch.device, tuple[str, ...]]:
    """Returns (the configuration with `model.dtype` and `data.date` filled in, the device, sentences for the terminal). Call before
    `resolve`. With `train.kind: dry_run`: `config` itself, and the CPU. `ranks`: number of ranks on this machine. `gpus`: the
    GPUs; None: those that torch sees. Errors: ConfigError for a device that this machine does not have."""
    if config.train.kind != "torch":
        return config, torch.device("cpu"), ()
    gpus = gpus or Gpus()
    device = choose_device(config.model.device, local_rank, ranks, gpus)
    directory = RunDirectory(config)
    saved = load_config([directory.config_file]) if directory.resumes and directory.config_file.exists() else None
    dtype, reason = config.model.dtype, "model.dtype"
    if dtype == "auto":
        dtype, reason = best_dtype(device, gpus)
        saved_dtype = "auto" if saved is None else saved.model.dtype
        if saved_dtype not in ("auto", dtype):
            new_run = f"a new run on this machine would use {dtype}: {reason}"
            dtype, reason = saved_dtype, f"the dtype at the start of the run; {new_run}"
    lines = [f"matrix products in {dtype} on {device.type} ({reason})"]
    if dtype == "bfloat16" and best_dtype(device, gpus)[0] != dtype:
        lines.append(
            f"note: this {device.type.upper()} has no instructions for bfloat16. On a CPU the emulation takes 2 to 17 times as "
            "long as float32. Set model.dtype to float32 or auto in a new run."
        )
    model = config.model.model_copy(update={"dtype": dtype})
    date = config.data.date or (str(datetime.date.today()) if saved is None else saved.data.date)
    data = config.data.model_copy(update={"date": date})
    return config.model_copy(update={"model": model, "data": data}), device, tuple(lines)


def choose_device(name: str, local_rank: int, ranks: int = 1, gpus: Gpus | None = None) -> torch.device:
    """The device for `name` (`model.device`). `cuda`: the GPU of this rank. `auto`: the GPU of this rank, or the CPU if torch sees
    no GPU. A GPU is returned with its index, since some calls of torch need the index. `ranks`, `gpus`: as for `choose_dtype`.
    Errors: ConfigError if there is no such GPU, if `name` has an index and `ranks` > 1, or if 1 < number of GPUs < `ranks`."""
    count = (gpus or Gpus()).count
    if name == "auto" and not count:
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if device.type != "cuda":
        return device
    if not count:
        raise ConfigError(f"model.device is {name}, and torch finds no CUDA device on this machine; use cpu or auto")
    if device.index is not None:
        if ranks > 1:
            raise ConfigError(
                f"model.device is {name}, and {ranks} ranks of this machine would share that GPU; use cuda: each rank then takes "
                "its own GPU"
            )
        if device.index >= count:
            raise ConfigError(f"model.device is {name}, and torch sees {count} GPU(s) here: cuda:0 to cuda:{count - 1}")
        return device
    # A launcher may show each rank a single GPU, its own. If ranks share a GPU, NCCL refuses the run and names both ranks.
    if count == 1:
        return torch.device("cuda", 0)
    if count < ranks:
        raise ConfigError(
            f"{ranks} ranks run on this machine, and torch sees {count} GPUs: start as many ranks as there are GPUs, show torch "
            "more GPUs (CUDA_VISIBLE_DEVICES), or set model.device=cpu"
        )
    return torch.device("cuda", local_rank)


def best_dtype(device: torch.device, gpus: Gpus | None = None) -> tuple[DtypeName, str]:
    """(the dtype that `model.dtype: auto` means on this device, the reason)."""
    if device.type == "cuda":
        name, (major, minor) = (gpus or Gpus()).describe(device)
        reason = f"auto: {name}, compute capability {major}.{minor}"
        return ("bfloat16" if major >= 8 else "float32"), reason
    if not cpu_flags().isdisjoint(BFLOAT16) and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16", f"auto: bfloat16 instructions; this processor has {instruction_set()}"
    return "float32", f"auto: no bfloat16 instructions that torch may use; this processor has {instruction_set()}"


def chosen_settings(config: Config) -> dict[str, str]:
    """Name -> value of the settings that each rank chooses by itself and that must be equal on all ranks."""
    names = "model.dtype", "distributed.sharding", "train.tokens_per_microbatch"
    return {name: str(get(config, name)) for name in names}


def check_chosen(config: Config, of_rank_0: dict[str, str], rank: int) -> None:
    """Errors: ConfigError if automatic settings of this rank (number `rank`) are not those of rank 0."""
    for name, value in chosen_settings(config).items():
        if of_rank_0[name] != value:
            raise ConfigError(
                f"{name} was chosen for the device: {of_rank_0[name]} on the machine of rank 0 and {value} on the machine of rank "
                f"{rank}; set {name} to {of_rank_0[name]} or {value}"
            )
