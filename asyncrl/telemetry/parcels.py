"""Parcels carry the records of a worker's recorder to the recorder of the run. Both use the monotonic clock of the machine.

A parcel is JSON: {"busy": [[name, start, end]], "idle": [[cause, start, end]], "counts": {}, "samples": {}}.
Spans and waits that are still open are sent with a later parcel. Gauges are not sent, because the values of several workers
would overwrite each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recorder import REMOTE_DELAY_S, Recorder
from .samples import Samples


def take_parcel(recorder: Recorder) -> dict[str, Any]:
    """The records since the last call, of a recorder without a trace and with one lane."""
    window = recorder.take_window()
    counts, _, samples = recorder.take_metrics()
    # Intervals that end with the window are still open.
    busy = [interval for interval in window.busy if interval.end < window.end]
    idle = [interval for interval in window.idle if interval.end < window.end]
    return {
        "busy": [[interval.label, interval.start, interval.end] for interval in busy],
        "idle": [[interval.label, interval.start, interval.end] for interval in idle],
        "counts": counts,
        "samples": {name: entry.to_json() for name, entry in samples.items()},
    }


def add_parcel(recorder: Recorder, parcel: Mapping[str, Any], lane: str) -> None:
    """Add a worker's records to `recorder`, as busy and idle time of `lane`."""
    for name, start, end in parcel["busy"]:
        recorder.add_remote_busy(lane, name, start, end)
    for cause, start, end in parcel["idle"]:
        recorder.idle(cause, start + REMOTE_DELAY_S, end + REMOTE_DELAY_S, lane)
    for name, value in parcel["counts"].items():
        recorder.count(name, value)
    for name, state in parcel["samples"].items():
        recorder.merge(name, Samples.from_json(state))
