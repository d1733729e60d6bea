"""The weight board on a card, and workers that read it: on the trainer's GPU, and on another where there is one. What is not the
device's is shown on a CPU, by tests/transport/test_transport_board.py and its neighbours. Skipped without CUDA; `pytest -m gpu`."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import torch
from transport_helpers import line, living, own_name, say

from asyncrl import Runtime, load_config
from asyncrl.config.schema import ModelConfig
from asyncrl.distributed.world import World
from asyncrl.models.loading import load_policy
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.reading import ModelSkeleton, describe_extras, open_reader
from asyncrl.runtime.placement import place
from asyncrl.transport.memory.board import Board, weight_slab

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
OTHERS = [0, pytest.param(1, marks=TWO)]  # where a worker is, whose trainer is on the first
ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples/quickstart.yaml"
LATE = 400_000_000  # cycles: some 0.2 s on the device, in which nobody who waits rightly may have gone on
ELEMENTS = 4_587_584
CARD = torch.device("cuda", 0)

READER = """
import json, os, sys
import torch
from asyncrl.transport.memory.board import Board

description, copy_to = json.loads(sys.argv[1]), torch.device(sys.argv[3]) if sys.argv[3] else None
fd = os.open(f"/proc/{sys.argv[4]}/fd/{sys.argv[2]}", os.O_RDONLY)
board = Board.attach(description, fd, "layout", copy_to)
print(board.half(0).device, flush=True)
for command in map(str.strip, sys.stdin):
    index = int(command)
    passing = board.fetch(index)
    if passing is not None:
        passing()
    print(board.version(index), float(board.half(index).min()), float(board.half(index).max()), flush=True)
"""

name = pytest.fixture(own_name, name="name")


@pytest.fixture
def board(name: str) -> Iterator[Board]:
    slab = weight_slab(name, ELEMENTS, torch.float32, CARD)
    with Board.create(ELEMENTS, torch.float32, "layout", slab) as made:
        yield made


def filled(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value, dtype=torch.float32, device=CARD)


@pytest.mark.parametrize("other", ["", "cuda:0", pytest.param("cuda:1", marks=TWO)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_version_is_named_only_once_it_is_there(board: Board, in_place: bool, other: str) -> None:
    """Another process, which waits for nothing but the name, finds all of it."""
    with living(READER, json.dumps(board.description), str(board.fd), other, str(os.getpid())) as process:
        assert line(process) == (other or "cuda:0")
        for version in range(4):
            half = version % 2
            source = filled(version)
            torch.cuda.synchronize()
            board.clear(half)
            torch.cuda._sleep(LATE)
            source.add_(0.5)
            if in_place:
                board.half(half).copy_(source.double())
                board.write(half, version)
            else:
                board.write(half, version, source)
            say(process, str(half))
            assert line(process) == f"{version} {version + 0.5} {version + 0.5}"


def test_a_reader_has_left_a_half_when_its_device_has_and_waits_on_no_other_thread(board: Board) -> None:
    board.write(0, 0, filled(1.0))
    # The driver loads a kernel at its first use, and waits for the device there.
    board.half(0).sum()
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(LATE)
    total = board.half(0).sum()
    passing = board.reads_ended()
    told = time.perf_counter() - began
    assert passing is not None and not torch.cuda.current_stream().query(), f"it waited: {told:.3f} s"
    passing()
    assert torch.cuda.current_stream().query() and total.item() == ELEMENTS


@pytest.mark.parametrize("other", OTHERS)
def test_a_copy_is_fetched_beside_what_the_device_computes(name: str, other: int) -> None:
    device = torch.device("cuda", other)
    slab = weight_slab(name, ELEMENTS, torch.float32, CARD)
    with Board.create(ELEMENTS, torch.float32, "layout", slab) as board:
        board.write(0, 0, filled(3.0))
        with Board.attach(board.description, os.dup(board.fd), "layout", device) as reader:
            passing = reader.fetch(0)
            with torch.cuda.device(device):
                torch.cuda._sleep(LATE)  # decoding, which the fetch does not wait for: it was asked for before
                assert passing is not None
                passing()
                assert not torch.cuda.current_stream().query()
                torch.cuda.synchronize()
            assert reader.half(0).device == device and reader.half(0).eq(3).all()
            assert reader.half(0).data_ptr() != board.half(0).data_ptr()


def test_the_memory_goes_with_the_board(name: str) -> None:
    torch.zeros(1, device=CARD)
    # The collector would otherwise free the boards of earlier tests between the two measurements.
    gc.collect()
    torch.cuda.synchronize()
    before, elements = torch.cuda.mem_get_info()[0], 1 << 26
    slab = weight_slab(name, elements, torch.float32, CARD)
    with Board.create(elements, torch.float32, "layout", slab):
        # The driver returns some of its own memory meanwhile, in blocks of 2 MiB.
        assert torch.cuda.mem_get_info()[0] <= before - 8 * elements + (32 << 20)
    del slab
    gc.collect()
    assert torch.cuda.mem_get_info()[0] > before - elements


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_built_from_the_board_and_computes_what_the_trainer_does(dtype: str, other: int, name: str) -> None:
    config = ModelConfig(path=f"{ROOT / 'examples/quickstart_model.py'}:build", dtype=dtype)
    trainer, _ = load_policy(config, CARD, seed=0)
    weights, device = trainer.weights, torch.device("cuda", other)
    slab = weight_slab(name, weights.size, trainer.dtype, CARD)
    with Board.create(weights.size, trainer.dtype, weights.layout_digest(), slab) as board:
        board.write(0, 0, weights.working)
        copy_to = device if other else None
        with Board.attach(board.description, os.dup(board.fd), board.layout, copy_to) as reader:
            wait(reader.fetch(0))
            policy = open_reader(
                ModelSkeleton(config), reader.half(0), describe_extras(trainer), trainer.path, 64, seed=0
            )
            for version in (1, 2):
                trainer.flat.master.mul_(1.1).add_(0.01)
                trainer.advance()
                board.write(version % 2, version, trainer.weights.working)
                wait(reader.fetch(version % 2))
                policy.flat.move_to(reader.half(version % 2))
                assert fixed_logprobs(policy) == pytest.approx(fixed_logprobs(trainer), abs=1e-6)
            tensors = [*policy.module.parameters(), *policy.module.buffers()]
            assert {tensor.device for tensor in tensors} == {device} and policy.weights.misplaced_parameters() == []


def wait(passing: Any) -> None:
    if passing is not None:
        passing()


def configured(*overrides: str) -> Any:
    return load_config([QUICKSTART], ["model.device=cuda:0", "telemetry.live=off", *overrides])


@pytest.mark.parametrize("more", [(), ("model.lora.rank=4",), ("distributed.sharding=fsdp",)], ids=["", "lora", "fsdp"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_run_generates_in_a_worker_on_a_gpu(dtype: str, other: int, more: tuple[str, ...]) -> None:
    placed = ("generation.placement=worker", f"generation.devices=cuda:{other}")
    config = configured(f"model.dtype={dtype}", "train.max_steps=8", *placed, *more)
    async with Runtime(config, write=False) as runtime:
        engine: Any = runtime.built.ports.engine
        pids = [peer.process.pid for peer in engine._peers.values()]
        summary = await runtime.run()
    assert len(pids) == 1 and not psutil.pid_exists(pids[0])
    steps = [metrics for _, metrics in summary.history if "reward/mean" in metrics]
    assert summary.version == 8 and all(math.isfinite(metrics["loss"]) for metrics in steps)
    gaps = [metrics["mismatch/current_mean"] for metrics in steps if metrics.get("mismatch/current_tokens", 0)]
    assert gaps and np.mean(gaps) < (1e-3 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("other", OTHERS)
async def test_a_worker_on_a_gpu_that_is_killed_costs_no_group(other: int) -> None:
    config = configured("train.max_steps=12", "generation.placement=worker", f"generation.devices=cuda:{other}")
    free: list[int] = []
    async with Runtime(config, write=False) as runtime, anyio.create_task_group() as tasks:
        engine: Any = runtime.built.ports.engine

        async def kill() -> None:
            async for report in runtime.steps():
                if report.version in (3, 6):
                    free.append(torch.cuda.mem_get_info(other)[0])
                    os.kill(next(iter(engine._peers.values())).process.pid, signal.SIGKILL)

        tasks.start_soon(kill)
        await runtime.run()
        tasks.cancel_scope.cancel()
    summary = runtime.summary()
    assert summary.version == 12 and summary.books.failed == 0
    assert abs(free[1] - free[0]) < 200 << 20, "the memory of the killed worker is free again"
    assert torch.ones(4, device=CARD).sum().item() == 4  # the device is well


@TWO
def test_a_second_gpu_generates_by_itself() -> None:
    placement = place(configured(), CARD, World())
    assert placement.devices == (torch.device("cuda", 1),) and "cuda:1 trains nothing" in placement.line
