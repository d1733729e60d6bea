"""The figures of a step are those of all ranks' groups, wherever these lie; and one gathering for each committed step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pumps_house import live
from pumps_plan import Plan, make_prompt, make_trajectory

from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.pumps.metrics import GroupRows, Row, StepPart, decode_part, encode_part, group_rows, step_metrics
from asyncrl.records.check import SILENT
from asyncrl.telemetry.rollouts import row
from asyncrl.types import FinishReason, Group, Prompt, StepResult, Ticket, Trajectory

VERSION = 7
RESULT = StepResult(version=8, loss=0.5, grad_norm=1.0, lr=1e-3, tokens=9, sequences=3, microbatches=1)

values = st.floats(-1e3, 1e3)
rows = st.builds(
    Row,
    reward=st.none() | values | st.sampled_from([0.0, 1.0]),
    components=st.dictionaries(st.sampled_from(["right", "short"]), st.none() | values, max_size=2),
    tokens=st.integers(0, 500),
    clipped=st.booleans(),
    spans=st.booleans(),
)
groups = st.lists(
    st.tuples(st.integers(0, VERSION), st.lists(rows, min_size=1, max_size=4), st.integers(0, 3)), max_size=8
)
counts = st.dictionaries(st.sampled_from(["staleness/dropped", "reroll/groups"]), st.integers(0, 9).map(float))


def metrics(parts: Sequence[StepPart]) -> dict[str, float]:
    return step_metrics(parts, VERSION, RESULT, seconds=2.0)


@settings(max_examples=150, deadline=None)
@given(drawn=groups, counted=st.lists(counts, min_size=4, max_size=4), order=st.randoms(use_true_random=False))
def test_any_split_over_ranks_gives_the_metrics_of_the_whole(drawn: Any, counted: Any, order: Any) -> None:
    """Four ranks, some of them with nothing; their groups in any order of arrival."""
    everything = [(GroupRows(number, oldest, tuple(rows)), rank) for number, (oldest, rows, rank) in enumerate(drawn)]
    replayed = [age for age, (_, rank) in enumerate(everything) if rank == 1]  # rank 1 replaced all of its own
    parts = []
    for rank in range(4):
        mine = [group for group, owner in everything if owner == rank]
        order.shuffle(mine)
        parts.append(StepPart(tuple(mine), counted[rank], tuple(replayed) if rank == 1 else ()))
    total = {name: sum(each.get(name, 0.0) for each in counted) for name in {n for each in counted for n in each}}
    whole = StepPart(tuple(group for group, _ in everything), total, tuple(replayed))
    split = metrics(parts)
    loads = [sum(row.tokens for group in part.groups for row in group.rows) for part in parts]
    assert split.pop("train/balance", None) == (max(loads) * 4 / sum(loads) if sum(loads) else None)
    assert split == metrics([whole])  # exactly: the same floats in the same order


def test_numbers_that_reward_functions_logged_are_metrics_and_all_of_it_stands_in_the_rollouts() -> None:
    logged: list[dict[str, Any]] = [
        {"f/right": True, "f/said": "a"},
        {"f/right": False, "f/near": 0.5},
        {"f/right": None},
    ]
    members = tuple(replace(make_trajectory(0, m, 3, [0], 1.0), extras=extras) for m, extras in enumerate(logged))
    group = Group(Ticket(0, 0, 0), make_prompt(0), members)
    found = metrics([decode_part(encode_part(StepPart(group_rows([group]))))])
    named = {name.removeprefix("reward/"): value for name, value in found.items() if name.startswith("reward/f/")}
    assert named["f/right/mean"] == 0.5 and named["f/near/mean"] == 0.5 and named["f/near/applicable"] == 1 / 3
    assert not any("said" in name for name in named)
    assert [row(group, t, 0, {}).get("extras") for t in members] == logged


def test_the_figures_by_hand() -> None:
    one = GroupRows(0, 5, (Row(1.0, {"a": 1.0}, 4, True, True), Row(0.0, {"a": None}, 2, False, False)))
    other = GroupRows(1, 7, (Row(3.0, {"a": 2.0}, 6, False, False), Row(3.0, {}, 8, False, False)))
    third = GroupRows(2, 6, (Row(None, {}, 1, False, False),))
    found = metrics(
        [
            StepPart((other,), {"replay/tokens": 3.0, "own/x": 3.0, "own/x#": 1.0}, (2,), kl=0.5),
            StepPart((one, third), {"staleness/dropped": 1.0, "own/x": 5.0, "own/x#": 3.0}, (5, 4), kl=1.5),
        ]
    )
    assert found["reward/mean"] == 7 / 4
    assert found["reward/std"] == pytest.approx(1.5)  # sqrt((0.75^2 + 1.75^2 + 2 x 1.25^2) / 3), of 1, 0, 3, 3
    assert found["frac_reward_zero_std"] == 0.5
    assert [found[f"reward/{name}"] for name in ("min", "max", "applicable")] == [0, 3, 4 / 5]
    assert (found["reward/a/mean"], found["reward/a/applicable"]) == (1.5, 2 / 5)
    assert found["reward/a/std"] == pytest.approx(np.std([1.0, 2.0], ddof=1))
    lengths = [found[f"completions/{name}_length"] for name in ("mean", "min", "max", "trained_mean")]
    assert lengths == pytest.approx([21 / 5, 1, 8, 9 / 3])
    assert found["completions/clipped_ratio"] == pytest.approx(0.2)
    assert (found["staleness/mean"], found["staleness/max"], found["staleness/dropped"]) == (1, 2, 1)
    assert found["staleness/spanning_token_share"] == pytest.approx(4 / 21)
    assert found["train/groups"] == 0 and found["perf/tokens_per_s"] == 9 / 2.0
    assert found["kl"] == pytest.approx(2 / 21)
    assert found["own/x"] == 2 and "own/x#" not in found  # (3 + 5) / 4, of what two ranks logged
    assert (found["replay/age_mean"], found["replay/age_max"], found["replay/tokens"]) == (pytest.approx(11 / 3), 5, 3)


def test_a_group_without_a_trained_token_has_no_age() -> None:
    """Its ticket counts turns, and a batch may take several versions."""
    members = make_trajectory(0, 0, 1, []), make_trajectory(1, 0, 1, [VERSION - 1])
    groups = [Group(Ticket(number, 2, 3), make_prompt(number), (member,)) for number, member in enumerate(members)]
    for chosen, age in ((groups, 1), (groups[:1], 0)):
        found = metrics([StepPart(group_rows(chosen))])
        assert (found["staleness/mean"], found["staleness/max"]) == (age, age)


@pytest.mark.parametrize("skips", [False, True])
def test_masked_tokens_are_not_trained(skips: bool) -> None:
    """Of every group of three completions of 4 tokens the first is masked; the second, silent one counts, like the third. Groups
    that are skipped, as they cannot move a weight, count the same."""

    class Environment:
        async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
            played = make_trajectory(prompt.group_id, member, group_size, [0] * 4)
            reason = FinishReason.LENGTH if member == 0 else FinishReason.STOP
            return replace(played, finish_reason=reason, metadata={SILENT: member == 1})

    plan = Plan(
        groups_per_step=2, group_size=3, max_steps=1, algorithm={"mask": {"truncated": True}},
        train_config={"skip_zero_advantage": skips}, reward=lambda group, member: float(member) * group,
    )  # fmt: skip
    [report] = live(plan, ports={"environment": Environment()}).reports
    found = report.metrics
    assert found["completions/mean_length"] == 4
    assert found["completions/trained_mean_length"] == (0 + 4 + 4) / 3
    assert found["perf/tokens_per_s"] == pytest.approx(2 * 8 / found["time/step"])
    assert found["train/tokens"] == 2 * 8


rewards = st.lists(st.none() | st.floats(), max_size=4)


@settings(max_examples=100, deadline=None)
@given(drawn=groups, counted=counts, kl=st.none() | st.floats())
def test_a_part_travels_to_the_last_bit(drawn: Any, counted: Any, kl: float | None) -> None:
    made = tuple(GroupRows(number, oldest, tuple(rows)) for number, (oldest, rows, _) in enumerate(drawn))
    part = StepPart(made, counted, (2, 5), kl)
    assert repr(decode_part(encode_part(part))) == repr(part)  # also where it holds NaN


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(GroupRewards, rewards, st.dictionaries(st.text(), rewards), st.just({"a": 0.3}), st.just([1, 2]))
    )
)
def test_rewards_and_group_ids_travel_to_the_last_bit(told: list[GroupRewards]) -> None:
    of_groups = [(2**41 + number, each) for number, each in enumerate(told)]
    assert repr(decode_part(encode_part(of_groups))) == repr(of_groups)
    ids = [group_id for group_id, _ in of_groups]
    assert decode_part(encode_part(ids)) == ids


def test_a_part_of_numpys_numbers_travels() -> None:
    row = Row(float(np.float32(0.1)), {"a": np.float64(0.5)}, np.int64(4), np.bool_(True), False)  # type: ignore[arg-type]
    part = StepPart((GroupRows(3, np.int64(1), (row,)),))  # type: ignore[arg-type]
    assert decode_part(encode_part(part)) == part


def with_another_rank(gathered: list[StepPart], fails_at: int | None = None) -> dict[str, Any]:
    """Ports of a run whose gathering answers for a second rank that has one group of its own in every step."""
    theirs = StepPart((GroupRows(10_000, 0, (Row(10.0, {}, 2, False, False),)),), {"staleness/dropped": 3.0})

    async def gather(part: StepPart) -> list[StepPart]:
        if len(gathered) == fails_at:
            raise ConnectionError("the other rank is gone")
        gathered.append(part)
        return [part, theirs]

    return {"gather": gather}


@pytest.mark.parametrize("updates", [1, 2])
def test_one_gathering_for_each_committed_step(updates: int) -> None:
    gathered: list[StepPart] = []
    house = live(
        Plan(groups_per_step=2, max_steps=4, updates_per_batch=updates, reward=lambda g, m: 1.0),
        ports=with_another_rank(gathered),
    )
    assert house.error is None
    assert [[group.group_id for group in part.groups] for part in gathered] == house.trained()
    for report in house.reports:
        mine = sum(len(group.trajectories) for group in report.groups)
        assert report.metrics["reward/mean"] == pytest.approx((mine + 10) / (mine + 1))
        assert report.metrics["train/groups"] == 3 and report.metrics["staleness/dropped"] == 3
        assert len(report.groups) == 2  # its own: the others' trajectories do not travel


def test_a_gathering_that_fails_ends_the_run_with_its_step_in_the_books() -> None:
    """`live` checks the books: the step was applied, so its groups are trained."""
    gathered: list[StepPart] = []
    house = live(Plan(groups_per_step=2, max_steps=4), ports=with_another_rank(gathered, fails_at=1))
    assert isinstance(house.error, ConnectionError)
    assert house.trainer.version == house.books.turn == 2
    told, alone = house.reports
    assert told.metrics["train/groups"] == 3
    assert alone.metrics["train/groups"] == len(alone.groups) == 2  # what this rank knows of it
    assert alone.metrics["loss"] == alone.result.loss
