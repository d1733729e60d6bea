"""`asyncrl report RUN`: `report.html` of a run, now: while it runs as well, and of one that died."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

USAGE = (
    "asyncrl report RUN: write report.html of a run directory (`runs/NAME`, or NAME for short), whatever state it is in"
)


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0, or 2 where there is no run of that name."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2

    from asyncrl.telemetry.report import write_report
    from asyncrl.telemetry.sinks import each_row

    given = Path(arguments[0])
    run = next((path for path in (given, "runs" / given) if (path / "config.yaml").exists()), None)
    if run is None:
        beside = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
        known = f"runs/ holds {', '.join(beside)}" if beside else "runs/ holds none"
        print(f"asyncrl report: {given} is no run directory (it has no config.yaml); {known}", file=sys.stderr)
        return 2
    try:
        last = deque(each_row(run / "metrics.jsonl"), maxlen=1)
        reached = f"version {last[0].get('step')}" if last else "no step yet"
        path = write_report(run, result=f"as of {time.strftime('%Y-%m-%d %H:%M:%S')}: {reached}")
    except OSError as error:
        print(f"asyncrl report: {error}", file=sys.stderr)
        return 2
    print(
        f"{path}: {reached}"
        + ("" if (run / "trace.json").exists() else "; the timeline comes with trace.json, at the end")
    )
    return 0
