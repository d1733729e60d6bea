"""Runs whose ranks or whose links are attacked, in the short forms of the tools."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.mark.slow
def test_a_link_between_two_hosts_drops_and_comes_back_or_is_cut() -> None:
    from chaos import link

    if why := link.refused():
        pytest.skip(f"needs two network namespaces: {why}")
    program = [sys.executable, str(ROOT / "tools/chaos/__main__.py"), "link", "--warm"]
    command = [*program, "--steps", "16", "--cases", "drops", "cut"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "moment", "fault", "joined"),
    [
        ("prompts/next", "sent", "SIGKILL", False),
        ("ledger admit", "sent", "SIGSTOP", False),
        ("group", "handles", "SIGKILL", False),
        ("evaluate", "handles", "SIGKILL", False),
        ("weights/broadcast", "handles", "SIGSTOP", False),
        ("weights/wrote", "sent", "SIGKILL", False),
        ("run/ended", "handles", "SIGKILL", False),
        ("ledger begin", "sent", "SIGKILL", True),
        ("weights/broadcast", "handles", "SIGSTOP", True),
        ("group", "sent", "CUT", True),
    ],
)
def test_a_rank_is_lost_at_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, moment: str, fault: str, joined: bool
) -> None:
    """Every message: `tools/chaos nodes`."""
    from chaos import nodes

    monkeypatch.setattr(nodes, "subprocess", warm.in_place_of_subprocess())
    parser = argparse.ArgumentParser()
    nodes.add_options(parser)
    chosen = ["--messages", message, "--moments", moment, "--faults", fault]
    counts = nodes.attack(parser.parse_args(chosen + ["--joined"] * joined), tmp_path)
    assert counts == {f"{message}{' of a joined node' * joined}, {moment}, {fault}": 1}
