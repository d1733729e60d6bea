"""Invariants of the flow over random schedules in virtual time: heavy tails, failures, slow rewards and publishes.

A schedule is a function of its seed. A failure prints the seed: `live(schedule(seed))` plays it again.
`live` itself checks what must hold always: slots add up after every transition, the books agree at every quiescent point
of the loop, every admitted group ends exactly once, no step stays open, and a run that can never end raises.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pumps_house import House, live
from pumps_plan import Plan

from asyncrl.config.resolve import staleness_bound

# The other schedules are played nightly.
BATCHES = [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, 24))]
SCHEDULES_PER_BATCH = 100
CANCELLATIONS = 200
MAX_REPLAY_AGE = 3


def heavy_tail(rng: random.Random, spread: float) -> float:
    """Seconds: log-normal, and one in twenty is far out."""
    return rng.lognormvariate(0.0, spread) * (rng.choice([10.0, 40.0]) if rng.random() < 0.05 else 1.0)


def keyed(seed: int, name: str, group: int, member: int) -> random.Random:
    return random.Random(f"{seed}/{name}/{group}/{member}")


def cheap_advantage(rewards: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.array([float(reward != rewards[0]) for reward in rewards])


def policy(seed: int, groups_per_step: int, sync: bool) -> dict[str, Any]:
    """What is admitted, dropped, replaced and skipped, of its own random numbers."""
    rng = random.Random(f"{seed}/policy")
    rollout: dict[str, object] = {}
    if rng.random() < 0.5:
        rollout["sync_warmup_steps"] = rng.choice([0, 1, 3])
        rollout["streaming_min_groups"] = rng.randint(1, groups_per_step)
        if not sync:
            rollout["weight_sync_interval"] = rng.randint(1, 4)
    silent = rng.choice([0.0, 0.0, 0.3, 0.7])  # share of groups whose rewards are all equal
    if silent:
        rollout |= {"filter": {"dynamic_sampling": True, "max_refills": rng.choice([0, 1, 2])}}

    def reward(group: int, member: int) -> float:
        without = keyed(seed, "silent", group, 0).random() < silent
        return 1.0 if without else float((group + member) % 3)

    skips = rng.random() < 0.3
    return {
        "rollout": rollout,
        "reward": reward,
        "score_groups": rng.random() < 0.5,
        "replay": {"size": rng.randint(1, 4), "max_age": MAX_REPLAY_AGE} if rng.random() < 0.3 else {},
        "train_config": {"skip_zero_advantage": skips},
        "algorithm": {"kl": {"coef": 0.1 if rng.random() < 0.3 and not skips else 0.0}},
    }


def schedule(seed: int) -> Plan:
    rng = random.Random(seed)
    preset = rng.choice(["sync", "one_off", "async", "async"])
    groups_per_step = rng.randint(1, 3)
    max_staleness = rng.randint(0, 3) if preset != "sync" else None
    steps = rng.randint(2, 5)
    max_steps = steps if rng.random() < 0.5 else None
    prompts = None if max_steps and rng.random() < 0.5 else rng.randint(1, steps * groups_per_step)
    spread, slow_reward, slow_publish = rng.uniform(0, 1.5), rng.random() < 0.3, rng.random() < 0.5
    held_out = 1 if rng.random() < 0.15 else 0
    failing = rng.choice([0.0, 0.0, 0.1, 0.4])

    def fails(group: int, member: int) -> BaseException | None:
        broken = group >= 0 and keyed(seed, "fails", group, member).random() < failing
        return ValueError("the environment broke") if broken else None

    return Plan(
        **policy(seed, groups_per_step, preset == "sync"),
        preset=preset,
        groups_per_step=groups_per_step,
        group_size=rng.randint(1, 3),
        max_staleness=max_staleness,
        streaming=rng.choice([None, True, False]) if preset != "sync" else None,
        late=rng.choice(["wait", "wait", "drop"]),
        prompts=prompts,
        max_steps=max_steps,
        time_limit_s=rng.uniform(1, 20) if rng.random() < 0.1 else None,
        partial_final_step=rng.random() < 0.8,
        max_failed_groups=10_000,
        updates_per_batch=rng.choice([1, 1, 1, 2, 3]),
        minibatches=min(rng.choice([1, 1, 1, 2, 3]), groups_per_step),
        held_out=held_out,
        evaluate_every=rng.randint(1, 3) if held_out else None,
        workers=rng.randint(1, 3),
        tokens_per_microbatch=rng.choice([6, 12, 64]),
        rollout_s=lambda group, member: heavy_tail(keyed(seed, "rollout", group, member), spread),
        reward_s=lambda group, member: heavy_tail(keyed(seed, "reward", group, member), 0.5) if slow_reward else 0.0,
        fails=fails,
        publish_s=lambda version, sink: heavy_tail(keyed(seed, "publish", version, sink), 1.0) if slow_publish else 0.0,
        sinks=rng.randint(1, 2),
        train_token_s=rng.choice([0.0, 0.001, 0.05]),
        advantage=cheap_advantage,
    )


@contextmanager
def seed_on_failure(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def oldest_ages(house: House) -> list[int]:
    """Of every microbatch, the age of its oldest token when it was trained, in versions."""
    return [version - int(batch.versions.min()) for version, batch in house.tokens_trained if batch.scored]


def check_ages(house: House) -> int:
    """No trained token is older than the bound, none comes from the future, and the metric says the same. The oldest age."""
    bound = staleness_bound(house.config)
    for version, batch in house.tokens_trained:
        if not batch.scored:  # it only brings the counts of groups that are not run
            continue
        assert version - batch.versions.max() >= 0, "trained on a token of a version that does not exist yet"
        limit = max(bound, MAX_REPLAY_AGE) if house.plan.replay else bound
        assert version - batch.versions.min() <= limit, "trained on a token that is too old"
    # Replayed groups are not among these. The last step may have been cut off between its updates.
    for before, report in zip([0, *(report.version for report in house.reports)], house.reports, strict=False):
        oldest = min(int(t.oldest_version) for group in report.groups for t in group.trajectories)
        assert report.metrics["staleness/max"] == before - oldest
    return max(oldest_ages(house), default=0)


def check_steps(house: House) -> None:
    """Versions go up by one, groups are trained once, and only the last step of a run may be smaller."""
    plan = house.plan
    versions = [event.version for event in house.events("finished")]
    assert versions == list(range(1, plan.versions * len(house.reports) + 1))
    assert [report.version for report in house.reports] == versions[plan.versions - 1 :: plan.versions]
    trained = [group for step in house.trained() for group in step]
    assert len(trained) == len(set(trained)) == house.books.trained
    for step in house.trained()[:-1]:
        assert len(step) == plan.groups_per_step
    if house.reports and not plan.partial_final_step:
        assert len(house.trained()[-1]) == plan.groups_per_step
    cleared = [event.groups for event in house.events("clear")]
    assert [sorted(groups) for groups in cleared] == [sorted(step) for step in house.trained()]
    if plan.max_steps is not None:
        assert len(house.reports) <= plan.max_steps
        if plan.prompts is None and plan.time_limit_s is None:
            assert len(house.reports) == plan.max_steps


def check_nobody_dropped(house: House) -> None:
    """With `late: wait` a group is dropped only because the run ended before it: never for being slow."""
    allowed = {"dropped: the run ended first", "dropped: closed"}
    if house.config.rollout.filter.dynamic_sampling:
        allowed.add("dropped: no signal")
    reasons = {reason for reason in house.book.reasons if reason.startswith("dropped")}
    assert house.plan.late == "drop" or reasons <= allowed, reasons
    plan = house.plan
    endless = plan.max_steps is None and plan.time_limit_s is None
    if plan.late == "wait" and endless and plan.partial_final_step and plan.minibatches == 1:
        refused = house.book.reasons["dropped: no signal"]
        assert house.books.trained + house.books.failed + refused == plan.prompts, "a prompt vanished"


def check_refills(house: House) -> None:
    """Where groups without a signal are replaced, one is trained only because its step had dropped as many as it may."""
    rollout = house.config.rollout
    if not rollout.filter.dynamic_sampling:
        return
    kept = sum(not values.any() for report in house.reports for values in report.advantages.values())
    assert kept <= house.counted["filter/kept"]
    turns = -(-house.trainer.version // house.plan.versions) + 1
    assert house.book.reasons["dropped: no signal"] <= rollout.filter.max_refills * rollout.groups_per_step * turns


def check_syncs(house: House) -> None:
    """Engines hear of new weights by elapsed steps: never later than asked for, the last ones always."""
    rollout, updates = house.config.rollout, house.plan.versions
    taken = sorted({event.version for event in house.events("weights taken")})
    assert not house.reports or taken[-1] == updates * len(house.reports), "the engines never got the last weights"
    for before, after in zip([0, *taken], taken, strict=False):
        elapsed = (after - before) // updates
        assert elapsed <= (1 if before // updates < rollout.sync_warmup_steps else rollout.weight_sync_interval)
    for version, batch in house.tokens_trained:
        if version // updates < rollout.sync_warmup_steps and batch.scored and not house.plan.replay:
            assert version // updates * updates <= batch.versions.min(), "generated ahead during the warm-up"


@pytest.mark.parametrize("batch", BATCHES)
def test_invariants_hold_in_every_schedule(batch: int) -> None:
    reached = 0
    for seed in range(batch * SCHEDULES_PER_BATCH, (batch + 1) * SCHEDULES_PER_BATCH):
        with seed_on_failure(seed):
            house = live(schedule(seed))
            assert house.error is None, house.error
            oldest = check_ages(house)
            check_steps(house)
            check_syncs(house)
            check_refills(house)
            check_nobody_dropped(house)
            reached += oldest == staleness_bound(house.config) > 0
    assert reached > 0, "the age bound was never reached: these schedules do not test it"


def test_cancelled_anywhere_the_books_of_any_schedule_add_up() -> None:
    """`live` checks the books. What was trained by then obeys the same rules."""
    cut_short = 0
    for seed in range(CANCELLATIONS):
        with seed_on_failure(seed):
            tick = random.Random(f"{seed}/cancel").randint(1, 150)
            house = live(schedule(seed), cancel_at_tick=tick, native_cancel=bool(seed % 2))
            assert house.error is None or isinstance(house.error, asyncio.CancelledError), house.error
            check_ages(house)
            cut_short += house.error is not None
    assert cut_short > CANCELLATIONS // 2
