"""Several ranks with doors under torchrun: a ring a rank, one HTTP port, every group trained once, nobody left waiting."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from runtime_door import SECONDS, Waiting, blocked, door_of, group, post, running
from runtime_helpers import FED, metrics_of, scored, write_yaml

from asyncrl.client import Client
from asyncrl.errors import RingDetached
from asyncrl.transport.inventory import clear

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
RANK = str(Path(__file__).with_name("runtime_rank.py"))


def rewards_of(folder: Path) -> list[list[list[float]]]:
    """By rank and step, what that rank trained."""
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    return [[sorted(reward for reward, _, _ in step) for step in rank["rows"]] for rank in ranks]


def test_groups_of_either_rank_are_trained_once_and_a_rank_without_any_takes_part(tmp_path: Path, name: str) -> None:
    pytest.importorskip("aiohttp", reason="needs the extra [http]")
    settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", "door.http_port=0", "train.max_steps=4")
    with running(tmp_path, *settings, RANK_WEIGHTS=str(tmp_path), program=(*TORCHRUN, RANK)) as process:
        with Client.attach(name, timeout=200) as first, Client.attach(f"{name}-1", timeout=200) as second:
            for number in range(2):
                second.push(number, [scored(reward=float(number))])
            process.wait_until(lambda: first.policy_version == second.policy_version == 1, "step of the second rank")
            for number in range(2, 4):
                first.push(number, [scored(reward=float(number), version=1)])
            process.wait_until(lambda: first.policy_version == second.policy_version == 2, "step of the first rank")
        assert post(f"{door_of(process)}/scored_data_list", [group(number) for number in (4, 5, 6, 7)])[0] == 200
        assert process.wait(300) == 0, process.output
    assert process.output.count("record ring") == 1 and f"{name!r} and '{name}-1' (one a rank)" in process.output
    one, other = rewards_of(tmp_path)
    assert (one[:2], other[:2]) == ([[], [2.0, 3.0]], [[0.0, 1.0], []])
    posted = [[reward * 8 for step in rank[2:] for reward in step] for rank in (one, other)]
    assert [len(rank) for rank in posted] == [2, 2]  # spread over both
    assert sorted(posted[0] + posted[1]) == [4, 5, 6, 7]
    assert [line["train/groups"] for line in metrics_of(tmp_path / "runs/run")] == [2, 2, 2, 2]


def test_the_time_limit_ends_a_rank_that_has_a_group_and_one_that_has_none(tmp_path: Path, name: str) -> None:
    settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", "train.max_steps=null", "train.time_limit_s=5")
    with running(tmp_path, *settings, RANK_WEIGHTS=str(tmp_path), program=(*TORCHRUN, RANK)) as process:
        with Client.attach(f"{name}-1", timeout=200) as client:  # before the limit begins to run
            client.push(0, [scored(reward=0.5)])
        assert process.wait(300) == 0, process.output
    assert rewards_of(tmp_path) == [[[]], [[0.5]]]


def test_torchrun_that_is_stopped_lets_the_producers_of_every_rank_go(tmp_path: Path, name: str) -> None:
    settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", "door.producer_records=1", "train.max_steps=99")
    with running(tmp_path, *settings, program=(*TORCHRUN, "-m", "asyncrl.main")) as process:
        with Client.attach(name, timeout=200) as first, Client.attach(f"{name}-1", timeout=200) as second:
            waiting: list[Waiting] = []
            for client in (first, second):
                client.push(0, [scored()], members=[0], group_size=2)
                waiting.append(blocked(client, 1))
            process.wait_until(lambda: first.policy_version == second.policy_version == 0, "training")
            process.send(signal.SIGTERM)
            assert all(isinstance(one.ended(), RingDetached) for one in waiting)
            assert process.wait(SECONDS + 30) != 0
    for ring in (name, f"{name}-1"):
        assert f"1 records that were not trained wait in ring {ring} " in process.output
        clear(ring, drop_records=True)
