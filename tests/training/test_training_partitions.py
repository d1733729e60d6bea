"""Any partition of the sequences of a step into ranks and microbatches is the same step: real gloo ranks, every streamable
loss, every term on, float64. The ranks live as long as the module, so that a partition costs a fraction of a second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import training_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from training_helpers import STREAMED
from training_ranks import Ranks, ranks_in

from asyncrl.data.packing import pack_groups
from asyncrl.distributed.collectives import Collectives
from asyncrl.distributed.reservation import Reservation
from asyncrl.pumps.travel import decode_group, encode_group, tokens_of

RANKS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_in(str(Path(training_partition.__file__)), tmp_path_factory.mktemp("ranks"), RANKS) as living:
        yield living


places = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.integers(0, 3)).map(list),
    min_size=training_partition.SEQUENCES,
    max_size=training_partition.SEQUENCES,
)


@pytest.mark.parametrize("name", STREAMED)
def test_any_partition_over_ranks_is_the_same_step(name: str, ranks: Ranks) -> None:
    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(where=places, seed=st.integers(0, 2**16))
    def holds(where: list[list[int]], seed: int) -> None:
        check(ranks, name, seed, where)

    holds()


@pytest.mark.parametrize(
    "where", [[[1, 0]] * 9, [[i % 3, i % 2] for i in range(9)], [[2 * (i == 5), i] for i in range(9)]]
)
def test_idle_ranks_and_one_with_a_masked_row_alone(where: list[list[int]], ranks: Ranks) -> None:
    """Sequence 5 is fully masked: in the last partition it is all that rank 2 has, and rank 1 has nothing."""
    for name in ("grpo", "dapo", "dr_grpo"):
        check(ranks, name, 7, where)


@pytest.mark.parametrize("name", ["grpo?", "dapo?", "bnpo?"])
def test_a_step_that_is_surveyed_first_is_the_same_too(name: str, ranks: Ranks) -> None:
    """Rank 0 is idle. A microbatch is the same wherever it runs, which bnpo needs."""
    check(ranks, name, 3, [[1 + i % 2, 0] for i in range(9)] if name != "bnpo?" else [[1, 0]] * 9)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_rank_that_skips_all_its_groups_equals_one_that_runs_them(name: str, ranks: Ranks) -> None:
    """Rank 0 has one group, without advantages: it runs nothing, and joins every collective. Metrics are over what runs."""
    where = [[0, 0]] * 3 + [[1, 0]] * 3 + [[2, 0]] * 3
    check(ranks, f"{name}=", 7, where)
    check(ranks, f"{name}!", 7, where)
    skipped, run = (ask(ranks, name + end, 7, where) for end in "!=")
    for one, other in zip(skipped, run, strict=True):
        torch.testing.assert_close(one["gradient"], other["gradient"], rtol=0, atol=1e-10)
        for key in ("loss", "tokens", "sequences"):
            assert one["numbers"][key] == pytest.approx(other["numbers"][key], rel=1e-10)


@pytest.mark.parametrize("trainers", [[0], [0, 1], [0, 1, 2]])
def test_groups_that_travelled_to_the_ranks_of_the_ledger_are_the_same_step(trainers: list[int], ranks: Ranks) -> None:
    """The rows of a group are bit for bit those before it travelled, and the ranks are those with the fewest tokens."""
    books, where = Reservation(training_partition.GROUPS, 0, trainers=trainers), []
    for group, advantages in training_partition.groups(11):
        ticket = books.admit(group.group_id, None)[1]
        assert ticket is not None
        group = replace(group, ticket=ticket)
        arrived = decode_group(encode_group(group, 0), ticket, 0)
        for sent, found in zip(*(pack_groups([(each, advantages)], 10_000) for each in (group, arrived)), strict=True):
            for name, column in ((field.name, getattr(sent, field.name)) for field in fields(sent)):
                other = getattr(found, name)
                assert column is other or np.asarray(column).tobytes() == np.asarray(other).tobytes(), name
        where += [[books.assign(ticket, tokens_of(arrived)), 0]] * training_partition.SIZE
    assert {rank for rank, _ in where} == set(trainers)
    check(ranks, "grpo", 11, where)


def ask(ranks: Ranks, name: str, seed: int, where: list[list[int]]) -> list[dict]:
    return ranks.run([json.dumps({"name": name, "seed": seed, "where": where}) + "\n"] * RANKS)


def check(ranks: Ranks, name: str, seed: int, where: list[list[int]]) -> None:
    whole = training_partition.step(Collectives(), name, training_partition.part(seed, [[0, 0]] * len(where), 0, name))
    assert whole["gradient"].abs().max() > 1e-4
    for found in ask(ranks, name, seed, where):
        torch.testing.assert_close(found["gradient"], whole["gradient"], rtol=0, atol=1e-10)
        assert found["numbers"] == pytest.approx(whole["numbers"], rel=1e-8, abs=1e-10)


def test_the_comparison_has_teeth() -> None:
    """A sequence that is left out, or counted twice, is seen."""
    whole = training_partition.step(Collectives(), "grpo", training_partition.part(7, [[0, 0]] * 9, 0))
    for where in ([[0, 0]] * 8 + [[1, 0]], [[0, 0]] * 5 + [[1, 0]] + [[0, 0]] * 3):
        some = training_partition.step(Collectives(), "grpo", training_partition.part(7, where, 0))
        assert (some["gradient"] - whole["gradient"]).abs().max() > 1e-5
