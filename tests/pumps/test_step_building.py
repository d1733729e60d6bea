"""From claimed rows to microbatches: advantages, on any number of ranks, log-probs ahead, replay, and minibatches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pumps_rank
import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st
from ports import reserved_port
from pumps_house import House, live
from pumps_plan import TOKENS, Plan, make_prompt, make_trajectory

import asyncrl
from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.registry import ADVANTAGES, build_advantage
from asyncrl.config.load import load_config
from asyncrl.data.packing import pack_groups
from asyncrl.data.store import REFERENCE, Rows
from asyncrl.errors import DataError
from asyncrl.pumps.building import (
    RewardReader,
    advantages_of_rank,
    logprob_columns,
    mask_earlier_turns,
    mask_overlong,
    minibatches_of_rank,
)
from asyncrl.pumps.metrics import merge_results
from asyncrl.types import FinishReason, Float32Array, Group, Microbatch, StepResult, Ticket, Trajectory

# -- advantages ------------------------------------------------------------------------------------------------------


def group_of(*trajectories: Trajectory, group_id: int = 0) -> Group:
    members = [replace(t, member=m, group_size=len(trajectories)) for m, t in enumerate(trajectories)]
    return Group(Ticket(group_id, 0, 2), make_prompt(group_id), tuple(members))


def scored(reward: float | None, tokens: int = 2, **rest: object) -> Trajectory:
    return replace(make_trajectory(0, 0, 1, [0] * tokens, reward=reward), **rest)  # type: ignore[arg-type]


def test_rewards_times_lengths_before_the_group_is_compared() -> None:
    group = group_of(scored(1.0, 3, components={"a": 2.0}), scored(2.0, 5), scored(None, 4))
    found = RewardReader(build_advantage("dr_grpo"), {"a": 0.5}, True).group_rewards(group)
    assert found.rewards == [3.0, 10.0, None] and found.components == {"a": [6.0, None, None]}
    assert found.lengths == [3, 5, 4] and found.weights == {"a": 0.5}
    advantages = RewardReader(build_advantage("dr_grpo"), {}, True).advantages([group])
    assert advantages[0].tolist() == [-3.5, 3.5, 0.0]


def test_set_advantage_to_zero_comes_after_the_comparison() -> None:
    silent = scored(4.0, metadata={"set_advantage_to_zero": True})
    advantages = RewardReader(build_advantage("dr_grpo"), {}, False).advantages(
        [group_of(scored(1.0), silent, scored(4.0))]
    )
    assert advantages[0].tolist() == [-2.0, 0.0, 1.0]  # the mean is of all three


@pytest.mark.parametrize("name", ["grpo_batch", "gdpo", "reinforce_pp"])
def test_a_statistic_of_the_step_sees_every_group_of_it_once(name: str) -> None:
    plan = Plan(
        preset="one_off", advantage_name=name, groups_per_step=3, group_size=2, prompts=6, reward=lambda g, m: g + m * m
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 2
    for report in house.reports:
        expected = RewardReader(build_advantage(name), {}, False).advantages(report.groups)
        assert {g: a.tolist() for g, a in report.advantages.items()} == {g: a.tolist() for g, a in expected.items()}


@pytest.mark.parametrize("preset", ["sync", "async"])
@pytest.mark.parametrize("updates", [1, 2])
def test_groups_without_advantages_are_counted_and_not_run(preset: str, updates: int) -> None:
    """Odd groups teach nothing. N is the same as if they had run; the tokens of the microbatches are not."""
    plan = Plan(
        preset=preset,
        prompts=6,
        groups_per_step=3,
        updates_per_batch=updates,
        train_config={"skip_zero_advantage": True},
        reward=lambda group, member: float(member * (group % 2 == 0)),
    )
    house = live(plan)
    assert house.error is None and house.books.trained == 6
    run = {group for _, batch in house.tokens_trained for group in batch.group_ids.tolist()}
    assert run == {0, 2, 4}
    for report in house.reports:
        assert report.result.sequences == 6 and report.result.tokens == 6 * TOKENS


def test_a_step_of_which_no_group_is_run() -> None:
    house = live(Plan(prompts=2, train_config={"skip_zero_advantage": True}, reward=lambda group, member: 1.0))
    assert house.error is None and house.books.trained == 2 and house.trainer.version == 1
    assert house.reports[0].result.sequences == 4


# -- advantages on several ranks -------------------------------------------------------------------------------------


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
            values = advantages_of_rank(build_advantage(name), parts, rank)
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


# -- log-probs of the reference, once --------------------------------------------------------------------------------


def with_reference(**rest: Any) -> Plan:
    settings: dict[str, Any] = {
        "algorithm": {"kl": {"coef": 0.1}},
        "preset": "sync",
        "groups_per_step": 1,
        "prompts": 2,
        "reward_s": lambda group, member: 5.0,
        "rollout_s": lambda group, member: 1.0,
    }
    return Plan(**(settings | rest))


@pytest.mark.parametrize("score_groups", [False, True])
def test_the_reference_is_computed_in_the_step(score_groups: bool) -> None:
    house = live(with_reference(score_groups=score_groups))
    assert house.error is None and len(house.reports) == 2
    calls = house.events("logprobs")
    assert [call.groups for call in calls] == [(0,), (1,)]
    for call, begin in zip(calls, house.events("begin"), strict=True):
        assert call.at == pytest.approx(begin.at, abs=0.05)
    assert all(batch.reference_logprobs is not None for _, batch in house.tokens_trained)
    assert live(with_reference(algorithm={})).events("logprobs") == []  # where nothing needs it


class Hashing:
    """A reference whose log-prob of a token is a function of its sequence and of the token alone."""

    def __init__(self) -> None:
        self.calls = 0

    async def compute_logprobs(self, batch: Microbatch, model: str = "policy") -> Float32Array:
        assert model == "reference"
        self.calls += 1
        place = np.arange(batch.scored) - np.searchsorted(batch.sequence, batch.sequence)
        row = batch.group_ids[batch.sequence] * 100 + batch.members[batch.sequence]
        return (row + place / 64 + batch.target / 4096).astype(np.float32)


async def test_whatever_the_packing_every_token_gets_its_own() -> None:
    trainer: Any = Hashing()
    groups = []
    for group_id in range(3):
        members = [make_trajectory(group_id, m, 3, [0] * (1 + (group_id + m) % 3), reward=0.0) for m in range(3)]
        if group_id == 1:
            members[2] = replace(members[2], mask=np.zeros_like(members[2].mask))
        groups.append(Group(Ticket(group_id, 0, 2), make_prompt(group_id), tuple(members)))
    columns = [{REFERENCE: column} for column in await logprob_columns(trainer, groups, 8, "reference")]
    assert trainer.calls > 1
    weighed = [(group, np.zeros(3)) for group in groups]
    for budget in (4, 9, 1000):
        for batch in pack_groups(weighed[::-1], budget, columns[::-1]):
            if batch.scored:
                assert batch.reference_logprobs is not None and batch.old_logprobs is None
                expected = await trainer.compute_logprobs(batch, "reference")
                np.testing.assert_array_equal(batch.reference_logprobs, expected)
    [batch] = pack_groups(weighed, 1000, [columns[0], {}, columns[2]])
    assert batch.reference_logprobs is None, "a column that a group lacks is no column of the microbatch"


def test_a_completion_that_is_masked_as_a_whole_has_no_log_probs_of_its_last_reply() -> None:
    members = []
    for member, reason in enumerate((FinishReason.STOP, FinishReason.LENGTH)):
        one = make_trajectory(0, member, 2, [0] * 4, reward=0.0)
        begins = np.array([one.prompt_length, one.prompt_length + 3], np.int32)
        members.append(replace(one, finish_reason=reason, turns=begins))
    config = load_config([], ["algorithm.credit=last_turn", "algorithm.mask.truncated=true"])
    ports: Any = SimpleNamespace(config=config)
    column = [np.arange(4, dtype=np.float32) for _ in members]
    rows = [Rows(Group(Ticket(0, 0, 2), make_prompt(0), tuple(members)), {REFERENCE: column}, claimed=True)]
    [masked] = mask_earlier_turns(ports, mask_overlong(ports, rows))
    assert [each.tolist() for each in masked.columns[REFERENCE]] == [[3.0], []]
    assert [int(each.mask.sum()) for each in masked.group.trajectories] == [1, 0]


# -- replay ----------------------------------------------------------------------------------------------------------


STEPS = 8


def every_third(group: int, member: int) -> float:
    """Groups 0, 3, 6, ... teach something, and the later the more; the others nothing."""
    return float(member * (1 + group)) if group % 3 == 0 else 1.0


def with_replay(**rest: object) -> Plan:
    settings: dict[str, object] = {
        "groups_per_step": 3,
        "max_steps": STEPS,
        "reward": every_third,
        "replay": {"size": 4, "max_age": 5},
        "preset": "sync",
        "tokens_per_microbatch": 1000,
    }
    return Plan(**(settings | rest))  # type: ignore[arg-type]


def trained_by_step(house: House) -> list[set[int]]:
    """Group ids in the microbatches, by step."""
    steps: list[set[int]] = [set() for _ in house.reports]
    for version, batch in house.tokens_trained:
        steps[version].update(batch.group_ids.tolist())
    return steps


def test_groups_without_a_signal_give_their_place_to_stored_ones() -> None:
    house = live(with_replay())
    assert house.error is None and house.books.trained == 3 * STEPS
    steps = trained_by_step(house)
    assert steps[0] == {0, 1, 2}  # nothing is stored yet
    assert steps[1] == {3, 5, 0} or steps[1] == {3, 4, 0}  # one is stored: one place is taken over
    for number, step in enumerate(steps[3:], 3):
        assert len(step) == 3 and all(group % 3 == 0 for group in step) and 3 * number in step
    assert [report.metrics["replay/groups"] for report in house.reports] == [0, 1, *[2] * (STEPS - 2)]


def test_what_is_replayed_keeps_log_probs_and_versions_and_stays_inside_its_own_bound() -> None:
    house = live(with_replay(replay={"size": 8, "max_age": 3}))
    oldest = 0
    for version, batch in house.tokens_trained:
        assert (batch.sampler_logprobs == -1.0).all()
        for sequence, group in enumerate(batch.group_ids.tolist()):
            ages = version - batch.versions[batch.sequence == sequence]
            assert set(ages.tolist()) == {version - group // 3}  # group g was sampled by version g // 3
            oldest = max(oldest, int(ages.max()))
    assert oldest == 3
    assert house.reports[-1].metrics["replay/evicted"] > 0


def test_a_replayed_group_counts_under_its_own_name() -> None:
    house = live(with_replay())
    last = house.reports[-1]
    assert last.metrics["replay/groups"] == 2 and last.metrics["train/groups"] == 1
    assert last.metrics["replay/tokens"] == 2 * 2 * TOKENS and last.result.sequences == 6
    assert last.metrics["replay/age_max"] >= last.metrics["replay/age_mean"] >= 1
    assert last.metrics["staleness/max"] == 0  # of the step's own groups
    assert last.metrics["replay/size"] == 4
    own = [group.group_id for group in last.groups]
    assert own == [21, 22, 23]  # what the rollouts show
    fresh = [t.reward for group in last.groups for t in group.trajectories]
    assert last.metrics["reward/mean"] == pytest.approx(np.mean(fresh))
    house = live(with_replay(replay={}))  # without a buffer nothing changes
    assert trained_by_step(house)[-1] == {21, 22, 23} and "replay/groups" not in house.reports[-1].metrics


@pytest.mark.parametrize("rest", [{"preset": "async"}, {"updates_per_batch": 2, "preset": "async"}])
def test_streaming_and_batches_that_are_used_twice(rest: dict[str, object]) -> None:
    oldest = 9  # versions; a batch that is used twice is two
    house = live(with_replay(**rest, replay={"size": 4, "max_age": oldest}))
    assert house.error is None and house.books.trained == 3 * STEPS
    assert sum(report.metrics["replay/groups"] for report in house.reports) >= STEPS // 2
    for version, batch in house.tokens_trained:
        assert version - int(batch.versions.min()) <= oldest


def test_an_aborted_step_stores_nothing_and_trains_the_same_again() -> None:
    house = live(with_replay(trainer_fails={("finish", 3): RuntimeError("the device is gone")}))
    assert isinstance(house.error, RuntimeError) and len(house.reports) == 2
    assert house.ports.replay is not None and len(house.ports.replay) == 2


def test_a_replayed_group_that_a_step_fails_on_leaves_the_buffer_and_the_group_that_it_replaced_is_dropped() -> None:
    error = DataError("the loss is nan")
    error.groups = (0,)  # the only group in the buffer
    house = live(with_replay(trainer_fails={("microbatch", 2): error}))
    assert house.error is None and house.books.trained == 3 * STEPS and house.books.dropped == 1
    [reason] = house.book.reasons
    assert " (replaced by group 0 of the replay buffer) failed in the step (DataError: the loss is nan)" in reason
    assert [0 in step for step in trained_by_step(house)] == [True] + [False] * (STEPS - 1)


# -- several optimizer steps over disjoint parts of a batch ----------------------------------------------------------


def groups_by_version(house: House) -> dict[int, set[int]]:
    """Group ids that were trained at each version."""
    found: dict[int, set[int]] = {}
    for version, batch in house.tokens_trained:
        found.setdefault(version, set()).update(batch.group_ids.tolist())
    return found


@pytest.mark.parametrize("minibatches", [1, 2])
def test_each_part_takes_one_optimizer_step_in_every_pass(minibatches: int) -> None:
    plan = Plan(
        preset="one_off", groups_per_step=5, prompts=10, updates_per_batch=2, minibatches=minibatches,
        tokens_per_microbatch=12,
    )  # fmt: skip
    house = live(plan)
    versions = [2 * minibatches, 4 * minibatches]
    assert house.error is None and [report.version for report in house.reports] == versions
    cuts = [0, 5] if minibatches == 1 else [0, 3, 5]
    parts = [{*sorted(step)[a:b]} for step in house.trained() for a, b in 2 * list(pairwise(cuts))]
    assert groups_by_version(house) == dict(enumerate(parts))
    assert [event.version for event in house.events("weights taken")] == versions
    assert all(len(house.events(what)) == 2 for what in ("commit", "release", "clear"))
    first = house.names("logprobs", "begin", "microbatch", "finish", "commit")
    first = first[: first.index("commit")]
    begin, runs = first.index("begin"), [name for name in first if name != "microbatch"]
    # Old log-probs of all parts, before the first moves a weight; every pass runs the same microbatches.
    assert first[:begin] == ["logprobs"] * 5 and first.count("microbatch") == 2 * 5
    assert runs[begin:] == ["begin", "finish"] * 2 * minibatches
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
    alone = dict(zip(ids, minibatches_of_rank([ids], 0, count), strict=True))
    sizes = [list(alone.values()).count(part) for part in range(count)]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert all(alone[a] <= alone[b] for a, b in pairwise(sorted(ids)))
    ranks: list[list[int]] = [[], [], [], []]
    for place, group_id in enumerate(ids):
        ranks[(seed >> place) % 3].append(group_id)  # nothing lies on the last one
    found: dict[int, int] = {}
    for rank, mine in enumerate(ranks):
        found |= dict(zip(mine, minibatches_of_rank(ranks, rank, count), strict=True))
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
    found = merge_results(parts)
    assert (found.version, found.tokens, found.sequences, found.microbatches) == (2, 12, 6, 2)
    assert (found.loss, found.grad_norm, found.lr) == (pytest.approx(0.15), 3.0, 0.25)
    assert found.metrics == {
        "entropy": 1.5, "mismatch/ratio_max": 3.0, "ratio_min": 0.5, "mismatch/current_tokens": 4.0, "optim/lr": 0.25
    }  # fmt: skip
    one: Sequence[StepResult] = parts[:1]
    assert merge_results(one) is parts[0]
