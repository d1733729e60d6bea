"""Any partition of the sequences of a step into ranks and microbatches is the same step: real gloo ranks, every streamable
loss, every term on, float64. The ranks live as long as the module, so that a partition costs a fraction of a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import training_partition
import warm
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import reserved_port
from training_helpers import STREAMED

import asyncrl
from asyncrl.training.reducer import OneRank

RANKS = 3
Ask = Callable[[str, int, list[list[int]]], list[dict]]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with reserved_port() as reserved:
        yield reserved


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Ask]:
    """Trains one partition over all ranks; what each of them found."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(Path(asyncrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"{rank}.log").open("w") for rank in range(RANKS)]
    script = str(Path(training_partition.__file__))
    ranks = [
        warm.Popen(
            [sys.executable, script, str(rank), str(RANKS), str(port), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=logs[rank],
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]

    def over_ranks(name: str, seed: int, where: list[list[int]]) -> list[dict]:
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"name": name, "seed": seed, "where": where}) + "\n")
            process.stdin.flush()
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n", (folder / f"{rank}.log").read_text()
        return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]

    try:
        yield over_ranks
    finally:
        for process in ranks:  # all of them: the first one waits for the others' farewell
            assert process.stdin is not None
            process.stdin.close()
        for process, log in zip(ranks, logs, strict=True):
            assert process.stdout is not None
            process.wait(300)
            process.stdout.close()
            log.close()


places = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.integers(0, 3)).map(list),
    min_size=training_partition.SEQUENCES,
    max_size=training_partition.SEQUENCES,
)


@pytest.mark.parametrize("name", STREAMED)
def test_any_partition_over_ranks_is_the_same_step(name: str, ask: Ask) -> None:
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(where=places, seed=st.integers(0, 2**16))
    def holds(where: list[list[int]], seed: int) -> None:
        check(ask, name, seed, where)

    holds()


@pytest.mark.parametrize(
    "where", [[[1, 0]] * 9, [[i % 3, i % 2] for i in range(9)], [[2 * (i == 5), i] for i in range(9)]]
)
def test_idle_ranks_and_one_with_a_masked_row_alone(where: list[list[int]], ask: Ask) -> None:
    """Sequence 5 is fully masked: in the last partition it is all that rank 2 has, and rank 1 has nothing."""
    for name in ("grpo", "dapo", "dr_grpo"):
        check(ask, name, 7, where)


def check(ask: Ask, name: str, seed: int, where: list[list[int]]) -> None:
    whole = training_partition.step(OneRank(), name, training_partition.part(seed, [[0, 0]] * len(where), 0))
    assert whole["gradient"].abs().max() > 1e-4
    for found in ask(name, seed, where):
        torch.testing.assert_close(found["gradient"], whole["gradient"], rtol=0, atol=1e-10)
        assert found["numbers"] == pytest.approx(whole["numbers"], rel=1e-8, abs=1e-10)


def test_the_comparison_has_teeth() -> None:
    """A sequence that is left out, or counted twice, is seen."""
    whole = training_partition.step(OneRank(), "grpo", training_partition.part(7, [[0, 0]] * 9, 0))
    for where in ([[0, 0]] * 8 + [[1, 0]], [[0, 0]] * 5 + [[1, 0]] + [[0, 0]] * 3):
        some = training_partition.step(OneRank(), "grpo", training_partition.part(7, where, 0))
        assert (some["gradient"] - whole["gradient"]).abs().max() > 1e-5
