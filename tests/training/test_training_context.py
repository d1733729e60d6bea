"""Ranks that share each microbatch take the step of one rank: real gloo ranks, float64, every term of the loss on, five updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import training_sharded
from test_training_sharded import SCRIPT, joined, lines
from training_partition import SEQUENCES
from training_ranks import Ranks, ranks_in
from training_sharded import Case

ONE_SET = [[0, i % 3] for i in range(SEQUENCES)]
TWO_SETS = [[i % 2, i % 3 if i % 2 else 0] for i in range(SEQUENCES)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_in(SCRIPT, tmp_path_factory.mktemp("two"), 2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_in(SCRIPT, tmp_path_factory.mktemp("four"), 4) as ranks:
        yield ranks


def check(ranks: Ranks, case: Case, tolerance: float = 1e-10) -> list[dict[str, Any]]:
    """After five steps each rank has the weights, optimizer state, metrics and log-probs of one rank that runs all microbatches."""
    case = replace(case, steps=5)
    wanted = training_sharded.replicate(case)
    found = ranks.run(lines(ranks, case))
    close = {"rtol": 0.0, "atol": tolerance}
    assert max(grad.abs().max() for grad in wanted["gradient"].values()) > 1e-4
    copies = 1 if case.flat else case.shards or ranks.size
    for name, master in wanted["masters"].items():
        for first in range(0, ranks.size, copies):
            parts = found[first : first + copies]
            torch.testing.assert_close(joined(parts, "masters", name), master, **close)
            assert torch.equal(joined(parts, "masters", name), joined(found[:copies], "masters", name))
        state = torch.cat([part["optimizer"][name]["exp_avg_sq"] for part in found[:copies]])
        torch.testing.assert_close(state, wanted["optimizer"][name]["exp_avg_sq"], **close)
    for part in found:
        for mine, theirs in zip(part["numbers"], wanted["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=max(100 * tolerance, 1e-8), abs=1e-9)
    for sibling in range(case.context):
        logprobs = [values for part in found[sibling :: case.context] for values in part["logprobs"]]
        for mine, theirs in zip(logprobs, wanted["logprobs"], strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=0, atol=1e-5)
    return found


@pytest.mark.parametrize("path", ["fused", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_ranks_take_the_step_of_one(two: Ranks, path: str, checkpointing: bool) -> None:
    check(two, Case(where=ONE_SET, flat=True, context=2, path=path, checkpointing=checkpointing))


@pytest.mark.parametrize("path", ["fused", "packed"])
def test_four_ranks_repeat_the_heads_of_keys(four: Ranks, path: str) -> None:
    """Two heads of keys and values for four ranks."""
    check(four, Case(where=ONE_SET, flat=True, context=4, path=path, kind="qwen3"))


@pytest.mark.parametrize("flat", [True, False])
def test_two_sets_of_two(four: Ranks, flat: bool) -> None:
    check(four, Case(where=TWO_SETS, flat=flat, context=2))
