"""Whole runs that generate with vLLM in workers: what they train is what a run on one device trains, and nothing outlives them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from runtime_helpers import (
    FAST,
    RANK,
    REAL,
    TORCHRUN,
    Process,
    equal_weights,
    metrics_of,
    rollouts_of,
    run_ranks,
    write_yaml,
)
from test_runtime_roles import with_roles
from test_runtime_sharded import SHARDED
from test_runtime_workers import gone, left, run, workers_of

from asyncrl.errors import ConfigError
from asyncrl.generation.vllm.versions import installed_version
from asyncrl.runtime.placement import Placement
from asyncrl.runtime.runtime import Runtime

pytestmark = pytest.mark.skipif(
    installed_version() is None, reason="vLLM is not installed: tools/vllm_check runs these"
)
MODEL = Path(__file__).with_name("runtime_model.py")
WIDE: dict[str, Any] = REAL | {
    "model": {"path": f"{MODEL}:build_wide", "dtype": "float32"},
    "train": REAL["train"] | {"max_steps": 4},
    "telemetry": {"live": "off", "report": False},
}
EXPERTS = f"model.path={MODEL}:build_wide_experts"
VLLM = ("generation.engine=vllm", "generation.threads=1")
PARTNER = "asyncrl.generation.vllm.v0_32_partner"
SPLIT = (*VLLM, "generation.tensor_parallel=2")


@pytest.mark.parametrize(
    ("more", "apart"),
    [
        ((), VLLM),
        (("model.lora.rank=4",), VLLM),
        ((EXPERTS,), VLLM),
        (("generation.workers=2",), VLLM),
        ((), SPLIT),
        ((EXPERTS,), SPLIT),
    ],
)
async def test_a_sync_run_samples_token_for_token_what_a_shared_run_samples(
    tmp_path: Path, more: tuple[str, ...], apart: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers fetch each version, as workers on two other GPUs do."""
    if "generation.workers=2" in more:
        monkeypatch.setattr(Placement, "on_other_device", lambda self, number: True)
    sync = ("preset=sync", "telemetry.rollouts_per_step=64", *more)
    shared = await run(tmp_path / "shared", *sync, base=WIDE)
    children: list[int] = []

    def look(runtime: Runtime) -> None:
        worker = psutil.Process(workers_of(runtime)[0])
        started = worker.children(recursive=True)
        children.extend(each.pid for each in started if apart is VLLM or PARTNER in each.cmdline())

    summary = await run(tmp_path / "apart", *sync, *apart, base=WIDE, at={2: look})
    assert summary.version == shared.version == 4 and len(children) == (apart is SPLIT)
    ours, theirs = (rollouts_of(tmp_path / name / "runs/run") for name in ("apart", "shared"))
    tokens = [[(row["group_id"], row["member"], row["completion"]) for row in rows] for rows in (ours, theirs)]
    assert len(tokens[0]) == 4 * 16 and tokens[0] == tokens[1]
    lines = metrics_of(tmp_path / "apart/runs/run")
    for mine, other in zip(lines, metrics_of(tmp_path / "shared/runs/run"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert mine["mismatch/current_mean"] < 5e-5
    compared = [line["weights/outputs_nats"] for line in lines if "weights/outputs_nats" in line]
    assert compared and max(compared) < 5e-5
    assert "vLLM" in (tmp_path / "apart/runs/run/workers/worker-0.log").read_text()
    assert not left()


@pytest.mark.parametrize("more", [(), (EXPERTS,)])
def test_two_ranks_with_cut_masters_sample_from_the_weights_that_all_train(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Each rank gathers the weights of all into a board of its own, which its worker reads. (Which rank plays which group is a
    matter of time, so two runs are not compared: each token is, with the trainer that has the very weights.)"""
    tree = SHARDED | FAST | {"model": WIDE["model"], "preset": "sync", "checkpoint": {"save_final": False}}
    path = str(write_yaml(tmp_path, tree))
    ranks = Process(tmp_path, path, *VLLM, *more, RANK_WEIGHTS=str(tmp_path), program=(*TORCHRUN, *RANK))
    try:
        assert ranks.wait(300) == 0, ranks.output
    finally:
        ranks.kill()
    one, other = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one["version"] == other["version"] == 4 and equal_weights(one["weights"], other["weights"])
    lines = metrics_of(tmp_path / "runs/run")
    assert len(lines) == 4 and max(line["mismatch/current_mean"] for line in lines) < 5e-5
    compared = [line["weights/outputs_nats"] for line in lines if "weights/outputs_nats" in line]
    assert compared and max(compared) < 5e-5
    for rank in (0, 1):
        assert "vLLM" in (tmp_path / f"runs/run/workers/rank_{rank}/worker-0.log").read_text()


async def test_experts_in_bfloat16_are_trained_with_vllm(tmp_path: Path) -> None:
    """Both round, each in its way, and tokens are tipped over to other experts."""
    summary = await run(tmp_path / "apart", *VLLM, "preset=sync", "model.dtype=bfloat16", EXPERTS, base=WIDE)
    assert summary.version == 4 and not left()
    lines = metrics_of(tmp_path / "apart/runs/run")
    assert all(line["mismatch/current_mean"] < 0.05 for line in lines)
    compared = [line["weights/outputs_nats"] for line in lines if "weights/outputs_nats" in line]
    assert compared and 0 < max(compared) < 0.3


def partner_of(worker: int) -> int:
    """The other process of a split worker."""
    children = psutil.Process(worker).children()
    return next(int(child.pid) for child in children if PARTNER in child.cmdline())


@pytest.mark.parametrize("what", ["worker", "split worker", "partner"])
async def test_a_worker_that_is_killed_costs_no_group(tmp_path: Path, what: str) -> None:
    killed: list[int] = []

    def kill(runtime: Runtime) -> None:
        worker = workers_of(runtime)[0]
        if what != "worker":
            killed.append(partner_of(worker))
        killed.append(worker)
        os.kill(killed[0 if what == "partner" else -1], signal.SIGKILL)

    memory = set(os.listdir("/dev/shm"))
    settings = VLLM if what == "worker" else SPLIT
    summary = await run(tmp_path / "killed", *settings, "train.max_steps=8", base=WIDE, at={2: kill})
    assert all(map(gone, killed))
    assert not [name for name in set(os.listdir("/dev/shm")) - memory if "vllm" in name]
    text = f"partner 1 of this worker (process {killed[0]}) was killed by signal 9"
    log = (tmp_path / "killed/runs/run/workers/worker-0.log").read_text()
    assert (text in log) == (what == "partner")
    assert killed and summary.version == 8
    assert summary.books.trained == 32 and summary.books.failed == 0
    assert all(line["staleness/max"] <= 2 for line in metrics_of(tmp_path / "killed/runs/run"))
    assert not left()


@pytest.mark.parametrize("settings", [VLLM, SPLIT])
def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """The node alone is killed: its workers, which have process groups of their own, end with it."""
    tree = WIDE | {"train": WIDE["train"] | {"max_steps": 100_000}}
    run = tmp_path / "runs/run"
    node = Process(tmp_path, str(write_yaml(tmp_path, tree)), f"run.dir={tmp_path}/runs", *settings)
    try:
        node.wait_until((run / "metrics.jsonl").exists, "a step")
        log = (run / "workers/worker-0.log").read_text()
        worker = psutil.Process(int(log.split("process ")[1].split(",")[0]))
        started = [worker, *worker.children(recursive=True)]
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
        assert not psutil.wait_procs(started, timeout=30)[1]
    finally:
        node.kill()


async def test_a_model_that_is_run_on_the_plain_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM runs on the plain path"):
        await run(tmp_path / "plain", *VLLM, f"model.path={MODEL}:build_stateful", base=WIDE)
    assert not left()


async def test_rows_beyond_the_positions_of_the_model_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    text = r"rows may have 72 tokens \(rollout.max_context, or .*\), but the model has positions for 64"
    with pytest.raises(ConfigError, match=text):
        await run(tmp_path / "long", *VLLM, "rollout.max_tokens=60", base=WIDE)
    assert not (tmp_path / "long/runs/run/workers").exists() and not left()


def test_what_a_worker_refuses_is_told_in_its_sentence(tmp_path: Path) -> None:
    """Its heads are too small for vLLM, which only the worker can know."""
    settings = str(write_yaml(tmp_path, WIDE)), f"run.dir={tmp_path}/runs", *VLLM, f"model.path={MODEL}:build"
    node = Process(tmp_path, *settings)
    try:
        assert node.wait() == 2
    finally:
        node.kill()
    assert "asyncrl: ConfigError: generation.engine is vllm, and the model's heads have size 16;" in node.output
    assert "Traceback" not in node.output and "WorkerDied" not in node.output
    assert "Traceback" in (tmp_path / "runs/run/workers/worker-0.log").read_text()


@pytest.mark.parametrize(
    ("training", "more"), [(2, {}), (1, {"lora": {"rank": 4}})], ids=["two training ranks", "adapters"]
)
def test_a_rank_that_only_generates_with_vllm_gets_its_weights_by_broadcast(
    training: int, more: dict[str, Any], tmp_path: Path
) -> None:
    tree = with_roles(WIDE | {"model": WIDE["model"] | more}, training, 1)
    tree["generation"] = {"engine": "vllm", "threads": 1}
    run_ranks(tmp_path, tree, training + 1)
    lines = metrics_of(tmp_path / "runs/run")
    compared = [line["weights/outputs_nats"] for line in lines if "weights/outputs_nats" in line]
    assert len(lines) == 4 and compared and max(compared) < 5e-5
    assert "vLLM" in (tmp_path / f"runs/run/workers/rank_{training}/worker-0.log").read_text()
