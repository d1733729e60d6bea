"""The idle account: worked examples, and the properties that hold for any set of intervals."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.telemetry.budget import DEPTH, RunBudget, budget, budget_metrics, kind_of, lane_budget, total
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.records import Interval, Window


def window(
    *, busy: list[Interval], idle: list[Interval], end: float = 10.0, lanes: tuple[str, ...] = ("cpu",)
) -> Window:
    return Window(0.0, end, lanes, busy, idle)


def test_worked_example() -> None:
    account = lane_budget(
        window(
            busy=[Interval("decode", "cpu", 0.0, 4.0), Interval("train_microbatch", "cpu", 5.0, 6.0)],
            idle=[
                Interval("group", None, 3.0, 9.0),
                Interval("reward", None, 6.5, 7.0),
                Interval("handoff", "cpu", 4.75, 5.0),
                Interval("handoff", "other", 0.0, 10.0),
            ],
        ),
        "cpu",
    )
    assert account.busy == {"decode": 4.0, "train": 1.0}
    assert account.idle == pytest.approx(
        {"group": 0.75 + 0.5 + 2.0, "handoff": 0.25, "reward": 0.5, "unexplained": 1.0}
    )
    assert account.shares()["idle/unexplained"] == pytest.approx(0.1)


@pytest.mark.parametrize("deeper", range(len(DEPTH) - 1))
def test_the_deepest_cause_wins_whatever_the_order_of_recording(deeper: int) -> None:
    both = [Interval(DEPTH[deeper], None, 0.0, 10.0), Interval(DEPTH[deeper + 1], None, 0.0, 10.0)]
    for idle in (both, both[::-1]):
        assert lane_budget(window(busy=[], idle=idle), "cpu").idle == {DEPTH[deeper]: 10.0}


def test_of_nested_closures_the_inner_one_names_the_time() -> None:
    nested = [Interval("decode", "cpu", 0.0, 10.0), Interval("prefill", "cpu", 2.0, 3.0)]
    assert lane_budget(window(busy=nested, idle=[]), "cpu").busy == {"decode": 9.0, "prefill": 1.0}


def test_an_empty_window_has_no_shares_and_a_lane_without_records_is_unexplained() -> None:
    assert sum(lane_budget(window(busy=[], idle=[], end=0.0), "cpu").shares().values()) == 0.0
    assert lane_budget(window(busy=[], idle=[]), "cpu").idle == {"unexplained": 10.0}


def test_kinds() -> None:
    names = ["decode", "prefill", "train_microbatch", "finish_train_step", "compute_logprobs", "my.thing", "plain"]
    assert [kind_of(name) for name in names] == ["decode", "prefill", "train", "train", "logprobs", "my", "plain"]


def test_two_lanes_give_means_and_their_own_numbers() -> None:
    two = window(
        busy=[Interval("decode", "gen", 0.0, 10.0)], idle=[Interval("group", None, 0.0, 10.0)], lanes=("gen", "train")
    )
    metrics = budget_metrics(budget(two))
    assert metrics["busy/decode"] == metrics["idle/group"] == 0.5
    assert metrics["busy/gen/decode"] == metrics["idle/train/group"] == 1.0
    assert metrics["idle/unexplained"] == 0.0
    assert budget_metrics([]) == {}


def test_run_account_is_the_sum_of_its_steps() -> None:
    run = RunBudget()
    step = run.step(Window(0.0, 1.0, ("cpu",), [Interval("decode", "cpu", 0.0, 1.0)], []))
    run.step(Window(1.0, 4.0, ("cpu",), [], [Interval("slots", None, 0.0, 9.0)]))
    assert step == {"busy/decode": 1.0, "idle/unexplained": 0.0}
    assert run.metrics() == {"busy/decode": 0.25, "idle/slots": 0.75, "idle/unexplained": 0.0}
    assert [lane.wall for lane in run.lanes()] == [4.0]


LANES = st.sampled_from(["cpu", "gpu"])
# Far from zero and of mixed grain, as real clocks are.
MOMENTS = st.one_of(st.integers(-5, 15).map(float), st.floats(-5, 15, allow_nan=False, width=32))


@st.composite
def intervals(draw: st.DrawFn, labels: list[str], lanes: st.SearchStrategy[str | None]) -> list[Interval]:
    drawn = []
    for _ in range(draw(st.integers(0, 25))):
        a, b = sorted((draw(MOMENTS), draw(MOMENTS)))
        drawn.append(Interval(draw(st.sampled_from(labels)), draw(lanes), a + 1e5, b + 1e5))
    return drawn


def _covers(several: list[Interval], a: float, b: float) -> list[Interval]:
    return [each for each in several if each.start <= a and b <= each.end]


@settings(max_examples=200, deadline=None)
@given(
    busy=intervals(["decode", "prefill", "train_microbatch", "odd.name"], LANES),
    idle=intervals(list(DEPTH), st.one_of(st.none(), LANES)),
)
def test_properties(busy: list[Interval], idle: list[Interval]) -> None:
    """Shares sum to 1, none is negative, and each elementary stretch has the label the rule gives it."""
    start, end = 1e5, 1e5 + 10
    for lane in ("cpu", "gpu"):
        mine = [each for each in busy if each.lane == lane]
        waits = [each for each in idle if each.lane in (None, lane)]
        account = lane_budget(Window(start, end, ("cpu", "gpu"), busy, idle), lane)
        shares = account.shares()
        assert math.isclose(sum(shares.values()), 1.0, abs_tol=1e-9)
        assert all(share >= 0 for share in shares.values())

        edges = sorted(
            {min(max(m, start), end) for each in (*mine, *waits) for m in (each.start, each.end)} | {start, end}
        )
        expected = {"busy": 0.0, "unexplained": 0.0, **dict.fromkeys(DEPTH, 0.0)}
        for a, b in itertools.pairwise(edges):
            causes = {each.label for each in _covers(waits, a, b)}
            deepest = next((cause for cause in DEPTH if cause in causes), "unexplained")
            expected["busy" if _covers(mine, a, b) else deepest] += b - a
        assert sum(account.busy.values()) == pytest.approx(expected.pop("busy"), abs=1e-9)
        for cause, seconds in expected.items():
            assert account.idle.get(cause, 0.0) == pytest.approx(seconds, abs=1e-9)
    halves = [lane_budget(Window(a, b, ("cpu",), busy, idle), "cpu") for a, b in ((start, start + 4), (start + 4, end))]
    joined, whole = total(halves, "cpu"), lane_budget(Window(start, end, ("cpu",), busy, idle), "cpu")
    assert joined.shares() == pytest.approx({**dict.fromkeys(joined.shares(), 0.0), **whole.shares()}, abs=1e-9)


def test_a_recorder_that_records_every_gap_leaves_nothing_unexplained() -> None:
    now = [0.0]
    recorder = Recorder(lambda: now[0])
    recorder.register_lane("cpu")
    with recorder.wait("runtime", "the model", on="disk", cause="start"):
        now[0] += 1.0
    for _ in range(10):
        submitted = now[0]
        now[0] += 0.01  # thread switch
        with recorder.lane_busy("cpu", "decode", submitted=submitted) as span:
            now[0] += 0.07
        now[0] += 0.01  # back on the loop
        recorder.lane_resumed("cpu", span.ended)
        with recorder.work("engine", "deliver"):
            now[0] += 0.01
    metrics = RunBudget().step(recorder.take_window())
    assert metrics == pytest.approx(
        {"idle/start": 0.5, "busy/decode": 0.35, "idle/handoff": 0.05, "idle/loop": 0.1, "idle/unexplained": 0.0},
        abs=1e-9,
    )
