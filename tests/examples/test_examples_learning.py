"""The learning comparison: its quick form as its user runs it, and what it holds against a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

from asyncrl.algorithms.registry import LOSSES

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "learning_comparison.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import learning_comparison

    return learning_comparison


@pytest.mark.slow
def test_a_loss_learns_and_one_with_a_wrong_clip_does_not(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "subprocess", warm.in_place_of_subprocess())
    words = ["--quick", "--out", str(tmp_path), "--runs", str(tmp_path / "runs.jsonl")]
    monkeypatch.setattr(sys, "argv", ["learning_comparison", *words])
    assert tool.main() == 0, capsys.readouterr().out
    right, wrong = json.loads((tmp_path / "learning_comparison.json").read_text())["runs"]
    assert right["result"]["reached"] < tool.QUICK and any(right["result"]["clip"])
    assert wrong["result"]["reached"] is None and wrong["result"]["reward"][-1] < 0.4
    assert "| dapo |" in (text := (tmp_path / "learning_comparison.md").read_text()) and "fails, as it must" in text
    capsys.readouterr()
    done = subprocess.run([sys.executable, str(TOOL), *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "s of CPU" not in done.stdout.partition("# Every")[0]  # everything is in the file


def test_every_loss_is_compared_in_both_modes_with_three_seeds(tool: Any) -> None:
    runs = {(job.name, job.mode, job.seed) for job in tool.jobs(quick=False) if job.part == "loss"}
    assert {(name, mode, seed) for name in LOSSES for mode in tool.MODES for seed in (0, 1, 2)} <= runs
    assert "force_on_policy" in {name for name, _, _ in runs}
    assert len({job.key for job in tool.jobs(quick=False)}) == len(tool.jobs(quick=False))


@pytest.mark.parametrize(
    ("part", "result", "words"),
    [
        ("loss", {"reached": 40, "reward": [0.8] * 40, "clip": [0.1] * 40}, None),
        ("loss", {"reached": None, "reward": [0.5] * 150, "clip": [0.1] * 150}, "at 0.50 after"),
        ("loss", {"reached": None, "reward": [0.9] * 150, "clip": [0.0] * 150}, "nothing was ever clipped"),
        (
            "wrong",
            {"reached": 40, "reward": [0.8] * 40, "clip": [0.1] * 40},
            "learned in 40 batches, with a wrong clip",
        ),
        ("wrong", {"reached": None, "reward": [0.1] * 150, "clip": [0.1] * 150}, None),
    ],
)
def test_what_is_held_against_a_run(tool: Any, part: str, result: dict[str, Any], words: str | None) -> None:
    job = tool.Job(part, "dapo", "sync", 0, [], needs_clip=part == "loss", result=result)
    assert (job.complaint is None) if words is None else (words in job.complaint)
