"""asyncrl's own sides of a benchmark are started from a process that has loaded torch: see tests/warm.py.

They start as their user starts them in test_bench_transport (a bench that is stopped) and in tests/cli (the installed benchmarks).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import warm

# The bench sets them for all sides. They are read while modules are loaded, and here they decide nothing: one thread is what torch
# is told as well, and models are directories.
SET = ("MKL_NUM_THREADS", "HF_HUB_OFFLINE")


def start(words: Sequence[str], *, env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    if list(words[:3]) != [sys.executable, "-m", "asyncrl_bench.child"]:
        return subprocess.Popen(words, env=env, **more)
    kept = {name: value for name, value in env.items() if name not in SET}
    return warm.Popen(words, env=kept | {name: os.environ[name] for name in SET if name in os.environ}, **more)


@pytest.fixture(autouse=True)
def warm_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: getattr(subprocess, name) for name in ("PIPE", "STDOUT", "TimeoutExpired", "run")}
    monkeypatch.setattr("asyncrl_bench.processes.subprocess", SimpleNamespace(Popen=start, **names))
