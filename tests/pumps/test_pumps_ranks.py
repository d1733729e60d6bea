"""Statistics of the whole step on several ranks: the same advantages, to the last bit, as on one rank with all its groups."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pumps_rank
import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st
from ports import reserved_port
from pumps_house import live
from pumps_plan import Plan

import asyncrl
from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.registry import ADVANTAGES, build_advantage
from asyncrl.pumps.building import of_rank

STEP_ADVANTAGES = [name for name, each in ADVANTAGES.items() if each.needs_whole_step]


def alone(name: str, rows: list[pumps_rank.Row]) -> dict[int, list[float]]:
    values = build_advantage(name).of_step([rewards for _, rewards in rows])
    return {group_id: value.tolist() for (group_id, _), value in zip(rows, values, strict=True)}


@given(st.integers(0, 10**6), st.integers(1, 9), st.lists(st.integers(0, 9), max_size=3))
def test_any_split_over_ranks_gives_the_advantages_of_one_rank(seed: int, groups: int, cuts: list[int]) -> None:
    """Up to four ranks, some of them with nothing; groups of one, members that cannot be scored."""
    rows = pumps_rank.step(seed, groups)
    ends = sorted({0, *(min(cut, groups) for cut in cuts), groups})
    shares = [last - first for first, last in pairwise(ends)] + [0] * (seed % 2)
    parts = pumps_rank.split(rows, shares, seed)
    for name in STEP_ADVANTAGES:
        found = {}
        for rank, part in enumerate(parts):
            values = of_rank(build_advantage(name), parts, rank)
            found |= {group_id: value.tolist() for (group_id, _), value in zip(part, values, strict=True)}
        assert found == alone(name, rows)


def start(port: int, out: str, shares: str) -> list[subprocess.Popen[str]]:
    size = len(shares.split(","))
    environment = {**os.environ, "PYTHONPATH": str(Path(asyncrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return [
        warm.Popen(
            [sys.executable, pumps_rank.__file__, str(rank), str(size), str(port), out, shares],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]


def ended(out: str, shares: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank; none is left, whatever happens."""
    with reserved_port() as port:
        ranks = start(port, out, shares)
        try:
            return [(process.wait(), output) for process in ranks for output, _ in [process.communicate(timeout=120)]]
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


@pytest.mark.parametrize("shares", ["3,4", "5,0,1"])
def test_real_ranks_give_the_advantages_of_one_rank(tmp_path: Path, shares: str) -> None:
    outcomes = ended(str(tmp_path), shares)
    assert [code for code, _ in outcomes] == [0] * len(outcomes), outcomes
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(len(outcomes))]
    groups = sum(int(share) for share in shares.split(","))
    expected = [alone(name, pumps_rank.step(seed, groups)) for seed in range(8) for name in STEP_ADVANTAGES]
    assert [{g: a for part in parts for g, a in part.items()} for parts in zip(*ranks, strict=True)] == expected
    assert any(any(values) for step in expected for values in step.values())


def test_a_rank_that_leaves_before_the_rewards_are_told_ends_the_other(tmp_path: Path) -> None:
    (code, output), (_, _) = ended("leave", "2,2")
    assert code != 0 and "RankLost" in output and "rank 0 of 2" in output


@pytest.mark.parametrize("name", ["grpo_batch", "gdpo"])
def test_the_train_pump_tells_its_rewards_and_hears_the_others(name: str) -> None:
    """Another rank answers with a group of its own. Rewards travel once a step, what is reported of it once more."""
    theirs = (10_000, GroupRewards([5.0, 9.0], {}, {}, [2, 2]))
    told: list[Any] = []

    async def gather(part: Any) -> list[Any]:
        told.append(part)
        return [part, [theirs]] if isinstance(part, list) else [part]

    rest = {"groups_per_step": 2, "group_size": 2, "prompts": 4, "reward": lambda group, member: float(group + member)}
    house = live(Plan(preset="one_off", advantage_name=name, **rest), ports={"ranks": 2, "gather": gather})  # type: ignore[arg-type]
    assert house.error is None and len(house.reports) == 2
    rewards = [part for part in told if isinstance(part, list)]
    assert [[group_id for group_id, _ in part] for part in rewards] == house.trained()
    for report, mine in zip(house.reports, rewards, strict=True):
        expected, without = alone(name, [*mine, theirs]), alone(name, mine)
        assert {g: a.tolist() for g, a in report.advantages.items()} == {g: expected[g] for g, _ in mine}
        assert all(expected[g] != without[g] for g, _ in mine)  # the other rank's do count
