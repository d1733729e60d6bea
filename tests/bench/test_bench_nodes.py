"""`asyncrl bench nodes`: through the whole tool, on few ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_bench.app import main


@pytest.mark.slow
def test_the_ledger_groups_and_weights_are_measured(tmp_path: Path) -> None:
    assert main(["nodes", "--quick", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    written = json.loads((tmp_path / "nodes.json").read_text())
    [run] = written["ledger"]
    assert (run["ranks"], run["live"]) == (2, 10) and run["per_s"] > 100 and run["cpu_us"] > run["loop_us"] > 0
    assert run["latency_ms"][0] <= run["latency_ms"][1]
    assert {run["side"] for run in written["groups"]} == {"line", "queue"}
    assert all(run["groups_per_s"] > 0 and run["cpu_us"] > 0 for run in written["groups"])
    sent, sampled = written["weights"]
    assert len(sent["broadcast"]) == len(sent["bare"]) == 4 and sent["bytes"] == sent["sent"] > 0
    assert sampled["moves"] > 0 and sampled["step"] > 0 and sampled["bind"] > 0
    tables = (tmp_path / "nodes.md").read_text()
    assert "transitions/s" in tables and "| 16 x 256 | line |" in tables and "Ray is left out" in tables
