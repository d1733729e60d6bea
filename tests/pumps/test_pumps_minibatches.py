"""Several optimizer steps over disjoint parts of a batch: which groups, in which order, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pumps_house import House, live
from pumps_plan import TOKENS, Plan

from asyncrl.pumps.building import parts_of_rank
from asyncrl.pumps.metrics import over_parts
from asyncrl.types import StepResult


def groups_by_version(house: House) -> dict[int, set[int]]:
    """Group ids that were trained at each version."""
    found: dict[int, set[int]] = {}
    for version, batch in house.tokens_trained:
        found.setdefault(version, set()).update(batch.group_ids.tolist())
    return found


def test_each_part_takes_one_optimizer_step_in_every_pass() -> None:
    plan = Plan(
        preset="one_off", groups_per_step=5, prompts=10, updates_per_batch=2, minibatches=2, tokens_per_microbatch=12
    )
    house = live(plan)
    assert house.error is None and [report.version for report in house.reports] == [4, 8]
    parts = [set(ids) for step in house.trained() for ids in 2 * [sorted(step)[:3], sorted(step)[3:]]]
    assert groups_by_version(house) == dict(enumerate(parts))
    assert [event.version for event in house.events("weights taken")] == [4, 8]
    assert len(house.events("commit")) == len(house.events("release")) == 2
    first = house.names("logprobs", "begin", "finish", "commit")
    assert (
        first[: first.index("begin")].count("logprobs") == 5
    )  # old log-probs of all parts, before the first moves a weight
    assert "logprobs" not in first[first.index("begin") : first.index("commit")]
    assert all(house.trainer.old_logprobs_given)
    for report in house.reports:  # a pass goes over every sequence and token once
        assert report.result.sequences == 10 and report.result.tokens == 10 * TOKENS
        assert report.metrics["train/sequences"] == 10 and report.metrics["train/groups"] == 5


def test_a_preset_that_streams_gathers_the_whole_batch() -> None:
    house = live(Plan(preset="async", groups_per_step=4, prompts=8, minibatches=4, rollout_s=lambda g, m: 9.0 - g))
    assert house.error is None and [len(groups) for groups in groups_by_version(house).values()] == [1] * 8
    for trained, version in zip(house.trained(), (0, 4), strict=True):
        assert [groups_by_version(house)[version + part] for part in range(4)] == [{g} for g in sorted(trained)]


def test_a_last_step_with_fewer_groups_than_parts_is_dropped() -> None:
    house = live(Plan(preset="one_off", groups_per_step=4, prompts=10, minibatches=3))
    assert house.error is None and house.trainer.version == 6 and house.books.trained == 8
    house = live(Plan(preset="one_off", groups_per_step=4, prompts=7, minibatches=3))  # three groups are enough
    assert house.error is None and house.trainer.version == 6 and house.books.trained == 7


@given(st.integers(1, 6), st.lists(st.integers(0, 200), min_size=6, max_size=24, unique=True), st.integers(0, 10**6))
def test_the_parts_do_not_depend_on_the_ranks(count: int, ids: list[int], seed: int) -> None:
    alone = dict(zip(ids, parts_of_rank([ids], 0, count), strict=True))
    sizes = [list(alone.values()).count(part) for part in range(count)]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert all(alone[a] <= alone[b] for a, b in pairwise(sorted(ids)))
    ranks: list[list[int]] = [[], [], [], []]
    for place, group_id in enumerate(ids):
        ranks[(seed >> place) % 3].append(group_id)  # nothing lies on the last one
    found: dict[int, int] = {}
    for rank, mine in enumerate(ranks):
        found |= dict(zip(mine, parts_of_rank(ranks, rank, count), strict=True))
    assert found == alone


def test_several_ranks_agree_on_the_parts_and_one_without_rows_joins_each_step() -> None:
    """The other rank has most of the batch: this one has groups for one part alone, and takes every optimizer step."""
    told: list[Any] = []

    async def gather(part: Any) -> list[Any]:
        told.append(part)
        return [part, [100, 101, 102, 103]] if isinstance(part, list) else [part]

    house = live(
        Plan(preset="one_off", groups_per_step=3, prompts=3, minibatches=3), ports={"ranks": 2, "gather": gather}
    )
    assert house.error is None and house.trainer.version == 3
    assert [part for part in told if isinstance(part, list)] == [[0, 1, 2]]
    assert groups_by_version(house) == {0: {0, 1, 2}}
    assert house.names("begin", "finish") == ["begin", "finish"] * 3


def result(version: int, tokens: int, **metrics: float) -> StepResult:
    return StepResult(version, version / 10, 2.0 * version, 0.5**version, tokens, tokens // 2, 1, metrics)


def test_what_is_reported_of_a_pass() -> None:
    parts = [
        result(1, 4, entropy=1.0, **{"mismatch/ratio_max": 3.0, "ratio_min": 0.5, "mismatch/current_tokens": 4.0}),
        result(2, 8, entropy=2.0, **{"mismatch/ratio_max": 2.0, "ratio_min": 0.7, "optim/lr": 0.25}),
    ]
    found = over_parts(parts)
    assert (found.version, found.tokens, found.sequences, found.microbatches) == (2, 12, 6, 2)
    assert (found.loss, found.grad_norm, found.lr) == (pytest.approx(0.15), 3.0, 0.25)
    assert found.metrics == {
        "entropy": 1.5, "mismatch/ratio_max": 3.0, "ratio_min": 0.5, "mismatch/current_tokens": 4.0, "optim/lr": 0.25
    }  # fmt: skip
    one: Sequence[StepResult] = parts[:1]
    assert over_parts(one) is parts[0]
