"""The sides of a benchmark are started from a process that has loaded torch: see tests/warm.py.

They start as their user starts them in test_bench_transport (a bench that is stopped) and in tests/cli (the installed benchmarks).
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import warm

from asyncrl_bench.job import PEERS

TRL = ([sys.executable, str(PEERS / name)] for name in ("trl_step.py", "trl_agents.py"))
SIDES = ([sys.executable, "-m", "asyncrl_bench.child"], *TRL)


def start(words: list[str], **more: Any) -> subprocess.Popen[Any]:
    ours = any(words[: len(side)] == side for side in SIDES)
    return warm.of_a_tool(words, **more) if ours else subprocess.Popen(words, **more)


@pytest.fixture(autouse=True)
def warm_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = vars(warm.in_place_of_subprocess()) | {"Popen": start}
    monkeypatch.setattr("asyncrl_bench.processes.subprocess", SimpleNamespace(**replaced))
