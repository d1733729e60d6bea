"""Two and three ranks with unequal shares, none included, equal one rank (gloo, real processes)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_rank
import warm
from ports import reserved_port
from training_helpers import STREAMED

import asyncrl
from asyncrl.training.reducer import OneRank

# Every streamable loss with every term on, an idle rank and a fully masked row; then what a survey makes possible.
STREAMED_WITH_ALL = ",".join(f"{name}+" for name in STREAMED)
SURVEYED = "grpo?,dapo?,bnpo?"


@pytest.mark.parametrize(("shares", "names"), [("2,3", "grpo,dapo"), ("2,0,3", STREAMED_WITH_ALL), ("0,5", SURVEYED)])
def test_ranks_equal_one_rank(tmp_path: Path, shares: str, names: str) -> None:
    expected = [training_rank.step(OneRank(), training_rank.groups(), name) for name in names.split(",")]
    for found in over_ranks(tmp_path, shares, names):
        for one, wanted in zip(found, expected, strict=True):
            same(one, wanted)


def test_a_rank_that_skips_all_its_groups_equals_one_that_runs_them(tmp_path: Path) -> None:
    """Rank 0 has one group, without advantages: it runs nothing, and joins every collective. Nothing hangs."""
    expected = [training_rank.step(OneRank(), training_rank.groups(), f"{name}=") for name in ("grpo", "dapo")]
    for found in over_ranks(tmp_path, "1,4", "grpo!,dapo!"):
        for one, wanted in zip(found, expected, strict=True):
            for (*numbers, _), (*wanted_numbers, _) in zip(one["results"], wanted["results"], strict=True):
                assert numbers == pytest.approx(wanted_numbers, rel=1e-10)
            torch.testing.assert_close(one["weights"], wanted["weights"], rtol=0, atol=1e-10)
            torch.testing.assert_close(one["gradient"], wanted["gradient"], rtol=0, atol=1e-10)


def over_ranks(tmp_path: Path, shares: str, names: str) -> list[list[dict]]:
    """By rank, the result of every loss."""
    size = len(shares.split(","))
    script = Path(training_rank.__file__)
    environment = {**os.environ, "PYTHONPATH": str(Path(asyncrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with reserved_port() as port:
        ranks = [
            warm.Popen(
                [sys.executable, str(script), str(rank), str(size), str(port), str(tmp_path), shares, names],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for rank in range(size)
        ]
        try:
            for process in ranks:
                output, _ = process.communicate(timeout=300)
                assert process.returncode == 0, output
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]


def same(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-10)
    torch.testing.assert_close(found["gradient"], expected["gradient"], rtol=0, atol=1e-10)
    for (*numbers, metrics), (*wanted, wanted_metrics) in zip(found["results"], expected["results"], strict=True):
        assert numbers == pytest.approx(wanted, rel=1e-10)
        assert metrics == pytest.approx(wanted_metrics, rel=1e-8, abs=1e-12)
