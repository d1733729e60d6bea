"""Weights by broadcast to nodes that are processes of their own, over gloo and the line."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broadcast_helpers import nodes, outcome

from asyncrl.weights.broadcast import Stripes


def run(senders: int, receivers: int, **options: Any) -> dict[str, tuple[list[dict[str, Any]], str, int]]:
    with nodes(senders, receivers, **options) as started:
        return {name: outcome(process) for name, process in started.items()}


def hashes(lines: list[dict[str, Any]]) -> dict[int, str]:
    return {line["version"]: line["sha"] for line in lines if "sha" in line}


@pytest.mark.parametrize(
    ("senders", "receivers", "kind", "versions"),
    [
        pytest.param(1, 1, "bfloat16", 50, marks=pytest.mark.slow),
        pytest.param(1, 2, "float32", 50, marks=pytest.mark.slow),
        pytest.param(1, 3, "bfloat16", 50, marks=pytest.mark.slow),
        pytest.param(2, 2, "bfloat16", 50, marks=pytest.mark.slow),
        (1, 3, "bfloat16", 4),
        (2, 1, "cut bfloat16", 4),
        pytest.param(1, 1, "lora bfloat16", 4, marks=pytest.mark.slow),
    ],
)
def test_every_version_arrives_bit_for_bit(senders: int, receivers: int, kind: str, versions: int) -> None:
    """Each worker compares the fixed row of each version, too. `cut`: what the ranks of a sharded trainer gather."""
    results = run(senders, receivers, kind=kind, versions=versions)
    for name, (_, err, code) in results.items():
        assert code == 0, f"{name}: {err}"
    sent = hashes(results["rank 0"][0])
    assert sorted(sent) == [*range(versions + 1)]
    for lines, *_ in results.values():
        assert hashes(lines) == sent


def test_training_goes_on_and_the_newest_version_is_sent() -> None:
    results = run(2, 1, kind="bfloat16", versions=30, paced=False)
    for name, (_, err, code) in results.items():
        assert code == 0, f"{name}: {err}"
    sent = hashes(results["rank 0"][0])
    received = hashes(results["rank 2"][0])
    assert received.items() <= sent.items()
    assert 30 in received and len(received) < 25, received


# -- faults ------------------------------------------------------------------------------------------------------------

SHORT = {"deadline_s": 5.0, "silence_s": 5.0, "versions": 4}


@pytest.mark.parametrize(
    ("how", "bucket"),
    [
        ("SIGKILL", 0),
        ("SIGSTOP", 1),
        pytest.param("SIGKILL", 1, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 3, marks=pytest.mark.slow),
    ],
)
def test_a_receiver_that_is_lost_in_a_broadcast_is_named_and_the_others_go_on(how: str, bucket: int) -> None:
    with nodes(1, 3, faults={"rank 2": [[how, 2, bucket]]}, **SHORT) as started:
        results = {name: outcome(started[name]) for name in ("rank 0", "rank 1", "rank 3")}
        if how == "SIGSTOP":
            started["rank 2"].send_signal(signal.SIGCONT)
            # It is told that it was given up.
            results["rank 2"] = outcome(started["rank 2"])
            assert results["rank 2"][2] == 12, results["rank 2"]
    lines, err, code = results["rank 0"]
    assert code == 0, err
    assert [line["lost"] for line in lines if "lost" in line] == ["rank 2"]
    assert "rank 2" in next(line["reason"] for line in lines if "lost" in line)
    sent = hashes(lines)
    for name in ("rank 1", "rank 3"):
        assert results[name][2] == 0, results[name][1]
        assert hashes(results[name][0]) == sent


@pytest.mark.parametrize(
    ("lost", "bucket"),
    [
        ("rank 1", 0),
        pytest.param("rank 0", 1, marks=pytest.mark.slow),
        pytest.param("rank 0", 0, marks=pytest.mark.slow),
    ],
)
def test_a_sender_that_is_killed_in_a_broadcast_ends_the_run_by_name(lost: str, bucket: int) -> None:
    results = run(2, 2, faults={lost: [["SIGKILL", 2, bucket]]}, **SHORT)
    for name, (lines, err, code) in results.items():
        if name == lost:
            assert code == -signal.SIGKILL
        else:
            assert code == 12 and lost in err, (name, err)
            assert max(hashes(lines)) <= 2


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("swaps", "with the weights of version 2 the worker computes log-probs of a fixed row"),
        pytest.param("forgets", "computes log-probs of a fixed row", marks=pytest.mark.slow),
        ("skips", "rank 2 has version 0 of the weights, but it was sent version 1"),
    ],
)
def test_a_receiver_with_wrong_weights_ends_and_is_named(fault: str, sentence: str) -> None:
    results = run(1, 2, faults={"rank 2": [[fault, 2, 0]]}, **SHORT)
    _lines, err, code = results["rank 2"]
    assert code == 3 and sentence in err, err
    lost = [line["lost"] for line in results["rank 0"][0] if "lost" in line]
    assert results["rank 0"][2] == 0 and lost == (["rank 2"] if fault == "skips" else []), results["rank 0"]
    assert hashes(results["rank 1"][0]) == hashes(results["rank 0"][0])


def test_the_groups_of_all_senders_are_aborted_together() -> None:
    """On nccl the abort of one group may wait for another group."""
    together = threading.Barrier(3, timeout=20.0)
    stripes = Stripes("rank 3", dist.HashStore(), torch.device("cpu"), 1.0)
    stripes._groups = {str(sender): SimpleNamespace(abort=together.wait) for sender in range(3)}
    stripes.close()
    assert not stripes._groups
    stripes.close()
