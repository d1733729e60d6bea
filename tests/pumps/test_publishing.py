"""When weights reach the engines, when they count as published, and evaluations between and beside steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from pumps_house import House, live
from pumps_plan import TOKENS, Plan, episode_ports, make_prompt, make_trajectory

from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.config.resolve import slots, staleness_bound, turns_bound
from asyncrl.errors import LifecycleError
from asyncrl.pumps.evaluate import EvaluatePump, Evaluations
from asyncrl.pumps.graph import RoleParts
from asyncrl.pumps.rollout import OwnPrompts
from asyncrl.types import Generation, GenerationRequest

# -- interval, prefetch, warm-up, partial batches --------------------------------------------------------------------


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
    house = live(Plan(rollout={"weight_sync_interval": interval}, max_staleness=staleness, max_steps=steps))
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


@pytest.mark.parametrize(
    ("interval", "steps", "evaluated", "taken"),
    [(4, 7, [0, 3, 6, 7], {3, 6, 7}), (2, 8, [0, 3, 6, 8], {2, 3, 5, 6, 8})],
)
def test_an_evaluation_hands_its_version_over_and_the_count_starts_anew(
    interval: int, steps: int, evaluated: list[int], taken: set[int]
) -> None:
    """Elapsed steps, not a modulo: evaluations at 3 and 6 with interval 2 give 2, 3, 5, 6, 8."""
    house = live(Plan(rollout={"weight_sync_interval": interval}, max_steps=steps, held_out=1, evaluate_every=3))
    assert house.error is None and [event.version for event in house.events("evaluated")] == evaluated
    assert [event.version for event in house.events("rollout starts") if event.groups == (-1,)] == evaluated
    assert {event.version for event in house.events("weights taken")} == taken


@pytest.mark.parametrize("ending", [False, True])
def test_an_evaluation_of_ones_own_frees_the_slots_of_the_version_that_it_hands_over(ending: bool) -> None:
    """Once, also if the end of the training hands the same version over at the same time."""
    plan = Plan(rollout={"weight_sync_interval": 3}, groups_per_step=1, publish_s=lambda version, sink: 2.0)

    async def embedded(house: House, supervisor: Supervisor) -> None:
        members = [make_trajectory(0, member, 2, [0] * 4, float(member)) for member in range(2)]
        await house.graph.submit(members, make_prompt(0))
        while not house.reports:  # noqa: ASYNC110  in virtual time
            await anyio.sleep(0.1)
        async with anyio.create_task_group() as tasks:
            if ending:
                tasks.start_soon(house.graph.drain)
            await house.graph.wait_published()
            assert house.books.held == 0

    house = live(plan, body=embedded)
    assert house.error is None and [event.version for event in house.events("release")] == [0]


@pytest.mark.parametrize(("depth", "interval"), [(0, 1), (1, 1), (3, 1), (2, 3)])
def test_prefetch_depth_is_the_age_and_the_slots(depth: int, interval: int) -> None:
    """Generation is much faster than training, so all that may be generated ahead is; the lag of the hand-over adds up."""
    rollout = {"max_staleness": depth, "weight_sync_interval": interval}
    plan = Plan(rollout=rollout, max_steps=8 * interval, train_token_s=1.0, rollout_s=lambda group, member: 0.1)
    house = live(plan)
    assert max(ages(house)) == staleness_bound(house.config) == turns_bound(house.config) == depth + interval - 1
    assert most_live(house) == slots(house.config) == (depth + interval) * plan.groups_per_step


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


# -- publishing, and evaluations between steps -----------------------------------------------------------------------


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
    house = live(Plan(groups_per_step=2, max_staleness=2, prompts=12, publish_s=lambda version, sink: 5.0))
    finishes, releases = house.events("finish"), house.events("release")
    assert all(finish.at >= release.at for finish, release in zip(finishes[1:], releases, strict=False))
    overlapped = [e for e in house.events("microbatch") if finishes[0].at < e.at < releases[0].at]
    assert overlapped, "microbatches of the next step are trained while the weights are on their way"


def test_evaluation_sees_exactly_its_version_and_the_weights_stand_still() -> None:
    """Evaluations are 20 times as long as a step. Every one reads the version it is booked under, to its last token."""
    house = live(Plan(groups_per_step=2, max_steps=5, held_out=3, evaluate_every=2, evaluation_s=20.0))
    assert sorted(house.evaluations) == [0, 2, 4, 5]  # before the first, every second, after the last
    finished = {event.version: event.at for event in house.events("finished")}
    for event in house.events("evaluated"):
        later = finished.get(event.version + 1)
        assert later is None or later >= event.at, "an optimizer step during an evaluation"
    starts = [event for event in house.events("rollout starts") if event.groups[0] < 0]
    assert {event.version for event in starts} == {0, 2, 4, 5} and len(starts) == 4 * 3
    assert house.books.admitted == 10, "evaluation takes no slots"


def test_evaluation_metrics_know_avg_and_pass() -> None:
    """Names of metrics hold no path."""
    plan = Plan(
        max_steps=1, held_out=4, evaluate_every=1, reward=lambda group, member: float(group == -1),
        rollout={"environment": "/home/me/games.py:Chess"},
    )  # fmt: skip
    house = live(plan)
    name = "eval/Chess"
    assert all(metric.startswith(f"{name}/") for metric in house.evaluations[0])
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


def test_pass_by_a_component_that_nobody_gives_ends_the_run() -> None:
    house = live(Plan(max_steps=1, held_out=1, evaluate_every=1, evaluate={"pass_by": "gone"}))
    assert "evaluate.pass_by is 'gone'; expected one of: reward, scripted" in str(house.error)


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


# -- evaluations beside steps, where the engine can pin a version ----------------------------------------------------


class FakePin:
    def __init__(self, version: int) -> None:
        self.version, self.over = version, anyio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        raise AssertionError("the scripted environment asks for nothing")

    def end(self) -> None:
        self.over.set()


class Workers:
    """An engine of which a part can be pinned, and its sink: two halves, the older of which is not written while it is."""

    def __init__(self, spare: bool = True, in_place: bool = False) -> None:
        """`in_place`: the optimizer step itself writes into a half."""
        self.spare, self.in_place = spare, in_place
        self.house: House | None = None
        self.pins: list[FakePin] = []
        self.version = 0

    async def pin(self, version: int) -> FakePin | None:
        assert self.version == version, "all are there"
        assert all(pin.over.is_set() for pin in self.pins), "one at a time"
        if self.spare:
            self.pins.append(FakePin(version))
        return self.pins[-1] if self.spare else None

    async def generate(self, request: GenerationRequest) -> Generation:
        raise AssertionError("nor of the engine")

    def statistics(self) -> dict[str, float]:
        return {}

    async def update_weights(self, version: int) -> None:
        assert self.house is not None
        await self._leave()
        for replica in self.house.sinks:
            await replica.update_weights(version)
        self.version = version

    async def wait_writable(self) -> None:
        if self.in_place:
            await self._leave()

    async def _leave(self) -> None:
        if self.pins and self.pins[-1].version < self.version:
            await self.pins[-1].over.wait()


def beside(plan: Plan, workers: Workers, embedded: Any = None, **given: Any) -> House:
    async def body(house: House, supervisor: Supervisor) -> None:
        workers.house, house.pinned = house, True
        if embedded is not None:
            return await embedded(house)
        await house.graph.run(supervisor)

    return live(plan, body=body, ports={"engine": workers, "sinks": [workers]}, **given)


def at(house: House, what: str) -> dict[int, float]:
    return {event.version: event.at for event in house.events(what)}


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_steps_go_on_beside_an_evaluation_until_they_need_its_half(in_place: bool) -> None:
    """Evaluations are 20 times as long as a step."""
    plan = Plan(groups_per_step=2, max_steps=6, held_out=3, evaluate_every=2, evaluation_s=20.0)
    workers = Workers(in_place=in_place)
    house = beside(plan, workers)
    assert house.error is None and [pin.version for pin in workers.pins] == [2, 4]
    assert sorted(house.evaluations) == [0, 2, 4, 6]
    finished, evaluated, taken = at(house, "finished"), at(house, "evaluated"), at(house, "weights taken")
    released = at(house, "release")
    for version in (2, 4):
        assert released[version - 1] <= taken[version + 1] <= released[version] < evaluated[version]
        assert (finished[version + 2] < evaluated[version]) == (not in_place)
        assert taken[version + 2] >= evaluated[version], "the half of the evaluation was written"
    assert finished[1] >= evaluated[0] and finished[6] <= evaluated[6], "before the first step, and after the last"
    assert [event.version for event in house.events("told")] == list(range(7))


@pytest.mark.parametrize(
    ("evaluated", "version", "owed", "owed_at_the_end"),
    [
        (-1, 3, True, True),  # one of an earlier release, or `evaluate.every` is new
        (0, 3, False, True),
        (0, 4, True, True),  # stopped during the evaluation of 4
        (0, 5, True, True),  # or beside it, a step later
        (4, 5, False, True),
        (4, 7, False, True),
        (4, 8, True, True),
        (8, 8, False, False),
        (9, 9, False, False),  # it was the last one before
        (9, 12, True, True),
    ],
)
def test_which_evaluation_is_owed(evaluated: int, version: int, owed: bool, owed_at_the_end: bool) -> None:
    """Of those at every fourth version; the newest one that was made is known."""
    engine: Any = Workers()
    ports = episode_ports(None, None, held_out=1, evaluate_every=4)
    evaluations = Evaluations(EvaluatePump(ports, [], "", evaluated), engine, anyio.sleep_forever)
    assert [evaluations.is_behind(version, last) for last in (False, True)] == [owed, owed_at_the_end]
    assert not Evaluations(None, engine, anyio.sleep_forever).is_behind(version, last=True)


class Rank0(OwnPrompts):
    """What rank 0 does for other ranks, where it is the only rank that generates."""

    async def evaluate(self, version: int, rows: Sequence[int], play: Any) -> Any:
        return await play(version, rows)

    async def send_trained(self) -> None:
        pass

    async def send_ended(self, version: int) -> None:
        pass


def rank_0(house: House) -> RoleParts:
    return RoleParts(dispatch=Rank0(house.prompts, 1))  # type: ignore[arg-type]  # what the graph uses of it


@pytest.mark.parametrize(("spare", "given"), [(False, {}), (True, {"role_parts": rank_0})], ids=["none", "ranks"])
def test_without_a_part_to_spare_or_by_several_ranks_no_version_is_pinned_and_the_next_step_waits(
    spare: bool, given: dict[str, Any]
) -> None:
    """A pin holds on one rank only: the other ranks would sample with later weights."""
    plan = Plan(groups_per_step=2, max_steps=4, held_out=2, evaluate_every=2, evaluation_s=20.0)
    workers = Workers(spare)
    house = beside(plan, workers, **given)
    assert house.error is None and not workers.pins
    finished, evaluated = at(house, "finished"), at(house, "evaluated")
    assert finished[3] >= evaluated[2] and sorted(evaluated) == [0, 2, 4]


def test_with_roles_an_own_evaluation_that_would_wait_for_other_ranks_is_refused() -> None:
    """With an interval of the hand-over the weights come from all training ranks, and only this rank knows of the call."""

    async def body(house: House, supervisor: Supervisor) -> None:
        with pytest.raises(LifecycleError, match=r"set rollout\.weight_sync_interval=1 \(it is 2\)"):
            await house.graph.wait_published()
        house.ports.ranks = 1
        await house.graph.wait_published()
        house.ports.builds_steps = False
        with pytest.raises(LifecycleError, match="call evaluate on rank 0"):
            await house.graph.wait_published()

    plan = Plan(rollout={"weight_sync_interval": 2})
    assert live(plan, body=body, ports={"ranks": 2}, role_parts=rank_0).error is None


def test_the_progress_of_an_evaluation_counts_all_shares_that_this_rank_plays() -> None:
    """It plays a second share if another rank is lost."""
    seen: list[tuple[int, int] | None] = []

    async def body(house: House, supervisor: Supervisor) -> None:
        async def spread(version: int, rows: Sequence[int], play: Any) -> Any:
            samples = []
            for row in rows:
                samples += await play(version, [row])
                seen.append(pump.progress)
            return samples

        pump = EvaluatePump(house.ports, [make_prompt(0), make_prompt(1)], "own", spread=spread)
        await pump.run(0)

    assert live(Plan(), body=body).error is None and seen == [(1, 2), (2, 2)]


def test_the_next_evaluation_waits_for_the_one_that_runs() -> None:
    plan = Plan(groups_per_step=2, max_steps=4, held_out=2, evaluate_every=1, evaluation_s=20.0)
    workers = Workers()
    house = beside(plan, workers)
    assert [pin.version for pin in workers.pins] == [1, 2, 3] and sorted(house.evaluations) == [0, 1, 2, 3, 4]
    marks = [e for e in house.log if e.what == "evaluated" or (e.what == "rollout starts" and e.groups[0] < 0)]
    assert [mark.what for mark in marks] == ["rollout starts", "rollout starts", "evaluated"] * 5
    finished, evaluated = at(house, "finished"), at(house, "evaluated")
    assert finished[2] < evaluated[1] and finished[3] < evaluated[2]


def test_with_an_interval_of_the_hand_over_the_steps_between_need_no_half() -> None:
    plan = Plan(
        rollout={"weight_sync_interval": 3, "max_staleness": 5},
        groups_per_step=2,
        max_steps=8,
        held_out=1,
        evaluate_every=4,
        evaluation_s=60.0,
    )
    workers = Workers()
    house = beside(plan, workers)
    assert house.error is None and [pin.version for pin in workers.pins] == [4]
    finished, evaluated = at(house, "finished"), at(house, "evaluated")
    assert finished[7] < evaluated[4] and sorted(evaluated) == [0, 4, 8]
    assert [event.version for event in house.events("told")] == list(range(9))


def test_a_loop_of_ones_own_is_evaluated_before_its_first_step_and_after_its_last() -> None:
    """Nobody knew that the third one is the last. Steps wait for the first evaluation, though their groups do not."""
    plan = Plan(groups_per_step=2, held_out=2, evaluate_every=2, evaluation_s=20.0)
    workers = Workers()

    async def embedded(house: House) -> None:
        for group in range(6):
            members = [make_trajectory(group, member, 2, [0] * 4, float(member)) for member in range(2)]
            await house.graph.submit(members, make_prompt(group))
        while len(house.reports) < 3:  # noqa: ASYNC110  in virtual time
            await anyio.sleep(0.1)
        assert sorted(house.evaluations) == [0] and house.graph.evaluations.progress == (0, 2)
        assert [event.version for event in house.events("told")] == [0, 1]

    house = beside(plan, workers, embedded)
    assert house.error is None and sorted(house.evaluations) == [0, 2, 3]
    assert at(house, "finished")[1] >= at(house, "evaluated")[0] and house.graph.evaluations.progress is None
    # The evaluation goes into the line of 3.
    assert [event.version for event in house.events("told")] == [0, 1, 2, 3, 3]


def test_an_evaluation_that_fails_ends_the_run_and_the_pin() -> None:
    plan = Plan(
        groups_per_step=2,
        max_steps=6,
        held_out=2,
        evaluate_every=2,
        evaluation_s=3.0,
        reward_fails=lambda group, member: RuntimeError("held out") if group == -2 and workers.pins else None,
    )
    workers = Workers()
    house = beside(plan, workers)
    assert isinstance(house.error, RuntimeError) and "held out" in str(house.error)
    assert sorted(house.evaluations) == [0] and workers.pins[0].over.is_set()
    assert [event.version for event in house.events("told")] == [0, 1]  # the line of its version is written at the end


@pytest.mark.parametrize("first", [1, 2, *(pytest.param(first, marks=pytest.mark.slow) for first in (3, 4))])
def test_cancelled_at_any_moment_the_books_add_up_and_lines_are_in_order(first: int) -> None:
    native, plan = first % 2 == 0, Plan(groups_per_step=2, max_steps=4, held_out=2, evaluate_every=2, evaluation_s=3.0)
    length = beside(plan, Workers()).ticks
    inside = 0
    for tick in range(first, length + 1, 4):
        workers = Workers()
        house = beside(plan, workers, cancel_at_tick=tick, native_cancel=native)
        assert house.error is None or isinstance(house.error, asyncio.CancelledError), (tick, house.error)
        told = [event.version for event in house.events("told")]
        assert told == list(range(len(told))), (tick, told)
        inside += bool(workers.pins) and 2 not in house.evaluations
    assert inside > 5, "few were cancelled during the evaluation"
