"""`asyncrl bench endpoint --quick`, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_bench.app import main

pytest.importorskip("aiohttp", reason="needs the extra [http]")


def test_both_sides_are_measured(tmp_path: Path) -> None:
    assert main(["endpoint", "--quick", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "bench_endpoint.json").read_text())
    assert all(rate > 0 for rates in written["tokens_per_s"].values() for rate in rates) and written["ratio"] > 0
