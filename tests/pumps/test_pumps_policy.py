"""When weights reach the engines, and how many groups are generated ahead: interval, prefetch, warm-up, partial batches."""

from __future__ import annotations

import pytest
from pumps_house import House, live
from pumps_plan import Plan

from asyncrl.config.resolve import resolve, slots, staleness_bound, turns_bound
from asyncrl.config.schema import Config


def ages(house: House) -> list[int]:
    """Of every trained microbatch the age of its oldest token, in order."""
    return [version - int(batch.versions.min()) for version, batch in house.tokens_trained]


def most_live(house: House) -> int:
    """Groups admitted and not yet trained, at the most."""
    live, most = 0, 0
    for event in house.events("admit", "commit", "dropped", "failed"):
        live += 1 if event.what == "admit" else -len(event.groups)
        most = max(most, live)
    return most


@pytest.mark.parametrize(("interval", "staleness"), [(2, 0), (3, 0), (3, 1), (5, 2)])
@pytest.mark.parametrize("steps", [6, 7, 8])
def test_weights_are_handed_over_by_elapsed_steps(interval: int, staleness: int, steps: int) -> None:
    """At k, 2k, ... and after the last step, which need not be a multiple of k."""
    plan = Plan(rollout={"weight_sync_interval": interval}, max_staleness=staleness, max_steps=steps)
    house = live(plan)
    assert house.error is None and len(house.reports) == steps
    taken = [event.version for event in house.events("weights taken")]
    assert taken == sorted({*range(interval, steps + 1, interval), steps})
    assert max(ages(house)) <= staleness + interval - 1 == staleness_bound(house.config)
    assert max(ages(house)) >= interval - 1, "the weights were never as old as the interval makes them"


def test_slots_come_back_when_the_engines_have_the_weights() -> None:
    plan = Plan(rollout={"weight_sync_interval": 3}, max_staleness=0, max_steps=6, publish_s=lambda version, sink: 2.0)
    house = live(plan)
    releases = house.events("release")
    assert [event.version for event in releases] == [2, 5]  # turns: one release for three steps
    assert slots(house.config) == 3 * plan.groups_per_step
    for event in releases:
        assert max(e.at for e in house.events("weights taken") if e.at <= event.at) <= event.at


def test_an_evaluation_sees_its_own_version_whatever_the_interval() -> None:
    plan = Plan(rollout={"weight_sync_interval": 4}, max_steps=7, held_out=1, evaluate_every=3)
    house = live(plan)
    assert house.error is None
    assert [event.version for event in house.events("evaluated")] == [0, 3, 6, 7]
    sampled = [event.version for event in house.events("rollout starts") if event.groups == (-1,)]
    assert sampled == [0, 3, 6, 7]
    assert {event.version for event in house.events("weights taken")} == {3, 6, 7}  # 3 steps after an early hand-over


def test_an_early_hand_over_starts_the_count_anew() -> None:
    """Elapsed steps, not a modulo: evaluations at 3 and 6 with interval 2 give 2, 3, 5, 6, 8."""
    plan = Plan(rollout={"weight_sync_interval": 2}, max_steps=8, held_out=1, evaluate_every=3)
    house = live(plan)
    assert sorted({event.version for event in house.events("weights taken")}) == [2, 3, 5, 6, 8]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_depth_is_the_age_and_the_slots(depth: int) -> None:
    """Generation is much faster than training, so everything that may be generated ahead is."""
    plan = Plan(rollout={"max_staleness": depth}, max_steps=8, train_token_s=1.0, rollout_s=lambda group, member: 0.1)
    house = live(plan)
    assert house.config.rollout.max_staleness == turns_bound(house.config) == depth
    assert slots(house.config) == (depth + 1) * plan.groups_per_step
    assert max(ages(house)) == depth
    assert most_live(house) == slots(house.config)


def test_prefetch_with_an_interval_adds_up() -> None:
    """SEMANTICS 5.2: at most `depth` produce rounds, plus the lag of the hand-over."""
    plan = Plan(
        rollout={"max_staleness": 2, "weight_sync_interval": 3},
        max_steps=20,
        train_token_s=1.0,
        rollout_s=lambda group, member: 0.1,
    )
    house = live(plan)
    assert staleness_bound(house.config) == 4
    assert max(ages(house)) == 4


@pytest.mark.parametrize("warmup", [1, 3, 50])
@pytest.mark.parametrize("interval", [1, 3])
def test_nothing_is_generated_ahead_during_the_warm_up(warmup: int, interval: int) -> None:
    plan = Plan(
        rollout={"sync_warmup_steps": warmup, "weight_sync_interval": interval},
        max_steps=10,
        train_token_s=1.0,
        rollout_s=lambda group, member: 0.1,
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 10
    young = [age for age, (version, _) in zip(ages(house), house.tokens_trained, strict=True) if version < warmup]
    assert len(young) > 0 and set(young) == {0}
    if warmup < 10:
        assert max(ages(house)) == 2 + interval - 1, "the warm-up never ended"


def test_a_warm_up_group_that_fails_is_replaced() -> None:
    broken = ValueError("the environment broke")
    plan = Plan(
        rollout={"sync_warmup_steps": 3},
        max_steps=4,
        max_failed_groups=9,
        fails=lambda group, member: broken if group in (0, 3, 4) else None,
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 4 and house.books.failed == 3


def test_groups_wait_for_each_other_before_they_are_trained() -> None:
    """One group arrives every second; with 2 of 5 the chunks are 2, 2 and the rest."""
    plan = Plan(
        rollout={"streaming_min_groups": 2},
        groups_per_step=5,
        prompts=5,
        tokens_per_microbatch=1000,
        rollout_s=lambda group, member: 1.0 + group,
    )
    house = live(plan)
    assert [event.groups for event in house.events("microbatch")] == [(0, 1), (2, 3), (4,)]
    assert [event.at for event in house.events("microbatch")] == pytest.approx([2.0, 4.0, 5.0], abs=0.1)
    assert house.trained() == [[0, 1, 2, 3, 4]]


def test_resolving_twice_changes_nothing() -> None:
    given = Config.model_validate(
        {
            "engine": {"kind": "dry_run"},
            "train": {"kind": "dry_run"},
            "rollout": {"max_staleness": 3, "weight_sync_interval": 2},
        }
    )
    once = resolve(given, embedding=True)
    assert resolve(once, embedding=True) == once and once.rollout.max_staleness == 3
