"""`asyncrl bench nodes`: through the whole tool, on few ranks."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl_bench.app import main


def test_the_ledger_over_the_line_is_measured(tmp_path: Path) -> None:
    assert main(["nodes", "--quick", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "nodes.json").read_text())
    [run] = written["ledger"]
    assert (run["ranks"], run["live"]) == (2, 10) and run["per_s"] > 100 and run["cpu_us"] > 0
    assert run["latency_ms"][0] <= run["latency_ms"][1]
    assert "transitions/s" in (tmp_path / "nodes.md").read_text()
