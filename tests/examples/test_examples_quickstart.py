"""The main job, whole, as its user runs it: it learns, with real staleness, and its time is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The goal is 0.9 (tools/quickstart_curves.py); arrival order differs from run to run, so a test leaves room. Recorded runs end
# between 0.908 and 0.990 over their last 20 steps; over the last 5, between 0.854 and 0.991.
LEARNED = 0.85


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    directory = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "asyncrl.main", str(ROOT / "examples/quickstart.yaml"), f"run.dir={directory}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "0 dropped, 0 failed" in done.stdout
    text = (directory / "quickstart/metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "reward/mean" in line]


def test_the_reward_rises(lines: list[dict[str, float]]) -> None:
    first, last = (sum(line["reward/mean"] for line in part) / len(part) for part in (lines[:5], lines[-20:]))
    assert first < 0.7
    assert last >= LEARNED


def test_training_is_asynchronous_and_its_age_is_bounded(lines: list[dict[str, float]]) -> None:
    assert 1 <= max(line["staleness/max"] for line in lines) <= 2
    tokens = sum(line["train/tokens"] for line in lines)
    assert sum(line["staleness/spanning_token_share"] * line["train/tokens"] for line in lines) / tokens >= 0.2


def test_idle_time_is_explained(lines: list[dict[str, float]]) -> None:
    assert max(line["idle/unexplained"] for line in lines[1:]) <= 0.02
