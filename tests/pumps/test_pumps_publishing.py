"""When new weights count as published, and what may happen around an evaluation."""

from __future__ import annotations

import pytest
from pumps_house import live
from pumps_plan import TOKENS, Plan


def test_slots_of_a_step_come_back_together_when_the_slowest_engine_has_the_weights() -> None:
    plan = Plan(
        groups_per_step=3, max_staleness=0, prompts=6, sinks=3, publish_s=lambda version, sink: [0.0, 2.0, 7.0][sink]
    )

    house = live(plan)

    commit, release = house.events("commit")[0].at, house.events("release")[0].at
    assert release == pytest.approx(commit + 7.0)
    admitted = [event.at for event in house.events("admit")]
    assert admitted[3:] == [pytest.approx(release)] * 3


def test_a_slow_publish_hides_behind_training_but_the_next_finish_waits_for_it() -> None:
    plan = Plan(groups_per_step=2, max_staleness=2, prompts=12, publish_s=lambda version, sink: 5.0)

    house = live(plan)

    finishes, releases = house.events("finish"), house.events("release")
    assert all(finish.at >= release.at for finish, release in zip(finishes[1:], releases, strict=False))
    overlapped = [e for e in house.events("microbatch") if finishes[0].at < e.at < releases[0].at]
    assert overlapped, "microbatches of the next step are trained while the weights are on their way"


def test_evaluation_sees_exactly_its_version_and_the_weights_stand_still() -> None:
    """Evaluations are 20 times as long as a step. Every one reads the version it is booked under, to its last token."""
    plan = Plan(groups_per_step=2, max_steps=5, held_out=3, evaluate_every=2, evaluation_s=20.0)

    house = live(plan)

    assert sorted(house.evaluations) == [0, 2, 4, 5]  # before the first, every second, after the last
    finished = {event.version: event.at for event in house.events("finished")}
    for event in house.events("evaluated"):
        later = finished.get(event.version + 1)
        assert later is None or later >= event.at, "an optimizer step during an evaluation"
    starts = [event for event in house.events("rollout starts") if event.groups[0] < 0]
    assert {event.version for event in starts} == {0, 2, 4, 5} and len(starts) == 4 * 3
    assert house.books.admitted == 10, "evaluation takes no slots"


def test_evaluation_metrics_know_avg_and_pass() -> None:
    plan = Plan(max_steps=1, held_out=4, evaluate_every=1, reward=lambda group, member: 1.0 if group == -1 else 0.0)

    house = live(plan)

    name = "eval/single_turn"
    assert house.evaluations[0][f"{name}/avg@1"] == house.evaluations[1][f"{name}/avg@1"] == 0.25
    assert house.evaluations[0][f"{name}/pass@1"] == 0.25
    assert house.evaluations[0][f"{name}/completions/mean_length"] == TOKENS


@pytest.mark.parametrize("whole", [True, False])
def test_an_evaluation_scores_as_the_training_does(whole: bool) -> None:
    """A reward that compares the members of a group gets all of them."""
    plan = Plan(score_groups=whole, group_size=2, max_steps=1, held_out=2, evaluate_every=1, evaluate={"samples": 3})

    house = live(plan)

    calls = [call for call in house.reward_calls if call[0][0] < 0]
    rows = [tuple((group, member) for member in range(3)) for group in (-1, -2)]
    assert sorted(calls) == sorted((rows if whole else [(each,) for row in rows for each in row]) * 2)
    # Member m of group g is rewarded with (g + m) % 3.
    assert house.evaluations[0]["eval/single_turn/avg@3"] == 1.0


@pytest.mark.parametrize(("by", "passed"), [("reward", 2 / 3), ("scripted", 1 / 3)])
def test_pass_looks_at_the_component_that_is_named(by: str, passed: float) -> None:
    """Rewards of the rows: 2, 1, 0, none; the component is half of that, and what a function logged is a metric."""

    def value(group: int, member: int) -> float | None:
        return [2.0, 1.0, 0.0, None][-1 - group] if group < 0 else 1.0

    evaluate = {"pass_by": by, "pass_reward": 1.0}
    plan = Plan(max_steps=1, held_out=4, evaluate_every=1, evaluate=evaluate, reward=value, component=lambda r: r / 2)

    measured = live(plan).evaluations[0]

    name = "eval/single_turn"
    # Of the three rows with a reward: two have a sum of at least 1, one a component.
    assert measured[f"{name}/pass@1"] == pytest.approx(passed)
    assert measured[f"{name}/avg@1"] == 1.0 and measured[f"{name}/scripted/mean"] == 0.5
    assert measured[f"{name}/scripted/right/mean"] == pytest.approx(2 / 3)


def test_names_of_metrics_hold_no_path() -> None:
    plan = Plan(max_steps=1, held_out=1, evaluate_every=1, rollout={"environment": "/home/me/games.py:Chess"})
    assert all(name.startswith("eval/Chess/") for name in live(plan).evaluations[0])


def test_pass_by_a_component_that_nobody_gives_ends_the_run() -> None:
    house = live(Plan(max_steps=1, held_out=1, evaluate_every=1, evaluate={"pass_by": "gone"}))
    assert "evaluate.pass_by is 'gone'; the held-out completions have: reward, scripted" in str(house.error)


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_several_ranks_no_step_is_surveyed_before_the_publish_of_the_last_one_is_through(ranks: int) -> None:
    """Both may be collectives: in whatever order they came on each rank, so they would cross."""

    plan = Plan(
        preset="one_off", max_steps=4, algorithm={"top_entropy": {"quantile": 0.5}}, publish_s=lambda version, sink: 9.0
    )
    house = live(plan, ports={"ranks": ranks})
    assert house.error is None and house.books.turn == 4
    order = house.names("survey", "weights taken")
    after_each_other = ["survey", "weights taken"] * 4
    assert order == after_each_other if ranks == 2 else order != after_each_other  # alone, a publish holds nothing up
