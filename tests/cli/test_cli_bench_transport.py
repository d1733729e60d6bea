"""`asyncrl bench transport`: every side really hands groups over; the figures themselves are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli.app import main


def test_every_side_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main(["bench", "transport", "--quick", "--tokens", "64", "--output", str(out)]) == 0
    rows = json.loads(out.read_text())
    sides = {(row["side"], row["loop"]) for row in rows}
    assert sides == {
        ("memcpy", ""),
        ("queue", ""),
        *((s, lp) for s in ("ring", "stash") for lp in ("asyncio", "uvloop")),
    }
    assert len(rows) == 2 * len(sides)
    for row in rows:
        assert 0 < row["p50_us"] <= row["p99_us"] and row["groups_per_s"] > 0
        assert row["bytes"] == 16 * 64 * 13
    assert "| 16 x 64 | full | ring uvloop |" in capsys.readouterr().out
