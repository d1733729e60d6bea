"""The recorder: spans, waits, windows and metrics, on a clock that the test moves."""

from __future__ import annotations

import threading

import anyio
import pytest

from asyncrl.telemetry.recorder import Recorder


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
    (event,) = recorder.events()
    assert (event.phase, event.name, event.track) == ("X", "decode", "engine")
    assert (event.start, event.duration, event.args) == (100.0, 2.5, {"batch": 7})


def test_span_is_recorded_when_its_body_raises(recorder: Recorder) -> None:
    with pytest.raises(KeyError), recorder.span("decode", track="engine"):
        raise KeyError("x")
    assert [event.name for event in recorder.events()] == ["decode"]


async def test_spans_of_interleaved_coroutines_do_not_mix(recorder: Recorder, clock: FakeClock) -> None:
    first_open, second_open, first_closed = anyio.Event(), anyio.Event(), anyio.Event()

    async def first() -> None:
        with recorder.span("first", track="a"):
            first_open.set()
            await second_open.wait()
            clock.now += 1
        first_closed.set()

    async def second() -> None:
        await first_open.wait()
        with recorder.span("second", track="b"):
            clock.now += 1
            second_open.set()
            await first_closed.wait()
            clock.now += 1

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        group.start_soon(second)
    spans = {event.name: (event.start, event.duration) for event in recorder.events()}
    assert spans == {"first": (100.0, 2.0), "second": (100.0, 3.0)}


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
                "train pump waits for a whole group from score pump since 3.0 s",
                "score pump waits for reward f from reward worker 1 since 2.0 s",
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


def test_unknown_cause_is_refused(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="'coffee'"):
        recorder.wait("a", "b", on="c", cause="coffee")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'coffee'"):
        recorder.idle("coffee", 0.0, 1.0)  # type: ignore[arg-type]


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


def test_a_span_on_a_lane_track_is_busy_time(recorder: Recorder, clock: FakeClock) -> None:
    with recorder.span("decode", track="lane:gen"):
        clock.now += 1
    assert [(i.label, i.lane) for i in recorder.take_window().busy] == [("decode", "gen")]


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
        recorder.observe("completions/min_length", value, reduce="min")
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
        "completions/min_length": 1.0,
        "loop/lag_ms_p99": 198.0,
        "groups": 3.0,
        "time/train": 2.0,
        "queue/stash/depth": 6.0,
    }
    assert recorder.drain() == {}


def test_counts_that_were_taken_by_name_are_not_drained_again(recorder: Recorder) -> None:
    recorder.count("reroll/failed", 2)
    recorder.count("time/train", 0.5)
    recorder.gauge("reroll/waiting", 3)
    assert recorder.take_counts(("reroll/", "filter/")) == {"reroll/failed": 2}
    recorder.count("reroll/failed")
    assert recorder.drain() == {"reroll/failed": 1, "time/train": 0.5, "reroll/waiting": 3}


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
