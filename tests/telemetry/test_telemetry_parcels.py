"""What another process recorded, booked in the recorder of a run: nothing is lost, doubled, or taken for somebody else's."""

from __future__ import annotations

import json

import pytest

from asyncrl.telemetry.parcels import pack, unpack
from asyncrl.telemetry.recorder import LATE_S, Recorder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sent(recorder: Recorder) -> dict[str, object]:
    parcel: dict[str, object] = json.loads(json.dumps(pack(recorder)))
    return parcel


def test_metrics_of_two_workers_are_those_of_all_their_samples() -> None:
    run, whole = Recorder(nvtx=False), Recorder(nvtx=False)
    for lane, values in (("worker0", [1.0, 5.0]), ("worker1", [3.0, 3.0, 12.0])):
        worker = Recorder(max_events=0, nvtx=False)
        for each in (worker, whole):
            for value in values:
                each.count("tokens", value)
                each.observe("mean", value)
                each.observe("least", value, reduce="min")
                each.observe("most", value, reduce="max")
                each.observe("late", value, reduce="p99")
        worker.gauge("running", 7)  # of this worker alone: not the run's
        unpack(run, sent(worker), lane)
        unpack(run, sent(worker), lane)  # nothing new
    found = run.drain()
    assert found == pytest.approx(whole.drain())
    assert found["mean"] == 4.8 and found["least"] == 1 and found["most"] == 12


def test_closures_and_waits_are_the_workers_own_and_none_is_lost_between_two_windows() -> None:
    clock = Clock()
    run, worker = Recorder(clock, nvtx=False), Recorder(clock, max_events=0, nvtx=False)
    run.take_window()
    with worker.lane_busy("worker0", "engine/decode"):
        clock.now += 2.0
    waiting = worker.wait("engine", "a request", on="its callers", cause="requests")
    with waiting:
        clock.now += 0.1
        unpack(run, sent(worker), "worker0")  # the wait is open: it comes whole with a later parcel
        first = run.take_window()
        clock.now += 0.4
    clock.now += 0.1
    unpack(run, sent(worker), "worker0")
    clock.now += LATE_S
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
