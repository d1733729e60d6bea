"""What a recorder in another process has recorded, for the one of the run. Both clocks are the machine's monotonic one.

A parcel is JSON: {"busy": [[name, start, end]], "idle": [[cause, start, end]], "counts": {}, "samples": {}}.
Spans and waits that are still open come whole with a later parcel. Gauges stay behind: the last of several processes to speak
would be taken for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recorder import Recorder
from .samples import Samples


def pack(recorder: Recorder) -> dict[str, Any]:
    """What `recorder`, which keeps no trace and has one lane, has recorded since the last time."""
    window = recorder.take_window()
    counts, _, samples = recorder.take_metrics()
    return {
        "busy": [[each.label, each.start, each.end] for each in window.busy if each.end < window.end],
        "idle": [[each.label, each.start, each.end] for each in window.idle if each.end < window.end],
        "counts": counts,
        "samples": {name: entry.state() for name, entry in samples.items()},
    }


def unpack(recorder: Recorder, parcel: Mapping[str, Any], lane: str) -> None:
    """Book it as that of `lane`: its closures are a track of the trace, and what it waited for is its own idle time."""
    for name, start, end in parcel["busy"]:
        recorder.book_busy(lane, name, start, end)
    for cause, start, end in parcel["idle"]:
        recorder.book_idle(lane, cause, start, end)
    for name, by in parcel["counts"].items():
        recorder.count(name, by)
    for name, state in parcel["samples"].items():
        recorder.merge(name, Samples.of(state))
