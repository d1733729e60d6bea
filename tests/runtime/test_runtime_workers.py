"""Whole runs whose generation has processes of its own: what they train is what a shared run trains, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from runtime_helpers import REAL, config_of, metrics_of, rollouts_of

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import DivergenceError
from asyncrl.generation.worker.names import segment_name
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.runtime import workers
from asyncrl.runtime.placement import Placement
from asyncrl.runtime.runtime import RunSummary, Runtime
from asyncrl.transport.memory.board import Board, weight_slab

pytestmark = pytest.mark.usefixtures("warm_workers")
TWO: dict[str, Any] = REAL | {
    "generation": {"placement": "worker", "workers": 2, "threads": 1},
    "train": REAL["train"] | {"max_steps": 6},
    "telemetry": {"live": "off", "report": False},
}


async def run(
    folder: Path, *overrides: str, base: dict[str, Any] = TWO, at: dict[int, Callable[[Runtime], None]] | None = None
) -> RunSummary:
    """`at`: what is done once a version is reached."""
    async with Runtime(config_of(folder, *overrides, base=base)) as runtime, anyio.create_task_group() as tasks:

        async def watch() -> None:
            async for report in runtime.steps():
                if at is not None and report.version in at:
                    at[report.version](runtime)

        tasks.start_soon(watch)
        await runtime.run()
        tasks.cancel_scope.cancel()
    return runtime.summary()


def workers_of(runtime: Runtime) -> list[int]:
    """Process numbers."""
    engine: Any = runtime.built.ports.engine
    return [peer.process.pid for peer in engine._peers.values()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def left() -> set[str]:
    own = f".{os.getpid()}."
    return {name for name in os.listdir("/dev/shm") if name.startswith("asyncrl.worker-") and own in name}


DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]  # which the run on a slab has with each push


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_sync_run_samples_token_for_token_what_a_shared_run_samples(tmp_path: Path, dtype: str) -> None:
    """And one that goes on samples from the restored weights, from the first token on."""
    sync = ("preset=sync", f"model.dtype={dtype}", "telemetry.rollouts_per_step=64", "checkpoint.every=1")
    shared = await run(tmp_path / "shared", *sync, "train.max_steps=4", base=REAL)
    apart = await run(tmp_path / "apart", *sync, "train.max_steps=4", "generation.workers=1")
    assert apart.version == shared.version == 4
    ours, theirs = (rollouts_of(tmp_path / name / "runs/run") for name in ("apart", "shared"))
    tokens = [[(row["group_id"], row["member"], row["completion"]) for row in rows] for rows in (ours, theirs)]
    assert len(tokens[0]) == 4 * 16 and tokens[0] == tokens[1]
    lines = (metrics_of(tmp_path / name / "runs/run") for name in ("apart", "shared"))
    for mine, other in zip(*lines, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-4)
    await run(tmp_path / "parts", *sync, "train.max_steps=2", "generation.workers=1")
    summary = await run(tmp_path / "parts", *sync, "train.max_steps=4", "generation.workers=1", "resume=true")
    assert summary.version == 4 and rollouts_of(tmp_path / "parts/runs/run") == ours
    assert not left()


async def test_a_board_that_lies_as_on_a_gpu_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a slab, of which the worker reads copies. In bfloat16: the halves are the trainer's working copy."""
    sync = ("preset=sync", "model.dtype=bfloat16", "telemetry.rollouts_per_step=64", "generation.workers=1")
    await run(tmp_path / "file", *sync, "train.max_steps=3")

    def create(elements: int, dtype: torch.dtype, layout: str, device: torch.device) -> Board:
        return Board.create(elements, dtype, layout, weight_slab(segment_name(), elements, dtype, device))

    monkeypatch.setattr(workers, "create_board", create)
    monkeypatch.setattr(Placement, "on_other_device", lambda self, number: True)
    summary = await run(tmp_path / "slab", *sync, "train.max_steps=3")
    assert summary.version == 3 and not left()
    file, slab = (rollouts_of(tmp_path / name / "runs/run") for name in ("file", "slab"))
    assert len(file) == 3 * 16 and slab == file


async def test_workers_turn_rows_past_the_original_context_as_the_trainer_does(tmp_path: Path) -> None:
    model = ("model.path=" + REAL["model"]["path"].replace(":build", ":build_stretched"), "rollout.ignore_eos=true")
    await run(tmp_path, *model, "preset=sync", "train.max_steps=2", "generation.workers=1")
    lines = metrics_of(tmp_path / "runs/run")
    assert len(lines) == 2 and max(line["mismatch/current_max"] for line in lines) < 1e-4


@pytest.mark.slow
async def test_two_workers_train_every_group_once_with_versions_that_the_books_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start from nothing, as a user's do."""
    monkeypatch.setattr("asyncrl.concurrency.child.subprocess", subprocess)
    pids: list[int] = []
    summary = await run(tmp_path / "two", at={3: lambda runtime: pids.extend(workers_of(runtime))})
    assert summary.version == 6 and summary.books.trained == 24
    assert len(set(pids)) == 2 and all(gone(pid) for pid in pids) and not left()
    lines = metrics_of(tmp_path / "two/runs/run")
    assert all(line["staleness/max"] <= 2 for line in lines)
    logs = sorted(path.name for path in (tmp_path / "two/runs/run/workers").iterdir())
    assert logs == ["worker-0.log", "worker-1.log"]


async def test_a_worker_that_is_killed_costs_no_group(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(runtime: Runtime) -> None:
        killed.append(workers_of(runtime)[0])
        os.kill(killed[0], signal.SIGKILL)

    summary = await run(tmp_path / "killed", "train.max_steps=12", at={2: kill})
    assert killed and summary.version == 12
    assert summary.books.trained == 48 and summary.books.failed == 0
    assert sum(line.get("engine/worker_deaths", 0) for line in metrics_of(tmp_path / "killed/runs/run")) == 1
    assert not left()


async def test_a_worker_that_is_started_again_is_no_stage_of_the_run(tmp_path: Path) -> None:
    """Nobody would end it: the watchdog would look at it alone, and end the run after `watchdog.stage_timeout_s`."""
    with anyio.CancelScope() as scope:
        async with Runtime(config_of(tmp_path, "train.max_steps=100000", base=TWO)) as runtime:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runtime.run)
                lost = workers_of(runtime)[0]
                os.kill(lost, signal.SIGKILL)
                async for _ in runtime.steps():
                    pids = workers_of(runtime)
                    if lost not in pids and len(pids) == 2:
                        break
                engine: Any = runtime.built.ports.engine
                await engine.wait_until_serving()
                assert runtime._stages.progress_limit(1.0) is None
                scope.cancel()


async def test_a_worker_that_is_stopped_is_killed_and_replaced(tmp_path: Path) -> None:
    def stop(runtime: Runtime) -> None:
        os.kill(workers_of(runtime)[0], signal.SIGSTOP)

    summary = await run(tmp_path / "stopped", "train.max_steps=12", "watchdog.loop_timeout_s=3", at={2: stop})
    assert summary.version == 12 and summary.books.trained == 48
    assert sum(line.get("engine/worker_deaths", 0) for line in metrics_of(tmp_path / "stopped/runs/run")) == 1


async def test_groups_that_were_under_way_when_the_engine_failed_come_again(tmp_path: Path) -> None:
    """It is no fault of theirs: they have not failed, and the next life of the run plays them."""

    def break_it(runtime: Runtime) -> None:
        engine: Any = runtime.built.ports.engine

        def decode() -> None:
            raise DivergenceError("the logits are NaN")

        engine.core.decode = decode

    with pytest.raises(DivergenceError, match="the logits are NaN"):
        await run(tmp_path / "broken", "train.max_steps=200", base=REAL, at={2: break_it})
    store = CheckpointStore(tmp_path / "broken/runs/run/checkpoints")
    found = await asyncio.to_thread(store.load_latest)
    assert found is not None and found.version >= 2
    cursor = found.run["prompts"]["0"]
    lost = set(range(cursor["position"])) - set(cursor["again"]) - set(found.run["untrained"]["0"])
    assert len(lost) == 4 * found.version


Tell = Callable[..., Awaitable[None]]


def changed(sink: Any, tell: Tell) -> Tell:
    """A tensor of the half, the last norm, is another one since the trainer used it."""

    async def update_weights(version: int, half: int, outputs: Any) -> None:
        sink._board.half(half)[-64:] += 1.0
        await tell(version, half, outputs)

    return update_weights


def lying(sink: Any, tell: Tell) -> Tell:
    """Another version is announced than the one that was written."""

    async def update_weights(version: int, half: int, outputs: Any) -> None:
        await tell(version + 1, half, outputs)

    return update_weights


def misread(sink: Any, tell: Tell) -> Tell:
    """The bytes are right, and the trainer computes something else with them."""

    async def update_weights(version: int, half: int, outputs: Any) -> None:
        right = await sink._lane.run(lambda: fixed_logprobs(sink._policy), name="outputs")
        await tell(version, half, [each - 0.01 for each in right])

    return update_weights


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        # A step may come before the comparison: then the gate ends it.
        (changed, r"worker \d: with the weights of version \d+ the worker computes log|trainer and sampler .* differ"),
        (lying, r"worker \d: the board holds version \d+ where version \d+ was announced"),
        (misread, r"worker \d: with the weights of version \d+ the worker computes log-probs .* 0\.01 nats off"),
    ],
)
async def test_a_worker_that_reads_other_weights_than_the_trainer_wrote_ends_the_run(
    tmp_path: Path, wrong: Callable[[Any, Tell], Tell], text: str
) -> None:
    def plant(runtime: Runtime) -> None:
        sink: Any = runtime.built.ports.sinks[0]
        sink._workers.update_weights = wrong(sink, sink._workers.update_weights)

    with pytest.raises(DivergenceError, match=text):
        await run(tmp_path / "wrong", "train.max_steps=200", "generation.workers=1", at={2: plant})
    assert not left()
