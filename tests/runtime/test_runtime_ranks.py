"""Two ranks: `preset: sync` trains the weights of one rank bit by bit; a stranger cannot reach what they exchange."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import zmq
from ports import reserved_port
from runtime_helpers import (
    DRY,
    ENDLESS,
    FAST,
    PROGRAM,
    RANK,
    REAL,
    TORCHRUN,
    equal_weights,
    lines_at_least,
    metrics_of,
    run_ranks,
    start,
    start_two,
    train,
    weights_of,
)

SYNC: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": REAL["model"] | {"dtype": "float64"},
    "rollout": REAL["rollout"] | {"groups_per_step": 5},
    "train": REAL["train"] | {"max_steps": 3},
    **FAST,
}


async def test_two_ranks_train_their_ordinals_of_each_step_and_the_weights_of_one_rank(tmp_path: Path) -> None:
    """Five groups a step: three and two, then two and three. Again, with an equal command: every bit."""
    ended: list[list[dict[str, Any]]] = []
    for name in ("first", "again"):
        folder = tmp_path / name
        folder.mkdir()
        await asyncio.to_thread(partial(run_ranks, folder, SYNC, program=RANK, RANK_WEIGHTS=str(folder)))
        ended.append([torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)])
    (one, other), again = ended
    assert one["groups"] == [[0, 2, 4], [6, 8], [10, 12, 14]] and other["groups"] == [[1, 3], [5, 7, 9], [11, 13]]
    for rank in (0, 1):
        assert equal_weights(again[rank]["weights"], one["weights"]) and again[rank]["rows"] == ended[0][rank]["rows"]
    await train(tmp_path, base=SYNC)
    expected = weights_of(tmp_path / "runs/run", 3)
    for name, weight in weights_of(tmp_path / "first/runs/run", 3).items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)
    # The engines of both ranks count.
    of_one, of_two = (metrics_of(tmp_path / folder / "runs/run") for folder in ("", "first"))
    assert [line["engine/tokens"] for line in of_two] == [line["engine/tokens"] for line in of_one]


def test_a_dry_run_of_two_ranks_steps_together_and_counts_every_group(tmp_path: Path) -> None:
    """The ranks meet at each optimizer step: a rank that came late would find no group of its step and end without a word."""
    tree = DRY | {"train": DRY["train"] | {"max_steps": 12}, "data": REAL["data"], "reward": REAL["reward"]}
    output = run_ranks(tmp_path, tree)[0]
    found = re.search(r"done: version 12 in .*: (\d+) admitted, (\d+) trained, (\d+) dropped, 0 failed", output)
    assert found is not None, output
    admitted, trained, dropped = map(int, found.groups())
    assert (admitted - dropped, trained) == (48, 48)
    assert [line["step"] for line in metrics_of(tmp_path / "runs/run")] == list(range(1, 13))


def test_ranks_with_other_numbers_of_rows_are_refused(tmp_path: Path) -> None:
    for count in (7, 8):
        (tmp_path / f"{count}.jsonl").write_text(f"{json.dumps({'prompt': 'a3='})}\n" * count)
    own = [f"data.train={tmp_path}/{count}.jsonl" for count in (8, 7)]
    with start_two(tmp_path, DRY | {"reward": REAL["reward"]}, own=own) as ranks:
        assert [each.wait(60) for each in ranks][1] != 0
        assert "data.train has 8 rows on rank 0 and 7 on rank 1" in ranks[1].output, ranks[1].output


@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """For longer than the time after which a rank without a sign of life is lost; once more while it has no time to recover."""
    limits = {"interval_s": 0.2, "loop_timeout_s": 4.0}
    run = tmp_path / "runs/run"
    with start_two(tmp_path, ENDLESS | {"watchdog": limits}) as ranks:
        ranks[0].wait_until(lines_at_least(run, 2), "second step")
        for pause_s in (7.0, 5.0):
            for each in ranks:
                each.send(signal.SIGSTOP)
            time.sleep(pause_s)  # the suspension
            for each in reversed(ranks):
                each.send(signal.SIGCONT)
        ranks[0].wait_until(lines_at_least(run, len(metrics_of(run)) + 4), "steps after the suspension")
        for each in ranks:
            each.send(signal.SIGTERM)
        assert [each.wait(60) for each in ranks] == [143, 143], ranks[0].output + ranks[1].output
    assert "sign of life" not in ranks[0].output + ranks[1].output
    assert [line["step"] for line in metrics_of(run)] == [*range(1, len(metrics_of(run)) + 1)]


def test_a_stranger_who_finds_the_ports_of_the_ranks_can_neither_read_nor_write_there(tmp_path: Path) -> None:
    """It asks every port at which the ranks listen to commit a step and for its settings, with another secret and with none."""
    run = tmp_path / "runs/run"
    with reserved_port() as port, zmq.Context() as context:
        process = start(tmp_path, ENDLESS, program=(*TORCHRUN, "--master-port", str(port), *PROGRAM))
        try:
            process.wait_until(lines_at_least(run, 2), "second step")
            launchers = dist.TCPStore("127.0.0.1", port, is_master=False)
            keys = [key for key in launchers.list_keys() if "asyncrl/" in key]  # type: ignore[attr-defined]
            assert any(key.endswith("asyncrl/0/line/0") for key in keys), keys
            ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if "main" in each.name()]
            ports = {c.laddr.port for rank in ranks for c in rank.net_connections("tcp") if c.status == "LISTEN"}
            strangers = []
            for number in sorted(ports):
                for secret in (True, False):
                    stranger = context.socket(zmq.DEALER)
                    stranger.linger, stranger.routing_id = 0, b"rank 1"
                    if secret:
                        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                        stranger.curve_serverkey = zmq.curve_keypair()[0]
                    stranger.connect(f"tcp://127.0.0.1:{number}")
                    for kind, request in (("ledger", ["commit", 1, 2]), ("meet", None)):
                        stranger.send(json.dumps([2, "a", 0, 0, kind, request]).encode())
                    strangers.append(stranger)
            assert len(ports) >= 2
            done = len(metrics_of(run))
            process.wait_until(lines_at_least(run, done + 3), "third step beside the strangers")
            assert not any(stranger.poll(0) for stranger in strangers), "somebody answered"
            process.send(signal.SIGTERM)
            process.wait(60)
        finally:
            for stranger in strangers:
                stranger.close()
            process.kill()
    refused = r"rank 0 refused a connection from (127\.0\.0\.1|an unknown address), which does not know the secret of this run"
    assert re.search(refused, process.output)
    assert [line["step"] for line in metrics_of(run)] == [*range(1, len(metrics_of(run)) + 1)]
