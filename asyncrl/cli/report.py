"""`asyncrl report RUN`: writes `report.html` of a run. The run may be alive, finished or dead."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

USAGE = "asyncrl report RUN: write report.html of a run directory (`runs/NAME`, or NAME for short), alive or dead"


def main(arguments: Sequence[str]) -> int:
    """Write the report. Exit codes: 0; 2 for wrong arguments, an unknown run, or a report that cannot be written."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2

    from asyncrl.telemetry.report import write_report
    from asyncrl.telemetry.sinks import each_row

    name = Path(arguments[0])
    run = next((path for path in (name, "runs" / name) if (path / "config.yaml").exists()), None)
    if run is None:
        runs = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
        known = f"runs/ holds {', '.join(runs)}" if runs else "runs/ has no run directory"
        print(f"asyncrl report: {name} is not a run directory (it has no config.yaml); {known}", file=sys.stderr)
        return 2
    try:
        last_rows = deque(each_row(run / "metrics.jsonl"), maxlen=1)
        reached = f"version {last_rows[0].get('step')}" if last_rows else "no step yet"
        path = write_report(run, result=f"as of {time.strftime('%Y-%m-%d %H:%M:%S')}: {reached}")
    except OSError as error:
        print(f"asyncrl report: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {reached}")
    return 0
