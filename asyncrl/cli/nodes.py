"""`asyncrl nodes RUN`: lists the ranks of a run as its nodes.json has them. Rank 0 rewrites this file until the run ends."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Print one line per rank. Exit codes: 0; 2 if there is no such run or no nodes.json. A run with one rank has no nodes.json."""
    parser = argparse.ArgumentParser(prog="asyncrl nodes", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory (`runs/NAME`, or NAME for short)")
    parser.add_argument("--json", action="store_true", help="print the run's nodes.json as it is")
    options = parser.parse_args(list(arguments))
    name = Path(options.run)
    run = next((path for path in (name, "runs" / name) if (path / "config.yaml").exists()), None)
    if run is None:
        print(f"asyncrl nodes: {name} is not a run directory: it has no config.yaml", file=sys.stderr)
        return 2
    try:
        text = (run / "nodes.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        print(f"asyncrl nodes: {run} has no nodes.json: the run has one rank, or has not started yet", file=sys.stderr)
        return 2
    if options.json:
        print(text)
        return 0
    state = json.loads(text)
    now = time.time()
    titles = ("rank", "machine", "role", "version", "groups", "tokens/s", "last sign of life")
    rows = [titles, *(_row(node, state["written"]) for node in state["nodes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    age_s = now - state["written"]
    if state["ended"]:
        print(f"the run ended {_ago(age_s) if age_s >= 1 else 'less than 1 s ago'}: {state['ended']}")
    elif age_s > 3 * state["every_s"] + 5:
        print(f"written {_ago(age_s)}; a live run writes every {state['every_s']:g} s: the run was killed, or hangs")
    return 0


def _row(node: Mapping[str, Any], written: float) -> tuple[str, ...]:
    seen = ("has left" if node["machine"] else "never") if node["seen"] is None else _ago(written - node["seen"])
    if node["lost"]:
        at = time.strftime("%H:%M:%S", time.localtime(node["seen"]))
        seen = f"lost at {at}: {node['lost']}"
    numbers = ("-" if node[name] is None else f"{node[name]:,.0f}" for name in ("version", "groups", "tokens_per_s"))
    return str(node["rank"]), node["machine"] or "-", node["role"], *numbers, seen


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{seconds:.0f} s ago"
