"""Writes `trace.json` in the Chrome trace format, for https://ui.perfetto.dev or chrome://tracing.

The file is one JSON object with `traceEvents`: the metadata events (`M`), then the events of `Recorder.events`, one per line.
Times are microseconds since the recorder started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from .recorder import LANE_PREFIX, Recorder
from .records import TraceEvent


def assign_rows(events: Iterable[TraceEvent]) -> dict[int, int]:
    """The row number of each span of one track, from 0, by `id(event)`. A row becomes a thread of the trace format.

    In the trace format, spans of one thread must be nested or disjoint. Spans of coroutines overlap in other ways, so a track may
    need several rows. Each span gets the first row where it fits."""
    # For each row the ends of the spans that are open when the current span starts, outermost first.
    rows: list[list[float]] = []
    row_of: dict[int, int] = {}
    for event in sorted(events, key=lambda span: (span.start, -span.duration)):
        end = event.start + event.duration
        number = 0
        while number < len(rows):
            open_ends = rows[number]
            while open_ends and open_ends[-1] <= event.start:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                break
            number += 1
        else:
            rows.append([])
        rows[number].append(end)
        row_of[id(event)] = number
    return row_of


def write_trace(recorder: Recorder, path: Path) -> None:
    """Write all recorded events, atomically. First waits for the devices. Blocks for about a second: call it off the event loop."""
    recorder.finish_devices()
    events = recorder.events()
    by_track: dict[str, list[TraceEvent]] = {}
    for event in events:
        by_track.setdefault(event.track, []).append(event)
    tid_of: dict[int, int] = {}  # by id(event)
    metadata: list[dict[str, Any]] = [_meta("process_name", 0, {"name": "asyncrl"})]
    next_tid = 1
    # The tracks of lanes come first.
    for track in sorted(by_track, key=lambda track: (not track.startswith(LANE_PREFIX), track)):
        spans = [event for event in by_track[track] if event.phase == "X"]
        rows = assign_rows(spans)
        count = max(rows.values(), default=0) + 1
        for row in range(count):
            name = track if row == 0 else f"{track} #{row + 1}"
            metadata.append(_meta("thread_name", next_tid + row, {"name": name}))
            metadata.append(_meta("thread_sort_index", next_tid + row, {"sort_index": next_tid + row}))
        for event in by_track[track]:
            tid_of[id(event)] = next_tid + rows.get(id(event), 0)
        next_tid += count
    other = {
        "started_unix": recorder.started_unix,
        "dropped_events": recorder.dropped_events,
        "clock": "microseconds since start",
    }
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps(other) + b',"traceEvents":[\n')
        file.write(b",\n".join(dump(entry) for entry in metadata))
        for entry in _entries(events, tid_of, recorder.started):
            file.write(b",\n" + dump(entry))
        file.write(b"\n]}\n")
    os.replace(partial, path)


def _meta(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": tid, "args": args}


def _entries(events: list[TraceEvent], tid_of: dict[int, int], started: float) -> Iterator[dict[str, Any]]:
    for event in events:
        entry: dict[str, Any] = {"ph": event.phase, "name": event.name, "pid": 0}
        entry["ts"] = round((event.start - started) * 1e6, 3)
        entry["tid"] = tid_of[id(event)]
        if event.phase == "X":
            entry["dur"] = round(event.duration * 1e6, 3)
            entry["cat"] = "wait" if event.args and "cause" in event.args else "span"
        else:
            entry["s"] = "t"
        if event.args:
            entry["args"] = event.args
        yield entry


def dump(value: Any) -> bytes:
    """JSON in one line. NaN becomes null. Unknown types, and integers above 64 bits, become text. TypeError for lone surrogates."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=str, option=option)
    except TypeError:
        return orjson.dumps(_large_as_text(value), default=str, option=option)


def _large_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {_large_as_text(key): _large_as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_large_as_text(item) for item in value]
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value
