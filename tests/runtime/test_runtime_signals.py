"""SIGINT and SIGTERM: the open step is aborted, the last committed version is on disk, the exit code says which signal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from runtime_helpers import (
    ENDLESS,
    MODEL,
    PROGRAM,
    REAL,
    TORCHRUN,
    Process,
    lines_at_least,
    metrics_of,
    rollouts_of,
    start,
    start_two,
)

from asyncrl.checkpoint.store import CheckpointStore

SECONDS = 20.0  # generous on a busy machine; torchrun's patience is 30


def last_checkpoint(run: Path, process: Process) -> int:
    """The version of the latest checkpoint; it loads with `from_pretrained`, and its state is of the same version."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = run / "checkpoints" / "latest"
    assert place.exists(), f"no checkpoint of the run:\n{process.output}"
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    AutoTokenizer.from_pretrained(place)
    version = int(place.resolve().name.removeprefix("step_"))
    state = CheckpointStore(place.parent).load(version).trainer()
    assert state["version"] == version
    masters = state["masters"]
    loaded = dict(model.named_parameters())
    assert masters and all(torch.equal(loaded[name], masters[name]) for name in masters if name in loaded)
    return version


def stop(process: Process, number: signal.Signals) -> int:
    started = time.monotonic()
    process.send(number)
    code = process.wait(SECONDS + 30)
    assert time.monotonic() - started < SECONDS, process.output
    return code


def endless(**more: Any) -> dict[str, Any]:
    return ENDLESS | more


@pytest.mark.parametrize(
    ("number", "code", "tree"),
    [
        # Long completions: hardly anything but decoding happens.
        (signal.SIGTERM, 143, endless(preset="sync", rollout=REAL["rollout"] | {"max_tokens": 48, "ignore_eos": True})),
        # Eight updates of every batch: hardly anything but training.
        (signal.SIGINT, 130, endless(algorithm={"updates_per_batch": 8})),
    ],
    ids=["decode", "training"],
)
def test_a_signal_leaves_the_last_committed_version(
    tmp_path: Path, number: signal.Signals, code: int, tree: dict[str, Any]
) -> None:
    tree = tree | {"train": tree["train"] | {"tokens_per_microbatch": 256}}
    process = start(tmp_path, tree)
    run = tmp_path / "runs/run"
    process.wait_until(lines_at_least(run, 3), "third step")
    assert stop(process, number) == code, process.output
    assert f"{number.name}: aborting the open step" in process.output
    version = last_checkpoint(run, process)
    assert version >= metrics_of(run)[-1]["step"] >= 3
    assert (run / "report.html").exists() and (run / "trace.json").exists()


def test_a_signal_during_evaluation_keeps_the_version_that_is_evaluated(tmp_path: Path) -> None:
    tree = endless(preset="sync", evaluate={"every": 2}, checkpoint={"every": 1, "keep": 0})
    tree["data"] = tree["data"] | {"eval": f"{MODEL}:held_out"}
    tree["rollout"] = tree["rollout"] | {"environment": f"{MODEL}:Thinking"}
    process = start(tmp_path, tree, "evaluate.every=2", "resume=false")
    process.wait_until(lambda: "evaluating" in process.output, "evaluation before the first step")
    assert stop(process, signal.SIGTERM) == 143, process.output
    assert not (tmp_path / "runs/run/checkpoints/latest").exists()  # version 0 is the model as it was given
    assert "latest" not in process.output

    again = Process(tmp_path, str(tmp_path / "run.yaml"), "run.overwrite=true", "evaluate.every=2", THINKING_S="0.2")
    run = tmp_path / "runs/run"
    again.wait_until(
        lambda: (run / "checkpoints/step_2").exists() or again.output.count("evaluating") > 6, "second one"
    )
    assert stop(again, signal.SIGINT) == 130, again.output
    assert last_checkpoint(run, again) >= 2


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """The shutdown is made to hang: a reward that never answers cannot be it (its worker is killed), user code can."""
    tree = endless(watchdog={"abort_grace_s": 60.0}, checkpoint={"save_final": False})
    tree["rollout"] = tree["rollout"] | {"environment": f"{MODEL}:Stubborn"}
    process = start(tmp_path, tree)
    process.wait_until(lambda: "stubborn" in process.output, "episode that will not end")
    first = time.monotonic()
    process.send(signal.SIGTERM)
    announced = "aborting the open step; SIGINT or SIGTERM after 5 s ends the process"
    process.wait_until(lambda: announced in process.output, "announcement")
    process.send(signal.SIGTERM)  # too soon: it is the same stop, which a launcher sent on
    while process.ended is None and time.monotonic() - first < 30:  # half of the time that the shutdown would have
        # The pace of somebody who asks again and again; nothing is waited for.
        time.sleep(0.2)
        process.send(signal.SIGTERM)
    assert process.wait(1) == -signal.SIGTERM
    assert time.monotonic() - first > 4


def test_who_stops_a_whole_job_signals_everybody_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    """torchrun hears it and sends each rank a second SIGTERM. A slow checkpoint, of the parts of both, is cut short by none."""
    process = start(tmp_path, endless(distributed={"sharding": "fsdp"}), program=(*TORCHRUN, *PROGRAM))
    run = tmp_path / "runs/run"
    process.wait_until(lines_at_least(run, 3), "third step")
    family = psutil.Process(process.pid).children(recursive=True)
    for each in [each.pid for each in family if each.name() == "asyncrl.main"] * 2 + [process.pid]:
        os.kill(each, signal.SIGTERM)
    process.wait()
    assert "SIGTERM: aborting the open step" in process.output
    assert last_checkpoint(run, process) >= 3
    assert (run / "checkpoints/latest/state/shard_1.pt").exists()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_whose_others_never_come_ends_at_a_signal(tmp_path: Path, rank: int) -> None:
    """Nothing is held yet that it would have to save. The other one may have died while it started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank else None
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    process = start(tmp_path, ENDLESS, **variables)

    def waits() -> bool:
        found = psutil.Process(process.pid).net_connections("tcp")
        return any(each.status == "ESTABLISHED" and port in (each.laddr.port, each.raddr.port) for each in found)

    process.wait_until(waits, "connection to torchrun's store")
    assert stop(process, signal.SIGTERM) == 143, process.output
    assert "watchdog" not in process.output
    del launchers


def test_a_shutdown_that_hangs_is_ended_by_the_watchdog(tmp_path: Path) -> None:
    tree = endless(watchdog={"abort_grace_s": 1.0, "interval_s": 0.2})
    tree["rollout"] = tree["rollout"] | {"environment": f"{MODEL}:Stubborn"}
    process = start(tmp_path, tree)
    process.wait_until(lambda: "stubborn" in process.output, "episode that will not end")
    assert stop(process, signal.SIGTERM) == 4
    assert "shutdown (SIGTERM) did not end within 1 s" in process.output


@pytest.mark.slow
def test_torchrun_that_is_stopped_leaves_a_checkpoint(tmp_path: Path) -> None:
    """As its user starts it, every process from nothing."""
    process = start(tmp_path, ENDLESS, program=(*TORCHRUN, *PROGRAM), start=subprocess.Popen)
    run = tmp_path / "runs/run"
    process.wait_until(lines_at_least(run, 3), "third step")
    assert stop(process, signal.SIGTERM) != 0
    assert "SIGTERM: aborting the open step" in process.output
    assert last_checkpoint(run, process) >= 3


def test_ranks_whose_launcher_is_killed_end_in_good_order(tmp_path: Path) -> None:
    """Nobody is there any more who would stop them."""
    process = start(tmp_path, ENDLESS, program=(*TORCHRUN, *PROGRAM))
    run = tmp_path / "runs/run"
    process.wait_until(lines_at_least(run, 3), "third step")
    family = psutil.Process(process.pid).children(recursive=True)
    assert [each.name() for each in family].count("asyncrl.main") == 2
    process.send(signal.SIGKILL)
    process.wait()
    left = psutil.wait_procs(family, timeout=SECONDS)[1]
    for each in left:
        each.kill()
    assert not left, process.output
    assert "has ended: aborting the open step" in process.output
    assert last_checkpoint(run, process) >= metrics_of(run)[-1]["step"] >= 3


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_stands_still_is_named_by_the_other(tmp_path: Path, stopped: int) -> None:
    """Its connections stay open, so no collective fails. If the first rank stands still, the other rank cannot say goodbye.
    If the other rank stands still, the first one saves the last version."""
    limits = {
        "interval_s": 0.2,
        "loop_timeout_s": 5.0,
        "stall_timeout_s": 60.0,
        "abort_grace_s": 20.0 if stopped else 2.0,
    }
    reward = {"functions": [REAL["reward"]], "timeout_s": 12.0}  # has to be less than the limit of a standstill
    with start_two(tmp_path, endless(watchdog=limits, reward=reward)) as ranks:
        ranks[0].wait_until(lines_at_least(tmp_path / "runs/run", 3), "third step")
        ranks[stopped].send(signal.SIGSTOP)
        assert ranks[1 - stopped].wait(60) == 12, ranks[1 - stopped].output
    output = ranks[1 - stopped].output
    silent = ("which has given no sign of life for", "rank 1 has given no sign of life for")
    assert re.search(silent[stopped], output), output
    run = tmp_path / "runs/run"
    if stopped:
        assert re.search(f"RankLost: (rank 0: )?{silent[1]}", output), output
        assert last_checkpoint(run, ranks[0]) >= metrics_of(run)[-1]["step"] >= 3


@pytest.mark.parametrize("looks", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_episode_of_one_rank_that_stands_still_is_named_by_both(tmp_path: Path, looks: int) -> None:
    """Each in its own words, whoever notices first: the other one here never does."""
    limits = {"interval_s": 0.2, "abort_grace_s": 2.0}
    tree = endless(watchdog=limits, rollout=REAL["rollout"] | {"environment": f"{MODEL}:Pondering"})
    tree["reward"] = {"functions": [REAL["reward"]], "timeout_s": 5.0}  # a standstill takes longer than a reward may
    own = [f"watchdog.stall_timeout_s={6 if rank == looks else 600}" for rank in (0, 1)]
    with start_two(tmp_path, tree, own=own) as ranks:
        ranks[looks].wait_until(lambda: "=== asyncrl watchdog: " in ranks[looks].output, "standstill")
    [headline] = [line for line in ranks[looks].output.splitlines() if line.startswith("=== asyncrl watchdog: ")][:1]
    assert f"watchdog: rank {looks}: nothing was generated" in headline
    if looks == 0:
        assert "the open step waits for group " in headline and " of rank 1; see the output of that rank" in headline
    else:
        assert " waits for its episode from the environment for" in headline and "a_tool" in headline


def test_a_rank_that_is_stopped_first_takes_no_checkpoint_with_it(tmp_path: Path) -> None:
    """Rank 0 writes what every rank trained and did not train until then. The rank gives its groups back, so that rank 0 goes on to
    the next collective and hears of it there."""
    run = tmp_path / "runs/run"
    with start_two(tmp_path, endless(telemetry={"live": "plain"})) as (first, other):
        first.wait_until(lines_at_least(run, 3), "third step")
        assert stop(other, signal.SIGTERM) == 143, other.output
        assert first.wait(SECONDS + 30) == 143, first.output
    assert "another rank was stopped by SIGTERM" in first.output
    version = last_checkpoint(run, first)
    assert version >= metrics_of(run)[-1]["step"] >= 3
    state = json.loads((run / "checkpoints/latest/state/run.json").read_text())
    trained = []
    for rank in (0, 1):
        taken = set(range(rank, state["prompts"][str(rank)]["position"], 2))
        untrained = set(state["untrained"][str(rank)])
        assert untrained <= taken
        trained.append(taken - untrained)
    written = {row["group_id"] for row in rollouts_of(run)}  # texts do not travel: of rank 0 alone
    # The last step may have been applied and not reported: its figures are gathered over the ranks.
    assert written == trained[0] if version == metrics_of(run)[-1]["step"] else written <= trained[0]
    assert len(trained[0]) + len(trained[1]) == 4 * version
