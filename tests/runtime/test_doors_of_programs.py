"""`asyncrl run` with doors, on one rank and on several: groups are trained once, and producers that wait hear of a stop."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from runtime_door import SECONDS, Waiting, blocked, door_of, get, group, in_shared_memory, post, running
from runtime_helpers import FED, PROGRAM, RANK, TORCHRUN, metrics_of, rollouts_of, scored, write_yaml

from asyncrl.client import Client
from asyncrl.errors import RingDetached
from asyncrl.transport.inventory import clear, inventory

CONSOLE = ("-m", "asyncrl.cli.app", "run")
ENDLESS = "train.max_steps=100000"


def test_a_stopped_run_lets_its_producers_go_and_leaves_what_it_did_not_train_to_the_next(
    tmp_path: Path, name: str
) -> None:
    file, run = str(write_yaml(tmp_path, FED)), tmp_path / "runs/run"
    settings = (file, f"door.ring={name}", "door.producer_records=4", "rollout.max_staleness=8")
    with running(tmp_path, *settings, ENDLESS, program=CONSOLE) as process, Client.attach(name, timeout=200) as client:
        for group in range(2):
            client.push(group, [scored(reward=group / 8), scored(reward=1.0)])
        process.wait_until(lambda: client.statistics().records_held == 0, "first step")
        for group in range(2, 6):  # halves: they fill the ring
            client.push(group, [scored(reward=group / 8, version=1)], members=[0], group_size=2)
        waiting = blocked(client, 6)
        process.send(signal.SIGTERM)
        heard = waiting.ended()
        assert isinstance(heard, RingDetached) and "ended in good order" in str(heard)
        assert process.wait(SECONDS) == 143, process.output
        assert f"ring {name} (see `asyncrl shm`) holds 4 records that were not trained" in process.output
        (left,) = [one for one in inventory() if one.name == name]
        assert (left.owner, left.records) == (None, 4)
        assert [line["step"] for line in metrics_of(run)] == [1]

        with running(tmp_path, *settings, "resume=true", "train.max_steps=3", program=CONSOLE) as again:
            with Client.attach(name, timeout=200, epoch=client.epoch) as other:  # the part of the first one is full
                for group in range(2, 6):
                    other.push(group, [scored(reward=1.0, version=1)], members=[1], group_size=2)
                assert again.wait() == 0, again.output
    rewards = [row["reward"] for row in rollouts_of(run)]
    assert sorted(rewards) == [*(group / 8 for group in range(6)), *[1.0] * 6]
    assert "wait in ring" not in again.output and not in_shared_memory(name)


def test_groups_that_are_posted_to_a_run_from_yaml_are_trained(tmp_path: Path, name: str) -> None:
    pytest.importorskip("aiohttp", reason="needs the extra [http]")
    file = str(write_yaml(tmp_path, FED))
    settings = (file, f"door.ring={name}", "door.http_port=0", "train.max_steps=2", "algorithm.updates_per_batch=2")
    with running(tmp_path, *settings, program=CONSOLE) as process:
        url = door_of(process)
        assert get(f"{url}/info") == {"batch_size": 8, "max_token_len": 21}
        code, reply = post(f"{url}/register-env", {"desired_name": "letters", "max_token_length": 20, "weight": 1})
        assert (code, reply["status"], reply["num_steps"]) == (200, "success", 4)
        assert post(f"{url}/scored_data", group(2, 3)) == (200, {"status": "received", "groups_processed": 1})
        code, reply = post(f"{url}/scored_data", group(2, 600))
        assert code == 422 and "use the tokenizer of the model" in reply["message"]
        assert post(f"{url}/scored_data_list", [group(4, 5, 6)])[0] == 200
        process.wait_until(lambda: get(f"{url}/status")["current_step"] == 2, "first batch")
        assert post(f"{url}/scored_data_list", [group(2, 4), group(3, 5)])[0] == 200
        assert process.wait() == 0, process.output
    assert "step 4/4" in process.output and "done: version 4" in process.output
    rows = rollouts_of(tmp_path / "runs/run")
    assert sorted(row["reward"] for row in rows) == [x / 8 for x in (2, 2, 3, 3, 4, 4, 5, 5, 6)]


def test_a_run_that_is_interrupted_answers_who_posts_and_closes_its_port(tmp_path: Path, name: str) -> None:
    pytest.importorskip("aiohttp", reason="needs the extra [http]")
    file = str(write_yaml(tmp_path, FED))
    settings = (file, f"door.ring={name}", "door.http_port=0", "door.producer_records=1", ENDLESS)
    with running(tmp_path, *settings, program=CONSOLE) as process:
        url = door_of(process)
        assert post(f"{url}/scored_data", group(2, 3))[0] == 200  # half a step: it stays in the ring
        waiting = Waiting(lambda: post(f"{url}/scored_data", group(4, 5)))
        process.wait_until(lambda: get(f"{url}/status")["waiting"] == 1, "post that waits")
        process.send(signal.SIGINT)
        code, reply = waiting.ended()
        assert (code, reply["status"]) == (503, "full")
        assert process.wait(SECONDS) == 130, process.output
        assert f"ring {name} (see `asyncrl shm`) holds 1 records that were not trained" in process.output
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=5):
            pass
        with running(tmp_path, *settings, "run.overwrite=true", "train.max_steps=1", program=CONSOLE) as again:
            assert post(f"{door_of(again)}/scored_data", group(4, 5))[0] == 200
            assert again.wait() == 0, again.output
    assert sorted(row["reward"] for row in rollouts_of(tmp_path / "runs/run")) == [x / 8 for x in (2, 3, 4, 5)]


def test_a_run_that_is_stopped_before_anything_came_leaves_nothing(tmp_path: Path, name: str) -> None:
    file = str(write_yaml(tmp_path, FED))
    with running(tmp_path, file, f"door.ring={name}", ENDLESS, program=CONSOLE) as process:
        with Client.attach(name, timeout=200) as client:
            process.wait_until(lambda: client.policy_version == 0, "training")
            process.send(signal.SIGTERM)
            assert process.wait(SECONDS) == 143, process.output
            assert not in_shared_memory(name)
            with pytest.raises(RingDetached, match="ended in good order"):
                client.push(0, [scored()])


def test_a_port_that_is_taken_ends_the_run_with_what_to_do(tmp_path: Path, name: str) -> None:
    pytest.importorskip("aiohttp", reason="needs the extra [http]")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", f"door.http_port={port}")
        with running(tmp_path, *settings, program=CONSOLE) as process:
            assert process.wait() == 2, process.output
    assert "ConfigError" in process.output and "choose another port" in process.output


def rewards_of(folder: Path) -> list[list[list[float]]]:
    """By rank and step, what that rank trained."""
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    return [[sorted(reward for reward, _, _ in step) for step in rank["rows"]] for rank in ranks]


def test_groups_of_either_rank_are_trained_once_and_a_rank_without_any_takes_part(tmp_path: Path, name: str) -> None:
    pytest.importorskip("aiohttp", reason="needs the extra [http]")
    settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", "door.http_port=0", "train.max_steps=4")
    with running(tmp_path, *settings, RANK_WEIGHTS=str(tmp_path), program=(*TORCHRUN, *RANK)) as process:
        with Client.attach(name, timeout=200) as first, Client.attach(f"{name}-1", timeout=200) as second:
            for number in range(2):
                second.push(number, [scored(reward=float(number))])
            process.wait_until(lambda: first.policy_version == second.policy_version == 1, "step of the second rank")
            for number in range(2, 4):
                first.push(number, [scored(reward=float(number), version=1)])
            process.wait_until(lambda: first.policy_version == second.policy_version == 2, "step of the first rank")
        assert post(f"{door_of(process)}/scored_data_list", [group(number) for number in (4, 5, 6, 7)])[0] == 200
        assert process.wait(300) == 0, process.output
    assert process.output.count("record ring") == 1 and f"{name!r} and '{name}-1' (one per rank)" in process.output
    one, other = rewards_of(tmp_path)
    assert (one[:2], other[:2]) == ([[], [2.0, 3.0]], [[0.0, 1.0], []])
    posted = [[reward * 8 for step in rank[2:] for reward in step] for rank in (one, other)]
    assert [len(rank) for rank in posted] == [2, 2]  # spread over both
    assert sorted(posted[0] + posted[1]) == [4, 5, 6, 7]
    assert [line["train/groups"] for line in metrics_of(tmp_path / "runs/run")] == [2, 2, 2, 2]


@pytest.mark.slow
def test_the_time_limit_ends_a_rank_that_has_a_group_and_one_that_has_none(tmp_path: Path, name: str) -> None:
    settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", "train.max_steps=null", "train.time_limit_s=5")
    with running(tmp_path, *settings, RANK_WEIGHTS=str(tmp_path), program=(*TORCHRUN, *RANK)) as process:
        with Client.attach(f"{name}-1", timeout=200) as client:  # before the limit begins to run
            client.push(0, [scored(reward=0.5)])
        assert process.wait(300) == 0, process.output
    assert rewards_of(tmp_path) == [[[]], [[0.5]]]


def test_torchrun_that_is_stopped_lets_the_producers_of_every_rank_go(tmp_path: Path, name: str) -> None:
    settings = (str(write_yaml(tmp_path, FED)), f"door.ring={name}", "door.producer_records=1", "train.max_steps=99")
    with running(tmp_path, *settings, program=(*TORCHRUN, *PROGRAM)) as process:
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
        assert f"ring {ring} (see `asyncrl shm`) holds 1 records that were not trained" in process.output
        clear(ring, drop_records=True)
