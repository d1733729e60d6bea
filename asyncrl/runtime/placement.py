"""The GPUs of a machine, and where the engine runs: on the trainer's lane or in workers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config.resolve import row_limit, with_values
from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm.versions import SERVED, require_vllm, vllm_problem
from asyncrl.models.loading import describe_module
from asyncrl.telemetry.machine import free_cores

GIB = 1 << 30
# Memory in GiB according to the data sheet, and compute capability.
KNOWN = {
    "A10": (24, (8, 6)), "A100": (80, (8, 0)), "A100-40": (40, (8, 0)), "B200": (180, (10, 0)), "H100": (80, (9, 0)),
    "H200": (141, (9, 0)), "L4": (24, (8, 9)), "L40S": (48, (8, 9)), "RTX4090": (24, (8, 9)), "T4": (16, (7, 5)),
    "V100": (32, (7, 0)),
}  # fmt: skip
# The fraction of a GPU's memory that tensors can use: the driver and the CUDA context take the rest.
_USABLE = 0.97
# On a CPU, a model gets one thread per 3 million weights. With more threads the operations are so short that threads wait for each
# other longer than they compute, especially if another program takes a core.
_WEIGHTS_PER_THREAD = 3_000_000
_CPU = torch.device("cpu")
PLAIN_MESSAGE = "runs on the plain path, whose states and caches have not been compared with vLLM's"


class Gpus:
    """The GPUs that torch sees in this process."""

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    def describe(self, device: torch.device) -> tuple[str, tuple[int, int]]:
        """The name of a GPU and its compute capability."""
        return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)

    def memory(self, device: torch.device) -> int:
        """All bytes of a GPU, in use or not. The number is the same on all GPUs of one kind."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def free(self, device: torch.device) -> int:
        """Unused bytes of a GPU."""
        return int(torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True, slots=True)
class AssumedGpus(Gpus):
    """GPUs that a plan assumes: `nodes` machines with `per_node` GPUs each. `name`: the kind of the GPUs, a key of KNOWN."""

    nodes: int
    per_node: int
    name: str

    @classmethod
    def parse(cls, text: str) -> AssumedGpus:
        """From `8xH100`, or `2x8xH100` for two machines. Errors: ConfigError."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text)
        kinds = {name.lower(): name for name in KNOWN}
        if match is None or match[3].lower() not in kinds or 0 in (int(match[1] or 1), int(match[2])):
            raise ConfigError(
                f"--assume-devices is {text!r}; write COUNTxCARD or NODESxCOUNTxCARD, for example 8xH100 or 2x8xH100, with one "
                f"of the cards {', '.join(KNOWN)}"
            )
        return cls(int(match[1] or 1), int(match[2]), kinds[match[3].lower()])

    @property
    def count(self) -> int:
        return self.per_node

    def describe(self, device: torch.device) -> tuple[str, tuple[int, int]]:
        return self.name, KNOWN[self.name][1]

    def memory(self, device: torch.device) -> int:
        return KNOWN[self.name][0] * GIB

    def free(self, device: torch.device) -> int:
        return int(_USABLE * self.memory(device))

    def ranks(self, config: Config) -> int:
        """Ranks of one machine: one for each GPU that `generation.devices` does not name. Errors: ConfigError."""
        if config.train.kind != "torch" or config.model.device not in ("auto", "cuda"):
            raise ConfigError(
                f"--assume-devices is given, and train.kind is {config.train.kind} on model.device {config.model.device}, which "
                "gives no GPU to a rank; leave --assume-devices out, or set train.kind=torch model.device=auto"
            )
        taken = {name for name in config.generation.devices if name.startswith("cuda:")}
        if len(taken) >= self.per_node:
            raise ConfigError(
                f"generation.devices names {len(taken)} GPU(s), and --assume-devices gives each machine {self.per_node}: none is "
                "left to train on; name fewer GPUs in generation.devices, or more in --assume-devices"
            )
        return self.per_node - len(taken)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank trains and generates. `devices`: `tensor_parallel` devices per worker; empty: the engine is on the trainer's
    lane, or the rank does not generate. `threads`: of each process of a worker; `trainer_threads`: of the trainer's lane. `line`:
    what was chosen, and why. `trainer`: device of the trainer and of the weight board. `trains`, `generates`: the rank's role."""

    devices: tuple[torch.device, ...]
    threads: int
    trainer_threads: int
    line: str
    trainer: torch.device = _CPU
    tensor_parallel: int = 1
    trains: bool = True
    generates: bool = True

    @property
    def workers(self) -> int:
        """Number of workers of this rank; 0 if `devices` is empty."""
        return len(self.devices) // self.tensor_parallel

    def share(self, total: int) -> int:
        """`total` divided by the number of workers (at least 1), rounded up."""
        return -(-total // max(self.workers, 1))

    def on_other_device(self, number: int) -> bool:
        """Whether a process of a worker is on another device than the trainer. Such a process reads a copy of the board.
        `number`: the index of the process in `devices`; without `tensor_parallel`, the number of the worker."""
        return self.devices[number] != self.trainer

    def message(self, number: int) -> dict[str, Any]:
        """For the setup of worker `number`: the devices of its processes, and whether each process reads a copy of the board."""
        processes = range(number * self.tensor_parallel, (number + 1) * self.tensor_parallel)
        devices = [str(self.devices[process]) for process in processes]
        return {"devices": devices, "copies": [self.on_other_device(process) for process in processes]}


def choose_engine(config: Config, device: torch.device) -> tuple[Config, list[str]]:
    """The configuration with `generation.engine` filled in, and a line for the user if the trainer is on a GPU. Call after
    `choose_dtype`. Errors: ConfigError for a model that cannot be described."""
    if config.generation.engine != "auto":
        return config, []
    problem = _reason_for_embedded(config, device)
    engine = "embedded" if problem else "vllm"
    reason = problem or f"vLLM {require_vllm(device.type)} is installed, and every setting works with it"
    lines = [f"generation.engine: {engine} (auto: {reason})"] if device.type == "cuda" else []
    return with_values(config, {"generation.engine": engine}), lines


def _reason_for_embedded(config: Config, device: torch.device) -> str | None:
    """The reason why `generation.engine: auto` means embedded; None if it means vllm."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the trainer is not on a GPU of NVIDIA"
    if config.engine.kind == "dry_run" or config.generation.placement == "shared":
        return "nothing generates in workers"
    if config.algorithm.router_replay:
        return "algorithm.router_replay is true"
    # Without bfloat16 the default of `algorithm.mismatch_gate` is 0.001 nats, and two engines may differ by more.
    if config.model.dtype != "bfloat16":
        return f"model.dtype is {config.model.dtype}"
    if (problem := vllm_problem(device.type)) is not None:
        return problem
    module = describe_module(config.model)
    if type(module).__name__ not in SERVED:
        return f"{type(module).__name__} has not been compared with vLLM's"
    longest = longest_row(module.config.get_text_config())
    return None if longest is None or row_limit(config) <= longest else f"rows may be longer than {longest} tokens"


def embedded_on_plain_path(config: Config, path: str) -> tuple[Config, list[str]]:
    """The configuration with the embedded engine instead of vLLM, and a line for the user, if the gate chose the plain path. Call
    only if `choose_engine` chose the engine. `path`: name of the model's path."""
    if config.generation.engine != "vllm" or path != "plain":
        return config, []
    lines = [f"generation.engine: embedded (auto: the model {PLAIN_MESSAGE})"]
    return with_values(config, {"generation.engine": "embedded"}), lines


def longest_row(text: Any) -> int | None:
    """The most tokens of a row in vLLM. `text`: the text part of a model's configuration. Returns None if the length is not known.
    For example, if a factor scales the rotary positions, vLLM computes the length itself."""
    rope = getattr(text, "rope_parameters", None) or {}
    if any("factor" in part for part in (rope, *rope.values()) if isinstance(part, dict)):
        return None
    longest: int | None = getattr(text, "max_position_embeddings", None)
    return longest


def place(
    config: Config, device: torch.device, world: World, weights: int | None = None, gpus: Gpus | None = None
) -> Placement:
    """The placement of this rank, whose trainer is on `device`. `weights`: number of weights of the model; None: not known.
    `gpus`: the machine's GPUs; None: the GPUs that torch sees. Errors: ConfigError for a device whose memory workers cannot share,
    or if vLLM is chosen and not installed."""
    count = (gpus or Gpus()).count
    generation = config.generation
    vllm = generation.engine == "vllm"
    configured = bool(generation.workers or generation.threads or generation.devices)
    trainer = _with_index(device)
    # By default, workers of a rank that only generates use the rank's own device, on which nothing trains.
    spare = _spare(trainer, world, count) if world.trains else []
    # If roles differ, the engine needs workers: a lane that waits for rank 0 after a step cannot sample for rank 0's evaluation.
    by_auto = generation.placement == "auto" and (configured or vllm or bool(spare) or world.roles.differ)
    in_workers = generation.placement == "worker" or by_auto
    if not (in_workers and world.generates) or config.engine.kind == "dry_run":
        _, trainer_threads, why_threads = _threads(config, trainer, world, weights, 0)
        where = f"none on a rank that only trains, on {device}"
        if world.generates:
            where = f"shared, on the trainer's {device} ({_reason_to_share(config, trainer)})"
        line = f"generation: {where}; {trainer_threads} thread(s): {why_threads}"
        return Placement((), 0, trainer_threads, line, trainer, generates=world.generates)
    _refuse_workers(device, world)
    engine = f" with vLLM {require_vllm(trainer.type)}" if vllm else ""
    devices = _devices(config, trainer, world, spare, count)
    split = generation.tensor_parallel
    workers = len(devices) // split
    per_process, trainer_threads, why_threads = _threads(config, trainer, world, weights, len(devices))
    if not world.trains:
        reason = "this rank only generates"
    elif generation.placement != "auto":
        reason = "as set"
    elif configured:
        reason = "auto: workers, threads or devices are given"
    elif spare:
        reason = f"auto: {spare[0]} trains nothing"
    else:
        reason = "auto: vLLM runs in workers" if vllm else "auto: distributed.roles or distributed.listen is set"
    names = ", ".join(dict.fromkeys(map(str, devices)))
    beside = f", {trainer_threads} for the trainer" if world.trains else ""
    line = (
        f"generation: {workers} worker(s){engine}{f', each split over {split} devices,' if split > 1 else ''} on {names}, "
        f"{per_process} thread(s) each{beside} ({reason}); threads: {why_threads}"
    )
    return Placement(devices, per_process, trainer_threads, line, trainer, split, world.trains)


def _threads(
    config: Config, trainer: torch.device, world: World, weights: int | None, processes: int
) -> tuple[int, int, str]:
    """(threads of a process of a worker, threads of the trainer, the reason): from the settings, else from OMP_NUM_THREADS, else
    this rank's part of the free cores, divided by its processes. `processes`: of all workers of this rank."""
    per_process, for_trainer = config.generation.threads, config.threads
    omp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if for_trainer and (per_process or not processes):
        return per_process or for_trainer, for_trainer, "as set"
    if omp.strip().isdecimal() and int(omp) > 0:
        return per_process or int(omp), for_trainer or int(omp), f"OMP_NUM_THREADS={omp.strip()}"
    free = free_cores()
    rank_cores, limit = max(1, free // world.local_world_size), free
    reason = f"{free} of {os.cpu_count()} cores are free"
    if trainer.type == "cpu" and weights is not None:
        limit = max(1, weights // _WEIGHTS_PER_THREAD)
        reason += f", and {weights:,} weights are worth {limit}"
    per_process = per_process or min(limit, max(1, rank_cores // (processes + 1)))
    return per_process, for_trainer or min(limit, max(1, rank_cores - processes * per_process)), reason


def _with_index(device: torch.device) -> torch.device:
    """The device. A GPU gets an index, because `cuda` is not equal to `cuda:0`, the device of a tensor. A CPU gets no index."""
    if device.type == "cuda":
        return torch.device("cuda", device.index or 0)
    return torch.device(device.type)


def _spare(trainer: torch.device, world: World, count: int) -> list[torch.device]:
    """This rank's part of the GPUs on which no rank of this machine trains. Empty if this machine has fewer such GPUs than ranks.
    `count`: the GPUs of this machine."""
    if trainer.type != "cuda" or torch.version.hip is not None:
        return []
    ranks = world.local_world_size
    taken = {trainer.index} if ranks == 1 else {trainer.index, *range(ranks)}
    spare = [torch.device("cuda", index) for index in range(count) if index not in taken]
    return spare[world.local_rank :: ranks] if len(spare) >= ranks else []


def _devices(
    config: Config, trainer: torch.device, world: World, spare: Sequence[torch.device], gpus: int
) -> tuple[torch.device, ...]:
    """`generation.tensor_parallel` devices for each worker of this rank, in one tuple. `generation.devices` are dealt to the ranks
    of a machine in turn; ranks share devices if the devices are too few. Without `generation.devices`, workers use the spare GPUs,
    or the trainer's device if there are no spare GPUs. Errors: ConfigError."""
    named = [_parse_device(text, trainer, gpus) for text in config.generation.devices]
    rank, ranks = world.local_rank, world.local_world_size
    devices = (named[rank::ranks] or [named[rank % len(named)]]) if named else ([*spare] or [trainer])
    split = config.generation.tensor_parallel
    if trainer.type == "cuda" and len(set(devices)) < split:
        raise ConfigError(
            f"generation.tensor_parallel is {split}, and the workers of a rank have {len(set(devices))} GPU(s): "
            f"{', '.join(map(str, devices))}; name {split} for each rank in generation.devices, or make tensor_parallel smaller"
        )
    count = config.generation.workers or (max(1, len(devices) // split) if named else 1)
    return tuple(devices[number % len(devices)] for number in range(count * split))


def _parse_device(text: str, trainer: torch.device, count: int) -> torch.device:
    """A device of `generation.devices`, on a machine with `count` GPUs. Errors: ConfigError."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(
            f"generation.devices has {text!r}, which is no device; give names like cuda:1, or leave the setting out"
        ) from None
    if device.type != trainer.type:
        raise ConfigError(
            f"generation.devices has {text} and the trainer is on {trainer}: weights are handed to workers in memory that both "
            f"devices read, and these two devices share no memory; name devices of the kind {trainer.type}, or set model.device"
        )
    if device.type == "cuda" and (device.index is None or device.index >= count):
        raise ConfigError(
            f"generation.devices has {text}, and torch sees {count} GPU(s) here; give names from cuda:0 to cuda:{count - 1}"
        )
    return _with_index(device)


def _refuse_workers(device: torch.device, world: World) -> None:
    """Errors: ConfigError if workers cannot read the weights of a trainer on `device`."""
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip is not None):
        remedy = "leave distributed.roles out" if world.roles.differ else "use generation.placement=shared"
        raise ConfigError(
            f"generation runs in workers and the trainer is on {device}{' (ROCm)' if torch.version.hip else ''}: weights are "
            f"handed to workers in the memory of CPUs, or on NVIDIA's GPUs by CUDA IPC; {remedy}"
        )


def _reason_to_share(config: Config, trainer: torch.device) -> str:
    if config.engine.kind == "dry_run":
        return "engine.kind is dry_run"
    if config.generation.placement == "shared":
        return "as set"
    if trainer.type == "cuda" and torch.version.hip is not None:
        return "auto: on ROCm workers cannot read the trainer's GPU"
    return "auto: no GPU to spare" if trainer.type == "cuda" else "auto: no second device"
