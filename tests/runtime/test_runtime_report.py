"""`asyncrl report`: of a run that runs, of one that died, and of none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runtime_helpers import DRY, Process, lines_at_least, write_yaml

from asyncrl.cli.app import main

REWARD = "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def shown(page: Path) -> dict[str, object]:
    """The data of the page."""
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def test_a_run_that_runs_and_then_dies_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n' * 8)
    tree = {**DRY, "reward": "rewards.py:length", "run": {"name": "long"}}
    tree |= {"data": {**DRY["data"], "train": "train.jsonl"}, "train": {**DRY["train"], "max_steps": 1_000_000}}
    run = tmp_path / "runs" / "long"
    process = Process(tmp_path, str(write_yaml(tmp_path, tree)))
    monkeypatch.chdir(tmp_path)
    try:
        process.wait_until(lines_at_least(run, 3), "three lines")
        assert main(["report", "long"]) == 0
        said = capsys.readouterr().out
        assert "report.html: version " in said and "at the end" in said
        running = shown(run / "report.html")
        assert len(running["steps"]) >= 3 and running["name"] == "long"  # type: ignore[arg-type]
        assert re.match(r"as of \d{4}-.*: version \d+$", str(running["result"]))
        process.wait_until(lines_at_least(run, len(running["steps"]) + 1), "another line")  # type: ignore[arg-type]
    finally:
        process.kill()
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert len(shown(run / "report.html")["steps"]) > len(running["steps"])  # type: ignore[arg-type]


def test_no_such_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "mine"]) == 2
    assert "mine is no run directory (it has no config.yaml); runs/ holds none" in capsys.readouterr().err
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "config.yaml").write_text("{}")
    assert main(["report", "mine"]) == 2
    assert "runs/ holds other" in capsys.readouterr().err
    assert main(["report", "other"]) == 0  # it ended before its first step
    assert "no step yet" in capsys.readouterr().out
    assert main(["report"]) == 2
