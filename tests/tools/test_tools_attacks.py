"""Spoilt records and requests against a live run, and killed workers, in the short forms of the tools that attack."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import warm

pytest.importorskip("aiohttp", reason="needs the extra [http]")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_record_ends_a_run_stays_in_its_ring_or_is_refused_without_a_name() -> None:
    command = [sys.executable, str(ROOT / "tools/chaos/__main__.py"), "records", "--requests", "1500", "--steps", "100"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.run(command, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == {} and result["runs"] >= 1 and result["steps"] >= 100
    assert min(result["sent"][door] for door in ("ring", "http", "submit")) > 100
    assert min(result["refused"][door] for door in ("ring", "http", "submit")) > 100


@pytest.mark.slow
def test_a_run_outlives_its_workers_and_nothing_outlives_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from chaos import runs, workers

    monkeypatch.setattr(runs, "subprocess", warm.in_place_of_subprocess())
    parser = argparse.ArgumentParser()
    workers.add_options(parser)
    options = parser.parse_args(["--lives", "1", "--blows", "1", "--signals", "KILL", "--ends", "TERM"])
    with runs.adopting():
        counts = workers.attack(options, tmp_path)
    assert counts == {"node, SIGTERM": 1, "worker, SIGKILL": 1}, capsys.readouterr().out
