"""Replayed groups take the place of groups without a signal: in N, in the gradient's batch, in the metrics, in the books."""

from __future__ import annotations

import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import TOKENS, Plan

STEPS = 8


def every_third(group: int, member: int) -> float:
    """Groups 0, 3, 6, ... teach something, and the later the more; the others nothing."""
    return float(member * (1 + group)) if group % 3 == 0 else 1.0


def plan(**rest: object) -> Plan:
    settings: dict[str, object] = {
        "groups_per_step": 3,
        "max_steps": STEPS,
        "reward": every_third,
        "replay": {"size": 4, "max_age": 5},
        "preset": "sync",
        "tokens_per_microbatch": 1000,
    }
    return Plan(**(settings | rest))  # type: ignore[arg-type]


def trained(house: House) -> list[set[int]]:
    """Group ids in the microbatches, by step."""
    steps: list[set[int]] = [set() for _ in house.reports]
    for version, batch in house.tokens_trained:
        steps[version].update(batch.group_ids.tolist())
    return steps


def test_groups_without_a_signal_give_their_place_to_stored_ones() -> None:
    house = live(plan())
    assert house.error is None and house.books.trained == 3 * STEPS
    steps = trained(house)
    assert steps[0] == {0, 1, 2}  # nothing is stored yet
    assert steps[1] == {3, 5, 0} or steps[1] == {3, 4, 0}  # one is stored: one place is taken over
    for number, step in enumerate(steps[3:], 3):
        assert len(step) == 3 and all(group % 3 == 0 for group in step) and 3 * number in step
    assert [report.metrics["replay/groups"] for report in house.reports] == [0, 1, *[2] * (STEPS - 2)]


def test_what_is_replayed_keeps_log_probs_and_versions_and_stays_inside_its_own_bound() -> None:
    house = live(plan(replay={"size": 8, "max_age": 3}))
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
    house = live(plan())
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


def test_without_a_buffer_nothing_changes() -> None:
    house = live(plan(replay={}))
    assert trained(house)[-1] == {21, 22, 23} and "replay/groups" not in house.reports[-1].metrics


@pytest.mark.parametrize("rest", [{"preset": "async"}, {"updates_per_batch": 2, "preset": "async"}])
def test_streaming_and_batches_that_are_used_twice(rest: dict[str, object]) -> None:
    oldest = 9  # versions; a batch that is used twice is two
    house = live(plan(**rest, replay={"size": 4, "max_age": oldest}))
    assert house.error is None and house.books.trained == 3 * STEPS
    assert sum(report.metrics["replay/groups"] for report in house.reports) >= STEPS // 2
    for version, batch in house.tokens_trained:
        assert version - int(batch.versions.min()) <= oldest


def test_an_aborted_step_stores_nothing_and_trains_the_same_again() -> None:
    house = live(plan(trainer_fails={("finish", 3): RuntimeError("the device is gone")}))
    assert isinstance(house.error, RuntimeError) and len(house.reports) == 2
    assert house.ports.replay is not None and len(house.ports.replay) == 2
