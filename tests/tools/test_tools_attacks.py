"""Spoilt records and requests against a live run, in the short form of `tools/attack_records.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs the extra [http]")
ROOT = Path(__file__).resolve().parents[2]


def test_no_record_ends_a_run_stays_in_its_ring_or_is_refused_without_a_name() -> None:
    command = [sys.executable, str(ROOT / "tools" / "attack_records.py"), "--requests", "1500", "--steps", "100"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == {} and result["runs"] >= 1 and result["steps"] >= 100
    assert min(result["sent"][door] for door in ("ring", "http", "submit")) > 100
    assert min(result["refused"][door] for door in ("ring", "http", "submit")) > 100
