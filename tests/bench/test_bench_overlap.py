"""`asyncrl bench overlap`: through the whole tool on short steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.telemetry.machine import describe_cpu
from asyncrl_bench.app import main
from asyncrl_bench.overlap import Pace


def test_the_whole_tool_on_short_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", "--quick", "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr().out
    assert "| two devices, step to the longer lane |" in seen
    written = json.loads((tmp_path / "bench_overlap.json").read_text())
    assert seen.endswith(f"measured on {describe_cpu()}\n") and written["cpu"] == describe_cpu()
    assert written["command"] == "asyncrl bench overlap --quick"
    for name, runs in written["runs"].items():
        for run in runs:  # a lane never does more than the clock allows, but for what runs at the edges of the window
            work = run["decode"] + run["train"] if name == "one device" else max(run["decode"], run["train"])
            assert 1.2 * run["step"] >= work > 0
    assert written["train_token_s"] > 0


def test_what_a_step_is_compared_with() -> None:
    pace = Pace(step=1.2, decode=1.0, train=0.5, tokens=10.0)
    assert pace.to_longer == pytest.approx(1.2) and pace.to_sum == pytest.approx(0.8)
