"""trace.json: valid, complete, properly nested per thread, and readable from its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.records import TraceEvent
from asyncrl.telemetry.trace import assign_rows, write_trace


def record_some(steps: int = 3) -> Recorder:
    now = [50.0]
    recorder = Recorder(lambda: now[0])
    for step in range(steps):
        with recorder.wait("train pump", "a whole group", on="score pump", cause="group"):
            with recorder.span("decode", track="lane:cpu", batch=step, odd={1, 2}, nan=float("nan")):
                now[0] += 0.25
        recorder.instant("step <done>", track="train pump", version=step)
    return recorder


def test_file_is_valid_json_with_microseconds_and_track_names(tmp_path: Path) -> None:
    recorder = record_some()
    write_trace(recorder, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    events: list[dict[str, Any]] = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(names.values()) == ["lane:cpu", "train pump"]
    spans = [e for e in events if e["ph"] == "X"]
    decodes = [e for e in spans if e["name"] == "decode"]
    assert [(e["ts"], e["dur"], names[e["tid"]]) for e in decodes] == [
        (n * 250_000.0, 250_000.0, "lane:cpu") for n in range(3)
    ]
    assert [e["args"]["batch"] for e in decodes] == [0, 1, 2]
    assert decodes[0]["args"]["nan"] is None
    waits = [e for e in spans if e["cat"] == "wait"]
    assert waits[0]["args"] == {"what": "a whole group", "on": "score pump", "cause": "group"}
    assert all(e["s"] == "t" for e in events if e["ph"] == "i")
    assert trace["otherData"]["dropped_events"] == 0


def test_an_empty_trace_is_valid_too(tmp_path: Path) -> None:
    write_trace(Recorder(), tmp_path / "trace.json")
    assert [e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]] == ["process_name"]


def test_a_failed_write_leaves_the_earlier_trace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    write_trace(record_some(1), path)
    before = path.read_bytes()

    def full(value: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrl.telemetry.trace.dump", full)
    with pytest.raises(OSError, match="No space"):
        write_trace(record_some(2), path)
    assert path.read_bytes() == before


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(SPANS)
def test_spans_of_one_row_are_apart_or_nested(spans: list[tuple[int, int]]) -> None:
    events = [TraceEvent("X", str(n), "t", float(a), float(d), None) for n, (a, d) in enumerate(spans)]
    rows = assign_rows(events)
    assert len(rows) == len(events)
    one_by_one = [TraceEvent("X", str(n), "t", float(n), 1.0, None) for n in range(len(spans))]
    assert set(assign_rows(one_by_one).values()) <= {0}, "one row is enough where none overlap"
    for one in events:
        for other in events:
            if one is other or rows[id(one)] != rows[id(other)]:
                continue
            (a, b), (c, d) = ((e.start, e.start + e.duration) for e in (one, other))
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


def test_groups_share_tracks_and_say_who_they_are(tmp_path: Path) -> None:
    now = [0.0]
    recorder = Recorder(lambda: now[0])
    for group in range(200):
        for who in (f"group {group}", f"rollout group {-group}", "reward worker 1"):
            with recorder.wait(who, "a slot", on="publish pump", cause="slots"):
                assert recorder.active_waits()[-1].who == who
                now[0] += 0.1
    with (
        recorder.wait("group 1", "one", on="x", cause="reward"),
        recorder.wait("group 2", "other", on="x", cause="reward"),
    ):
        now[0] += 0.1
    write_trace(recorder, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"groups", "reward worker 1", "rollout groups"}
    assert {event["args"].get("who") for event in events} >= {"group 0", "group 199", "rollout group -199"}
