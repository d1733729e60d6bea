"""The recorder: spans, waits, windows and metrics; what other processes recorded; the idle account."""

from __future__ import annotations

import itertools
import math
import threading

import anyio
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.telemetry.budget import RunBudget, budget_metrics, lane_budget, sum_budgets
from asyncrl.telemetry.recorder import REMOTE_DELAY_S, Recorder
from asyncrl.telemetry.records import CAUSES, Interval, Window
from asyncrl.telemetry.samples import Reduce


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder(clock: FakeClock) -> Recorder:
    return Recorder(clock)


def test_span_records_name_track_times_and_args(recorder: Recorder, clock: FakeClock) -> None:
    with recorder.span("decode", track="engine", batch=7):
        clock.now += 2.5
    with pytest.raises(KeyError), recorder.span("train", track="lane:gen"):
        clock.now += 1
        raise KeyError("x")
    event, failed = recorder.events()
    assert (event.phase, event.name, event.track) == ("X", "decode", "engine")
    assert (event.start, event.duration, event.args) == (100.0, 2.5, {"batch": 7})
    assert (failed.name, failed.duration) == ("train", 1.0)
    assert [(i.label, i.lane) for i in recorder.take_window().busy] == [("train", "gen")]


def test_wait_is_listed_while_it_lasts_and_kept_afterwards(recorder: Recorder, clock: FakeClock) -> None:
    with recorder.wait("train pump", "a whole group", on="score pump", cause="group"):
        clock.now += 1
        with recorder.wait("score pump", "reward f", on="reward worker 1", cause="reward"):
            clock.now += 2
            seen: list[str] = []
            thread = threading.Thread(
                target=lambda: seen.extend(w.describe(clock.now) for w in recorder.active_waits())
            )
            thread.start()
            thread.join()
            assert seen == [
                "train pump waits for a whole group from score pump for 3.0 s",
                "score pump waits for reward f from reward worker 1 for 2.0 s",
            ]
    assert recorder.active_waits() == []
    window = recorder.take_window()
    assert [(i.label, i.lane, i.start, i.end) for i in window.idle] == [
        ("reward", None, 101.0, 103.0),
        ("group", None, 100.0, 103.0),
    ]


async def test_wait_ends_when_the_waiting_task_is_cancelled(recorder: Recorder) -> None:
    with anyio.CancelScope() as scope:
        with recorder.wait("pump", "for ever", on="nobody", cause="slots"):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert recorder.active_waits() == []


def test_handoff_counts_only_the_time_in_which_the_lane_was_idle(recorder: Recorder, clock: FakeClock) -> None:
    with recorder.lane_busy("cpu", "decode"):
        clock.now = 110.0
    clock.now = 113.0
    with recorder.lane_busy("cpu", "train", submitted=105.0) as span:  # handed in while the lane was busy until 110
        clock.now = 120.0
    clock.now = 121.0
    recorder.lane_resumed("cpu", span.ended)
    window = recorder.take_window()
    assert [(i.label, i.lane, i.start, i.end) for i in window.idle] == [
        ("handoff", "cpu", 110.0, 113.0),
        ("loop", "cpu", 120.0, 121.0),
    ]
    assert [(i.label, i.start, i.end) for i in window.busy] == [("decode", 100.0, 110.0), ("train", 113.0, 120.0)]


def test_window_takes_open_intervals_and_the_next_one_has_them_whole(recorder: Recorder, clock: FakeClock) -> None:
    with (
        recorder.wait("engine", "a request", on="rollout pump", cause="requests"),
        recorder.lane_busy("cpu", "train"),
        recorder.work("engine", "deliver"),
    ):
        clock.now += 4
        first = recorder.take_window()
        clock.now += 1
    second = recorder.take_window()
    assert (first.start, first.end, first.lanes) == (100.0, 104.0, ("cpu",))
    assert [(i.label, i.start, i.end) for i in first.busy] == [("train", 100.0, 104.0)]
    assert sorted((i.label, i.start, i.end) for i in first.idle) == [("loop", 100.0, 104.0), ("requests", 100.0, 104.0)]
    assert (second.start, second.end) == (104.0, 105.0)
    assert [(i.label, i.start, i.end) for i in second.busy] == [("train", 100.0, 105.0)]
    assert recorder.take_window().idle == []


def test_metrics_are_reduced_by_kind_and_gone_after_drain(recorder: Recorder, clock: FakeClock) -> None:
    for value in (1.0, 2.0, 6.0):
        recorder.observe("reward/mean", value)
        recorder.observe("staleness/max", value, reduce="max")
        recorder.gauge("queue/stash/depth", value)
        recorder.count("groups")
    for sample in range(1, 201):
        recorder.observe("loop/lag_ms_p99", float(sample), reduce="p99")
    with recorder.timed("time/train"):
        clock.now += 1.5
    with recorder.timed("time/train"):
        clock.now += 0.5
    assert recorder.drain() == {
        "reward/mean": 3.0,
        "staleness/max": 6.0,
        "loop/lag_ms_p99": 198.0,
        "groups": 3.0,
        "time/train": 2.0,
        "queue/stash/depth": 6.0,
    }
    assert recorder.drain() == {}


def test_counts_that_were_taken_by_name_are_not_drained_again(recorder: Recorder) -> None:
    recorder.count("reroll/lost", 2)
    recorder.count("time/train", 0.5)
    recorder.gauge("reroll/waiting", 3)
    assert recorder.take_counts(("reroll/", "filter/")) == {"reroll/lost": 2}
    recorder.count("reroll/lost")
    assert recorder.drain() == {"reroll/lost": 1, "time/train": 0.5, "reroll/waiting": 3}


def test_events_beyond_the_limit_are_counted_and_the_account_goes_on(clock: FakeClock) -> None:
    recorder = Recorder(clock, max_events=3)
    for _ in range(2):
        with recorder.lane_busy("cpu", "decode"):
            clock.now += 1
        with recorder.wait("a", "b", on="c", cause="slots"):
            clock.now += 1
    recorder.instant("late", track="a")
    assert len(recorder.events()) == 3
    assert recorder.dropped_events == 2
    window = recorder.take_window()
    assert (len(window.busy), len(window.idle)) == (2, 2)


def test_threads_lose_nothing() -> None:
    recorder = Recorder()

    def hammer(name: str) -> None:
        for _ in range(2000):
            with recorder.lane_busy(name, "decode"):
                recorder.count("steps")
            with recorder.wait(name, "x", on="y", cause="group"):
                recorder.observe("one", 1.0)

    threads = [threading.Thread(target=hammer, args=(f"lane{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    windows, metrics = [], []
    while any(thread.is_alive() for thread in threads):
        windows.append(recorder.take_window())
        metrics.append(recorder.drain())
        recorder.active_waits()
    for thread in threads:
        thread.join()
    windows.append(recorder.take_window())
    metrics.append(recorder.drain())
    assert sum(each.get("steps", 0.0) for each in metrics) == 8000
    assert len(recorder.events()) == 16000
    # An interval that was open when a window was taken is in that window and again, whole, in the next one.
    whole = {(i.lane, i.start): i.end for window in windows for i in window.busy}
    assert len(whole) == 8000


def test_nvtx_ranges_open_and_close_in_pairs(clock: FakeClock) -> None:
    class Domain:
        def __init__(self) -> None:
            self.log: list[str] = []

        def get_event_attributes(self, message: str) -> str:
            return message

        def start_range(self, attributes: str) -> str:
            self.log.append("+" + attributes)
            return attributes

        def end_range(self, opened: str) -> None:
            self.log.append("-" + opened)

    recorder, domain = Recorder(clock), Domain()
    recorder._ranges._domain = domain  # what a profiler would have installed
    with recorder.span("outer", track="t"), recorder.lane_busy("cpu", "inner"):
        pass
    with recorder.wait("a", "b", on="c", cause="group"):
        pass
    assert domain.log == ["+outer", "+inner", "-inner", "-outer"]


# -- what another process recorded: nothing is lost, doubled, or taken for another lane ------------------------------


def sent(recorder: Recorder) -> dict[str, object]:
    parcel: dict[str, object] = orjson.loads(orjson.dumps(recorder.take_parcel()))
    return parcel


def test_metrics_of_two_workers_are_those_of_all_their_samples() -> None:
    run, whole = Recorder(nvtx=False), Recorder(nvtx=False)
    for lane, values in (("worker0", [1.0, 5.0]), ("worker1", [3.0, 3.0, 12.0])):
        worker = Recorder(max_events=0, nvtx=False)
        for each in (worker, whole):
            for value in values:
                each.count("tokens", value)
                each.observe("mean", value)
                each.observe("most", value, reduce="max")
                each.observe("late", value, reduce="p99")
                each.observe("far", value + math.inf, reduce="max")
        worker.gauge("running", 7)  # of this worker alone: not the run's
        run.add_parcel(sent(worker), lane)
        run.add_parcel(sent(worker), lane)  # nothing new
    found = run.drain()
    assert found == pytest.approx(whole.drain())
    assert found["mean"] == 4.8 and found["most"] == 12


@pytest.mark.parametrize("reduce", ["mean", "max", "p99"])
@pytest.mark.parametrize("values", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]])
def test_a_sample_that_is_no_number_stays_visible_in_any_order(reduce: Reduce, values: list[float]) -> None:
    run, own = Recorder(nvtx=False), Recorder(nvtx=False)
    for value in values:
        worker = Recorder(max_events=0, nvtx=False)
        for each in (own, worker):
            each.observe("distance", value, reduce=reduce)
        run.add_parcel(sent(worker), "worker0")
    assert math.isnan(own.drain()["distance"]) and math.isnan(run.drain()["distance"])


def test_closures_and_waits_are_the_workers_own_and_none_is_lost_between_two_windows() -> None:
    clock = FakeClock()
    run, worker = Recorder(clock, nvtx=False), Recorder(clock, max_events=0, nvtx=False)
    run.take_window()
    with worker.lane_busy("worker0", "engine/decode"):
        clock.now += 2.0
    waiting = worker.wait("engine", "a request", on="its callers", cause="requests")
    with waiting:
        clock.now += 0.1
        run.add_parcel(sent(worker), "worker0")  # the wait is open: it comes whole with a later parcel
        first = run.take_window()
        clock.now += 0.4
    clock.now += 0.1
    run.add_parcel(sent(worker), "worker0")
    clock.now += REMOTE_DELAY_S
    second = run.take_window()
    [busy] = first.busy
    assert busy.lane == "worker0" and busy.end - busy.start == pytest.approx(2.0) and not first.idle
    assert busy in second.busy, "its last part lies in the next window"
    inside = sum(min(busy.end, w.end) - max(busy.start, w.start) for w in (first, second))
    assert inside == pytest.approx(2.0)
    [idle] = second.idle
    assert (idle.label, idle.lane) == ("requests", "worker0") and idle.end - idle.start == pytest.approx(0.5)
    [event] = [each for each in run.events() if each.name == "engine/decode"]
    assert event.track == "lane:worker0" and (event.start, event.duration) == (100.0, 2.0), "the trace is not late"


# -- the idle account: worked examples, and the properties that hold for any set of intervals ------------------------


def window(
    *, busy: list[Interval], idle: list[Interval], end: float = 10.0, lanes: tuple[str, ...] = ("cpu",)
) -> Window:
    return Window(0.0, end, lanes, busy, idle)


def test_worked_example() -> None:
    account = lane_budget(
        window(
            busy=[
                Interval("engine/decode", "cpu", 0.0, 4.0),
                Interval("train/microbatch", "cpu", 5.0, 6.0),
                Interval("train/logprobs", "cpu", 9.0, 9.25),
                Interval("engine/bind", "cpu", 9.25, 9.75),
            ],
            idle=[
                Interval("group", None, 3.0, 9.0),
                Interval("reward", None, 6.5, 7.0),
                Interval("handoff", "cpu", 4.75, 5.0),
                Interval("handoff", "other", 0.0, 10.0),
            ],
        ),
        "cpu",
    )
    assert account.busy == {"decode": 4.0, "train": 1.0, "logprobs": 0.25, "publish": 0.5}
    assert account.idle == pytest.approx({"group": 3.25, "handoff": 0.25, "reward": 0.5, "unexplained": 0.25})
    assert account.shares()["idle/unexplained"] == pytest.approx(0.025)
    assert sum(lane_budget(window(busy=[], idle=[], end=0.0), "cpu").shares().values()) == 0.0


def test_of_nested_closures_the_inner_one_names_the_time() -> None:
    nested = [Interval("decode", "cpu", 0.0, 10.0), Interval("prefill", "cpu", 2.0, 3.0)]
    assert lane_budget(window(busy=nested, idle=[]), "cpu").busy == {"decode": 9.0, "prefill": 1.0}


def test_two_lanes_give_means_and_their_own_numbers() -> None:
    two = window(
        busy=[Interval("decode", "gen", 0.0, 10.0)], idle=[Interval("group", None, 0.0, 10.0)], lanes=("gen", "train")
    )
    metrics = RunBudget().step(two)
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
    busy=intervals(["decode", "prefill", "train/microbatch", "odd.name"], LANES),
    idle=intervals(list(CAUSES), st.one_of(st.none(), LANES)),
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
        expected = {"busy": 0.0, "unexplained": 0.0, **dict.fromkeys(CAUSES, 0.0)}
        for a, b in itertools.pairwise(edges):
            causes = {each.label for each in _covers(waits, a, b)}
            deepest = next((cause for cause in CAUSES if cause in causes), "unexplained")
            expected["busy" if _covers(mine, a, b) else deepest] += b - a
        assert sum(account.busy.values()) == pytest.approx(expected.pop("busy"), abs=1e-9)
        for cause, seconds in expected.items():
            assert account.idle.get(cause, 0.0) == pytest.approx(seconds, abs=1e-9)
    halves = [lane_budget(Window(a, b, ("cpu",), busy, idle), "cpu") for a, b in ((start, start + 4), (start + 4, end))]
    joined, whole = sum_budgets(halves, "cpu"), lane_budget(Window(start, end, ("cpu",), busy, idle), "cpu")
    assert joined.shares() == pytest.approx({**dict.fromkeys(joined.shares(), 0.0), **whole.shares()}, abs=1e-9)


def test_a_lane_outside_the_budget_changes_no_share() -> None:
    now = [0.0]
    recorder = Recorder(lambda: now[0])
    recorder.register_lane("cpu")
    recorder.register_lane("weights", in_budget=False)
    for lane in ("weights", "cpu"):
        with recorder.lane_busy(lane, "train/step"):
            now[0] += 1.0
    assert RunBudget().step(recorder.take_window()) == {"busy/train": 0.5, "idle/unexplained": 0.5}


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
