"""Device time of a lane: placed on the host's clock, without waits, and with idle time that adds up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device import LATENCY_S, FakeDevice, HostClock

from asyncrl.telemetry import device_time
from asyncrl.telemetry.budget import lane_budget, sum_budgets
from asyncrl.telemetry.recorder import Recorder, Span
from asyncrl.telemetry.trace import write_trace

LANE = "cuda0"


class Bench:
    """A recorder with one lane on a fake device, whose thread is this one."""

    def __init__(self, drift: float = 0.0) -> None:
        self.clock = HostClock()
        self.device = FakeDevice(self.clock, drift)
        self.recorder = Recorder(self.clock, nvtx=False)
        self.recorder.register_lane(LANE)
        self.recorder.register_device(LANE, self.device.new_event)
        self.truth: list[tuple[str, float, float]] = []

    def closure(self, name: str, host: float, kernels: float, waits: bool = False, window: bool = False) -> Any:
        """Launch for `host` seconds what computes for `kernels` seconds. `waits`: the closure reads its result."""
        found = None
        begin = self.device.reached_at()
        with self.recorder.lane_busy(LANE, name):
            self.device.launch(kernels)
            self.device.is_capturing = True
            self.clock.now += host
            if window:
                found = self.recorder.take_window()
            self.device.is_capturing = False
            if waits:
                self.clock.now = max(self.clock.now, self.device.free_at)
            end = self.device.reached_at()
        self.truth.append((name, begin, end))
        return found


def test_a_closure_is_busy_until_its_kernels_end_and_the_gap_after_it_is_idle() -> None:
    bench = Bench()
    bench.closure("train/microbatch", host=0.1, kernels=2.0)
    bench.closure("engine/decode", host=0.1, kernels=1.0)
    bench.clock.now = 103.0
    with bench.recorder.wait("train pump", "a group", on="score pump", cause="group"):
        bench.clock.now = 104.0
    window = bench.recorder.take_window()
    found = lane_budget(window, LANE)
    assert found.busy == pytest.approx({"train": 2.0, "decode": 1.0}, abs=1e-5)
    assert found.idle == pytest.approx({"group": 1.0}, abs=1e-5)
    _, first, second = bench.recorder.events()
    assert (first.name, first.track) == ("train/microbatch", f"lane:{LANE}")
    assert (first.start, first.duration) == pytest.approx((100.0, 2.0), abs=1e-5)
    assert (second.start, second.duration) == pytest.approx((102.0, 1.0), abs=1e-5)
    assert first.args == second.args == {"host_ms": pytest.approx(100.0)}


def test_what_the_device_still_computes_counts_for_both_windows_up_to_each_end() -> None:
    bench = Bench()
    bench.closure("train/finish", host=0.5, kernels=4.0)
    bench.closure("engine/decode", host=0.5, kernels=3.0)
    bench.clock.now = 102.0
    first = lane_budget(bench.recorder.take_window(), LANE)
    bench.clock.now = 110.0
    second = lane_budget(bench.recorder.take_window(), LANE)
    assert first.busy == pytest.approx({"train": 2.0}) and not first.idle
    assert second.busy == pytest.approx({"train": 2.0, "decode": 3.0}, abs=1e-4)
    assert second.idle == pytest.approx({"unexplained": 3.0}, abs=1e-4)


def test_nobody_queries_while_a_closure_runs() -> None:
    """The fake device refuses every call while a graph is captured."""
    bench = Bench()
    bench.closure("train/microbatch", host=0.1, kernels=1.0)
    window = bench.closure("engine/decode", host=2.0, kernels=1.0, window=True)
    assert lane_budget(window, LANE).busy == pytest.approx({"train": 2.1})


@dataclass
class Step:
    gap: float
    host: float
    kernels: float
    waits: bool
    window: bool


seconds = st.floats(0.0, 2.0)
steps = st.lists(st.builds(Step, seconds, st.floats(1e-5, 0.5), seconds, st.booleans(), st.booleans()), max_size=25)


@settings(max_examples=300, deadline=None)
@given(steps, st.floats(-5e-5, 5e-5), st.booleans())
def test_busy_and_idle_fill_the_wall_and_equal_what_the_device_did(
    plan: list[Step], drift: float, inside: bool
) -> None:
    """`inside`: the windows end while closures run, as the event loop may want it."""
    bench, windows = Bench(drift), []
    causes, waits = ("group", "reward", "publish"), []
    for number, step in enumerate(plan):
        began, cause = bench.clock.now, causes[number % 3]
        with bench.recorder.wait("pump", "work", on="others", cause=cause):
            bench.clock.now += step.gap / 2
            if step.window and not inside:
                windows.append(bench.recorder.take_window())
            bench.clock.now += step.gap / 2
        waits.append((cause, began, bench.clock.now))
        found = bench.closure(f"kind{number % 4}", step.host, step.kernels, step.waits, step.window and inside)
        windows += [found] if found else []
    bench.clock.now = max(bench.clock.now + 2 * LATENCY_S, bench.device.free_at)
    windows.append(bench.recorder.take_window())
    budgets = [lane_budget(window, LANE) for window in windows]
    for each in budgets:
        assert sum(each.busy.values()) + sum(each.idle.values()) == pytest.approx(each.wall)
    total = sum_budgets(budgets, LANE)
    exact = 1e-4 + len(plan) * 4 * LATENCY_S + 2 * abs(drift) * total.wall
    busy = sum(end - begin for _, begin, end in bench.truth)
    assert sum(total.busy.values()) == pytest.approx(busy, abs=exact)
    if not inside:
        for kind in {name for name, _, _ in bench.truth}:
            computed = sum(end - begin for name, begin, end in bench.truth if name == kind)
            assert total.busy.get(kind, 0.0) == pytest.approx(computed, abs=exact)
    for cause in causes:
        idle = sum(
            end - begin - sum(max(0.0, min(end, e) - max(begin, b)) for _, b, e in bench.truth)
            for which, begin, end in waits
            if which == cause
        )
        assert total.idle.get(cause, 0.0) == pytest.approx(idle, abs=exact)
    assert total.idle.get("unexplained", 0.0) < exact
    assert len(bench.device.events) <= 2 * len(plan) + 1


def test_the_reference_is_renewed_so_a_drift_of_hours_stays_a_few_microseconds_and_is_reported() -> None:
    bench = Bench(drift=2e-5)
    for _ in range(50):
        bench.closure("engine/decode", host=0.001, kernels=0.5, waits=True)
        bench.clock.now += 100.0
    bench.recorder.take_window()
    for event, (_, begin, end) in zip(bench.recorder.events(), bench.truth, strict=True):
        assert event.start == pytest.approx(begin, abs=5e-5)
        assert event.start + event.duration == pytest.approx(end, abs=5e-5)
    assert bench.recorder.drain()["lane/device_clock_ms"] == pytest.approx(1e3 * 2e-5 * 100.5, rel=0.02)


def test_no_event_is_placed_before_its_record_or_after_the_query_that_found_it() -> None:
    """Even if the two clocks have nothing to do with each other."""
    for drift in (-0.3, 1.0):
        bench = Bench(drift)
        for _ in range(3):
            bench.closure("train/microbatch", host=0.1, kernels=3.0)
        bench.clock.now = 109.5
        bench.recorder.take_window()
        events = bench.recorder.events()
        assert [event.name for event in events] == 3 * ["train/microbatch"]
        for event, later in pairwise(events):
            assert event.start + event.duration <= later.start
        assert all(100.0 <= event.start <= event.start + event.duration <= 109.5 for event in events)


def test_events_are_used_again() -> None:
    bench = Bench()
    for _ in range(200):
        bench.closure("engine/decode", host=0.001, kernels=0.01, waits=True)
        bench.clock.now += 1e-4
    assert len(bench.device.events) <= 6
    bench.clock.now = bench.device.free_at + 1.0
    bench.recorder.take_window()
    assert len(bench.recorder.events()) == 200


def test_the_trace_waits_for_the_device_and_gives_up_on_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, slept = Bench(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        bench.clock.now += seconds

    monkeypatch.setattr(device_time.time, "sleep", sleep)
    bench.closure("train/finish", host=0.1, kernels=0.5)
    assert not bench.recorder.events()
    write_trace(bench.recorder, tmp_path / "trace.json")
    assert [event.duration for event in bench.recorder.events()] == [pytest.approx(0.5, abs=1e-4)]
    assert sum(slept) == pytest.approx(0.4, abs=0.01)
    slept.clear()
    bench.closure("train/finish", host=0.1, kernels=1e9)
    write_trace(bench.recorder, tmp_path / "trace.json")
    assert sum(slept) == pytest.approx(device_time.FINISH_S)
    assert bench.recorder.events()[-1].duration == pytest.approx(0.1)


def test_an_error_of_the_device_is_left_to_the_closure_and_later_closures_have_the_hosts_times() -> None:
    bench = Bench()
    bench.closure("train/microbatch", host=0.1, kernels=5.0)
    with pytest.raises(RuntimeError, match="illegal memory"), bench.recorder.lane_busy(LANE, "train/finish"):
        bench.clock.now += 1.0
        bench.device.is_broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with bench.recorder.lane_busy(LANE, "train/abort"):
        bench.clock.now += 1.0
    found = [(event.name, round(event.start, 3), round(event.duration, 3)) for event in bench.recorder.events()]
    assert found == [("train/microbatch", 100.0, 0.1), ("train/finish", 100.1, 1.0), ("train/abort", 101.1, 1.0)]
    assert lane_budget(bench.recorder.take_window(), LANE).busy == pytest.approx({"train": 2.1})


def test_a_workers_parcel_has_a_closure_once_the_device_has_ended_it() -> None:
    bench = Bench()
    run = Recorder(bench.clock, nvtx=False)
    bench.closure("engine/decode", host=0.1, kernels=2.0)
    run.add_parcel(bench.recorder.take_parcel(), "worker0")
    assert not run.events()
    bench.clock.now = 103.0
    run.add_parcel(bench.recorder.take_parcel(), "worker0")
    (event,) = run.events()
    assert (event.start, event.duration) == pytest.approx((100.0, 2.0), abs=1e-4)


def test_a_lane_without_a_device_has_the_spans_of_the_host() -> None:
    bench = Bench()
    assert type(bench.recorder.lane_busy("cpu", "train/microbatch")) is Span
    assert type(bench.recorder.lane_busy(LANE, "train/microbatch")) is not Span


def test_the_range_of_a_profiler_is_that_of_the_host() -> None:
    """From before the first kernel is launched until the last is."""
    bench, calls = Bench(), []

    class Ranges:
        def open(self, name: str) -> str:
            calls.append(("open", name, bench.clock.now))
            return name

        def close(self, opened: str) -> None:
            calls.append(("close", opened, bench.clock.now))

    bench.recorder._ranges = Ranges()  # type: ignore[assignment]  # no profiler is here
    bench.closure("engine/decode", host=0.5, kernels=3.0)
    assert calls == [("open", "engine/decode", 100.0), ("close", "engine/decode", 100.5)]
