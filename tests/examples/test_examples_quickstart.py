"""The main job, whole, as its user runs it: it learns, with real staleness, and its time is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Steps, and the reward of the last 20. Of all 300 the goal is 0.9 (tools/quickstart_curves.py). Arrival order differs from run to
# run, so a test leaves room: recorded runs end between 0.908 and 0.990, of 60 steps between 0.63 and 0.70. Without a reward to
# learn from it stays at 0.49 to 0.50.
LEARNED = [(60, 0.57), pytest.param((300, 0.85), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LEARNED, ids=lambda given: f"{given[0]}")
def lines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, float]]:
    directory, steps = tmp_path_factory.mktemp("runs"), request.param[0]
    words = [str(ROOT / "examples/quickstart.yaml"), f"run.dir={directory}", f"train.max_steps={steps}"]
    command = [sys.executable, "-m", "asyncrl.main", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "0 dropped, 0 failed" in done.stdout
    text = (directory / "quickstart/metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "reward/mean" in line]


def test_the_reward_rises(lines: list[dict[str, float]], request: pytest.FixtureRequest) -> None:
    first, last = (sum(line["reward/mean"] for line in part) / len(part) for part in (lines[:5], lines[-20:]))
    assert first < 0.55
    assert last >= request.node.callspec.params["lines"][1]


def test_training_is_asynchronous_and_its_age_is_bounded(lines: list[dict[str, float]]) -> None:
    assert 1 <= max(line["staleness/max"] for line in lines) <= 2
    tokens = sum(line["train/tokens"] for line in lines)
    assert sum(line["staleness/spanning_token_share"] * line["train/tokens"] for line in lines) / tokens >= 0.2


def test_idle_time_is_explained(lines: list[dict[str, float]]) -> None:
    assert max(line["idle/unexplained"] for line in lines[1:]) <= 0.02
