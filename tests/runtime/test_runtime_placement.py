"""Where the engine runs: what is chosen, what it says, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import DRY, REAL, config_of

from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.distributed.roles import Roles
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm import versions
from asyncrl.models.loading import parameter_count
from asyncrl.models.policy import DTYPES
from asyncrl.runtime.decided import decide
from asyncrl.runtime.memory import fit_gpu, predicted, worker_parts
from asyncrl.runtime.placement import AssumedGpus, Gpus, Placement, choose_engine, place
from asyncrl.runtime.plan import plan
from asyncrl.runtime.progress import Stages
from asyncrl.runtime.runtime import Runtime

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE = World(0, 1, 0, 1, "", 0, 0)
VLLM = "generation.engine=vllm"
WORKER = ("generation.placement=worker",)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.runtime.placement.free_cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("overrides", "workers", "threads", "trainer", "line"),
    [
        ((), 0, 0, 8, "shared, on the trainer's cpu (auto: no second device)"),
        (("generation.placement=shared",), 0, 0, 8, "shared, on the trainer's cpu (as set)"),
        (("generation.placement=worker",), 1, 4, 4, "1 worker(s) on cpu, 4 thread(s) each, 4 for the trainer (as set)"),
        (("generation.workers=3",), 3, 2, 2, "3 worker(s) on cpu, 2 thread(s) each, 2 for the trainer (auto: workers"),
        (("generation.threads=6",), 1, 6, 2, "1 worker(s) on cpu, 6 thread(s) each, 2 for the trainer"),
        (("generation.threads=6", "threads=5"), 1, 6, 5, "1 worker(s) on cpu, 6 thread(s) each, 5 for the trainer"),
        (("generation.workers=20",), 20, 1, 1, "20 worker(s) on cpu, 1 thread(s) each, 1 for the trainer"),
    ],
)
def test_it_is_chosen_by_what_is_given(
    overrides: tuple[str, ...], workers: int, threads: int, trainer: int, line: str
) -> None:
    placement = place(load_config([], overrides), CPU, ONE)
    assert (placement.workers, placement.threads, placement.trainer_threads) == (workers, threads, trainer)
    assert placement.line.startswith(f"generation: {line}")


@pytest.mark.parametrize(
    ("weights", "environment", "overrides", "threads", "why"),
    [
        (118_000, None, (), (0, 1), "8 of 16 cores are free, and 118,000 weights are worth 1"),
        (7_000_000, None, (), (0, 2), "8 of 16 cores are free, and 7,000,000 weights are worth 2"),
        (135_000_000, None, (), (0, 8), "8 of 16 cores are free, and 135,000,000 weights are worth 45"),
        (118_000, None, ("generation.placement=worker",), (1, 1), "118,000 weights are worth 1"),
        (135_000_000, None, ("generation.placement=worker",), (4, 4), "135,000,000 weights are worth 45"),
        (118_000, "3", (), (0, 3), "OMP_NUM_THREADS=3"),
        (118_000, "6,2", ("generation.placement=worker",), (6, 6), "OMP_NUM_THREADS=6"),
        (118_000, "3", ("threads=5",), (0, 5), "as set"),
        (118_000, "3", ("threads=5", "generation.workers=1"), (3, 5), "OMP_NUM_THREADS=3"),
        (135_000_000, "junk", ("generation.threads=2", "threads=1"), (2, 1), "as set"),
    ],
)
def test_threads_follow_the_variable_and_else_the_model_and_the_free_cores(
    monkeypatch: pytest.MonkeyPatch,
    weights: int,
    environment: str | None,
    overrides: tuple[str, ...],
    threads: tuple[int, int],
    why: str,
) -> None:
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    placement = place(load_config([], overrides), CPU, ONE, weights)
    assert (placement.threads, placement.trainer_threads) == threads and placement.line.endswith(why), placement


def test_ranks_with_roles_have_workers_and_ranks_of_one_machine_share_its_cores() -> None:
    two, config = replace(ONE, world_size=2), load_config([], [])
    placement = place(config, CPU, replace(two, roles=Roles((0, 1), (0,))))
    assert placement.workers == 1 and "(auto: distributed.roles or distributed.listen is set)" in placement.line
    with pytest.raises(ConfigError, match=r"the trainer is on mps: .*; leave distributed.roles out"):
        place(config, torch.device("mps"), replace(two, roles=Roles((0,), (0, 1))))
    placement = place(load_config([], ["generation.workers=1"]), CPU, replace(two, local_world_size=2))
    assert (placement.threads, placement.trainer_threads) == (2, 2)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("count", "overrides", "devices", "line"),
    [
        (1, (), (), "shared, on the trainer's cuda:0 (auto: no GPU to spare)"),
        (2, ("generation.placement=shared",), (), "shared, on the trainer's cuda:0 (as set)"),
        (2, (), (1,), "1 worker(s) on cuda:1, 4 thread(s) each, 4 for the trainer (auto: cuda:1 trains nothing)"),
        (4, (), (1,), "1 worker(s) on cuda:1, "),
        (
            4,
            ("generation.workers=5",),
            (1, 2, 3, 1, 2),
            "5 worker(s) on cuda:1, cuda:2, cuda:3, 1 thread(s) each, 3 for",
        ),
        (1, WORKER, (0,), "1 worker(s) on cuda:0, 4 thread(s) each, 4 for the trainer (as set)"),
        (
            3,
            ("generation.devices=cuda:2",),
            (2,),
            "1 worker(s) on cuda:2, 4 thread(s) each, 4 for the trainer (auto: w",
        ),
        (3, ("generation.devices=[cuda:0, cuda:2]",), (0, 2), "2 worker(s) on cuda:0, cuda:2, 2 thread(s) each, 4 for"),
        (
            3,
            ("generation.devices=cuda:2", "generation.workers=2"),
            (2, 2),
            "2 worker(s) on cuda:2, 2 thread(s) each, 4",
        ),
    ],
)
def test_a_gpu_that_trains_nothing_generates(
    monkeypatch: pytest.MonkeyPatch, count: int, overrides: tuple[str, ...], devices: tuple[int, ...], line: str
) -> None:
    gpus(monkeypatch, count)
    placement = place(load_config([], overrides), GPU, ONE)
    assert [device.index for device in placement.devices] == list(devices)
    assert placement.line.startswith(f"generation: {line}")
    assert [placement.on_other_device(index) for index in range(placement.workers)] == [index != 0 for index in devices]
    # A trainer without a number is on the first GPU.
    assert place(load_config([], overrides), torch.device("cuda"), ONE).trainer == GPU


@pytest.mark.parametrize(
    ("count", "devices", "first", "second"),
    [
        (2, "", None, None),
        (4, "", [2], [3]),
        (3, "", None, None),
        (4, "[cuda:2, cuda:3]", [2], [3]),
        (4, "[cuda:3]", [3], [3]),
        (5, "[cuda:4, cuda:3, cuda:2]", [4, 2], [3]),
    ],
)
def test_ranks_of_one_machine_share_out_the_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, devices: str, first: list[int] | None, second: list[int] | None
) -> None:
    gpus(monkeypatch, count)
    config = load_config([], [f"generation.devices={devices}"] if devices else [])
    for rank, expected in ((0, first), (1, second)):
        world = replace(ONE, rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        placement = place(config, torch.device("cuda", rank), world)
        assert [device.index for device in placement.devices] == (expected or [])


@pytest.mark.parametrize(
    ("device", "overrides", "words"),
    [
        (torch.device("mps"), WORKER, "the trainer is on mps: .* CUDA IPC; use generation.placement=shared"),
        (GPU, ("generation.devices=cpu",), "generation.devices has cpu and the trainer is on cuda:0"),
        (CPU, ("generation.devices=[cuda:0]",), "generation.devices has cuda:0 and the trainer is on cpu"),
        (
            GPU,
            ("generation.devices=cuda:2",),
            r"has cuda:2, and torch sees 2 GPU\(s\) here; give .* from cuda:0 to cuda:1",
        ),
        (GPU, ("generation.devices=cuda",), "has cuda, and torch sees"),
        (GPU, ("generation.devices=second",), "has 'second', which is no device"),
    ],
)
def test_devices_that_cannot_share_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, overrides: tuple[str, ...], words: str
) -> None:
    gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=words):
        place(load_config([], overrides), device, ONE)


@pytest.mark.parametrize(("count", "index"), [(1, 0), (2, 1)])
def test_vllm_generates_on_a_spare_gpu_or_beside_the_trainer(
    monkeypatch: pytest.MonkeyPatch, count: int, index: int
) -> None:
    gpus(monkeypatch, count)
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0")
    placement = place(load_config([], ["generation.engine=vllm"]), GPU, ONE)
    assert placement.devices == (torch.device("cuda", index),) and "with vLLM 0.32.0 on cuda:" in placement.line


@pytest.mark.parametrize(
    ("count", "overrides", "expected"),
    [
        (3, (), [[1, 2]]),
        (5, ("generation.workers=2",), [[1, 2], [3, 4]]),
        (5, ("generation.devices=[cuda:1,cuda:2,cuda:3,cuda:4]",), [[1, 2], [3, 4]]),
        (2, ("generation.devices=[cuda:0,cuda:1]",), [[0, 1]]),
    ],
)
def test_a_split_worker_has_as_many_gpus_as_parts(
    monkeypatch: pytest.MonkeyPatch, count: int, overrides: tuple[str, ...], expected: list[list[int]]
) -> None:
    gpus(monkeypatch, count)
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0")
    settings = ("generation.engine=vllm", "generation.tensor_parallel=2", *overrides)
    placement = place(load_config([], settings), GPU, ONE)
    assert placement.workers == len(expected)
    for number, devices in enumerate(expected):
        names, copies = [f"cuda:{index}" for index in devices], [index != 0 for index in devices]
        assert placement.message(number) == {"devices": names, "copies": copies}
    assert f"{len(expected)} worker(s) with vLLM 0.32.0, each split over 2 devices, on cuda:" in placement.line


def test_a_worker_that_is_split_over_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0")
    settings = ("generation.engine=vllm", "generation.tensor_parallel=2")
    with pytest.raises(
        ConfigError, match=r"tensor_parallel is 2, and the workers of a rank have 1 GPU\(s\): cuda:1; name 2"
    ):
        place(load_config([], settings), GPU, ONE)


def test_a_build_of_vllm_for_cpus_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0+cpu")
    with pytest.raises(ConfigError, match=r"vLLM 0\.32\.0\+cpu is installed here, a build for CPUs; .*\[vllm\]"):
        place(load_config([], ["generation.engine=vllm"]), GPU, ONE)


def test_on_rocm_it_is_shared_and_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "(auto: on ROCm workers cannot read the trainer's GPU)" in place(load_config([]), GPU, ONE).line
    with pytest.raises(ConfigError, match=r"the trainer is on cuda:0 \(ROCm\)"):
        place(load_config([], ["generation.placement=worker"]), GPU, ONE)


@pytest.mark.parametrize(
    ("base", "overrides", "words"),
    [
        (DRY, WORKER, "generation.placement is worker but engine.kind is dry_run"),
        (REAL, ("generation.placement=shared", "generation.workers=2"), "generation.workers is 2 but .* is shared"),
        (REAL, ("generation.placement=shared", "generation.devices=cuda:1"), "generation.devices is .* is shared"),
        (REAL, ("rollout.weight_sync_interval=2",), "generation.placement=worker"),
        (
            REAL,
            ("generation.engine=embedded", "generation.tensor_parallel=2"),
            "only vllm takes more than 1; set generation.eng",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, base: dict[str, Any], overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(config_of(tmp_path, *overrides, base=base))


@pytest.mark.parametrize(("dtype", "more"), [("float32", ()), ("bfloat16", ()), ("bfloat16", ("model.lora.rank=2",))])
def test_memory_counts_the_board_and_what_lies_beside_the_trainer(
    tmp_path: Path, dtype: str, more: tuple[str, ...]
) -> None:
    config = resolve(config_of(tmp_path, "generation.workers=2", f"model.dtype={dtype}", *more))
    alone, half = predicted(config), parameter_count(config.model) * DTYPES[dtype].itemsize
    # Adapters: their working copy, and the merged weights. In bfloat16 the working copy of a whole model is a half of the board.
    copies = 2 * half + (alone["copies"] if more else 0)
    parts = predicted(config, placement=place(config, CPU, ONE))
    assert (parts["copies"], parts["cache"], parts["workers"]) == (copies, alone["cache"], 2 * (600 << 20))
    for devices, here in (((0, 0), 1.0), ((0, 1), 0.5), ((1, 2), 0.0)):
        placement = Placement(tuple(torch.device("cuda", index) for index in devices), 1, 1, "", GPU)
        parts = predicted(config, placement=placement)
        assert (parts["copies"], parts["cache"]) == (copies, int(here * alone["cache"]))
        assert parts["workers"] == 2 * (600 << 20)  # each has a context there, whatever it computes on
        vllm = config.model_copy(update={"generation": config.generation.model_copy(update={"engine": "vllm"})})
        # Beside the trainer vLLM also has its own parameters, and memory for a step.
        own = int(2 * here) * (half + versions.GPU_WORKSPACE)
        assert predicted(vllm, placement=placement)["workers"] == parts["workers"] + own
        # One worker over both devices: each has half of the parameters and of the cache.
        split = predicted(vllm, placement=replace(placement, tensor_parallel=2))
        assert split["cache"] == parts["cache"]
        assert split["workers"] == parts["workers"] + int(2 * here) * (half // 2 + versions.GPU_WORKSPACE)
    worker = worker_parts(vllm, replace(placement, tensor_parallel=2), alone["cache"])
    assert worker["copies"] == half + half // 2 and worker["cache"] == alone["cache"] // 2


VLLM_MODEL = Path(__file__).with_name("runtime_model.py")
SERVED = (f"model.path={VLLM_MODEL}:build_wide", "model.dtype=bfloat16")


@pytest.mark.parametrize(
    ("device", "installed", "overrides", "engine", "why"),
    [
        (GPU, "0.32.1", (), "vllm", "vLLM 0.32.1 is installed, and every setting works with it"),
        (GPU, "0.33.0", (), "vllm", "vLLM 0.33.0 is installed, and every setting works with it"),
        (GPU, "0.32.1", ("generation.placement=worker", "model.lora.rank=4"), "vllm", "vLLM 0.32.1 is installed"),
        (GPU, None, (), "embedded", "vLLM is not installed here"),
        (GPU, "0.34.0", (), "embedded", "vLLM 0.34.0 is installed here, for which"),
        (GPU, "0.32.0+cpu", (), "embedded", "vLLM 0.32.0+cpu is installed here, a build for CPUs"),
        (GPU, "0.32.1", ("generation.placement=shared",), "embedded", "nothing generates in workers"),
        (GPU, "0.32.1", ("model.dtype=float32",), "embedded", "model.dtype is float32"),
        (GPU, "0.32.1", ("algorithm.router_replay=true",), "embedded", "algorithm.router_replay is true"),
        (GPU, "0.32.1", (f"model.path={VLLM_MODEL}:build_stateful",), "embedded", "Lfm2ForCausalLM has not been compared"),
        (GPU, "0.32.1", ("rollout.max_tokens=60",), "embedded", "rows may be longer than 64 tokens"),
        (CPU, "0.32.1", (), "embedded", None),
    ],
)  # fmt: skip
def test_the_engine_is_chosen_and_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: torch.device,
    installed: str | None,
    overrides: tuple[str, ...],
    engine: str,
    why: str | None,
) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setattr(versions, "installed_version", lambda: installed)
    chosen, lines = choose_engine(config_of(tmp_path, *SERVED, *overrides), device)
    assert chosen.generation.engine == engine and resolve(chosen).generation.engine == engine
    if why is None:
        assert not lines
    else:
        assert lines[0].startswith(f"generation.engine: {engine} (auto: {why}")
    # What was set is not chosen.
    asked = config_of(tmp_path, *SERVED, "generation.engine=embedded")
    assert choose_engine(asked, device) == (asked, [])


def test_a_dry_run_says_which_engine_generates_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0")
    text = plan(config_of(tmp_path, *SERVED), AssumedGpus.parse("1xH100"))
    assert "generation.engine: vllm (auto: vLLM 0.32.0 is installed" in text
    assert "generation: 1 worker(s) with vLLM 0.32.0 on cuda:0" in text
    monkeypatch.setattr(versions, "installed_version", lambda: None)
    text = plan(config_of(tmp_path, *SERVED), AssumedGpus.parse("1xH100"))
    assert "generation.engine: embedded (auto: vLLM is not installed here)" in text and "  engine: embedded" in text


async def test_on_a_cpu_the_engine_stays_the_embedded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0")
    decided = await decide(config_of(tmp_path, "model.device=cpu"), Stages(), write=False)
    assert decided.config.generation.engine == "embedded"
    assert not any("generation.engine" in line for line in decided.lines)


@pytest.fixture
def plain_for_vllm(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Settings of a model on the plain path, which `generation.engine: auto` gives to vLLM before the gate."""
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr("asyncrl.runtime.placement.SERVED", ("Lfm2ForCausalLM",))
    return f"model.path={VLLM_MODEL}:build_stateful", "model.dtype=bfloat16"


PLAIN = "generation.engine: embedded (auto: the model runs on the plain path, whose states and caches have not"


def test_a_dry_run_generates_with_the_embedded_engine_on_the_plain_path(
    tmp_path: Path, plain_for_vllm: tuple[str, ...]
) -> None:
    config = config_of(tmp_path, *plain_for_vllm)
    assert choose_engine(config, GPU)[0].generation.engine == "vllm"
    text = plan(config, AssumedGpus.parse("1xH100"))
    assert PLAIN in text and "\n  engine: embedded" in text and "generation: shared, on the trainer's cuda:0" in text
    assert "engine: vllm" not in text


async def test_a_run_generates_with_the_embedded_engine_on_the_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plain_for_vllm: tuple[str, ...]
) -> None:
    monkeypatch.setattr("asyncrl.runtime.placement._reason_for_embedded", lambda config, device: None)
    settings = (*plain_for_vllm, "model.dtype=float32", "train.max_steps=2", "telemetry.live=plain")
    async with Runtime(config_of(tmp_path, *settings, base=REAL)) as runtime:
        assert "generation: shared, on the trainer's cpu (auto: no second device)" in runtime.built.placement_line
        assert (await runtime.run()).version == 2
    assert PLAIN in "".join(capfd.readouterr())


EXPERT_MODULES = """
from torch import nn
from runtime_model import build_wide_experts

def build(seed):
    model, tokenizer = build_wide_experts(seed)
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList([nn.Linear(4, 4)])
    return model, tokenizer
"""


class SmallGpus(Gpus):
    """Two GPUs whose memory is smaller than any model."""

    count = 2

    def describe(self, device: torch.device) -> tuple[str, tuple[int, int]]:
        return "small card", (9, 0)

    def memory(self, device: torch.device) -> int:
        return 1 << 10


def test_fsdp_is_not_chosen_for_a_model_that_cannot_be_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(VLLM_MODEL.parent))
    file = tmp_path / "experts.py"
    file.write_text(EXPERT_MODULES)
    two = World(0, 2, 0, 2, "", 0, 0)
    for path, sharding, why in (
        (f"{VLLM_MODEL}:build_wide_experts", "fsdp", "left out; replicate takes"),
        (f"{file}:build", "replicate", "left out; replicate takes 0 GiB for the state on each small card, but"),
    ):
        config = config_of(tmp_path, f"model.path={path}", "model.dtype=bfloat16", base=REAL)
        chosen, lines = fit_gpu(config, GPU, two, partial(resolve, world_size=2), SmallGpus())
        assert chosen.distributed.sharding == sharding and f"distributed.sharding: {sharding} ({why}" in lines[0]
    assert "Qwen3MoeForCausalLM has a module for each expert (model.layers.0.mlp.experts)" in lines[0]
