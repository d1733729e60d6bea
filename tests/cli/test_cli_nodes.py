"""`asyncrl nodes RUN` of runs that are alive, killed, ended, or have one rank. Whole runs: tests/runtime/test_runtime_lost.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.nodes import main

NODE = {
    "rank": 0,
    "machine": "node-1",
    "role": "trains",
    "version": 7,
    "groups": None,
    "tokens_per_s": None,
    "lost": None,
}


@pytest.mark.parametrize(
    ("age_s", "ended", "said"),
    [
        (1.0, None, ""),
        (60.0, None, "written 60 s ago; a live run writes every 5 s: the run was killed, or hangs\n"),
        (-9.0, "completed", "the run ended less than 1 s ago: completed\n"),
        (60.0, "run ended: RankLost", "the run ended 60 s ago: run ended: RankLost\n"),
    ],
)
def test_a_list_says_how_old_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age_s: float, ended: Any, said: str
) -> None:
    written = time.time() - age_s
    nodes = [
        {**NODE, "seen": written},
        {
            **NODE,
            "rank": 1,
            "machine": None,
            "role": "generates",
            "groups": 3,
            "tokens_per_s": 1234.5,
            "seen": written - 2,
        },
        {**NODE, "rank": 2, "seen": None},
        {**NODE, "rank": 3, "machine": None, "version": None, "seen": None},
    ]
    state = {"written": written, "every_s": 5.0, "ended": ended, "nodes": nodes}
    (tmp_path / "config.yaml").touch()
    (tmp_path / "nodes.json").write_text(json.dumps(state))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "rank  machine  role       version  groups  tokens/s  last sign of life\n"
        "0     node-1   trains     7        -       -         now\n"
        "1     -        generates  7        3       1,234     2 s ago\n"
        "2     node-1   trains     7        -       -         has left\n"
        "3     -        trains     -        -       -         never\n" + said
    )
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == state


def test_what_is_no_run_of_several_ranks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not a run directory: it has no config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main([str(tmp_path)]) == 2
    assert "has no nodes.json: the run has one rank, or has not started yet" in capsys.readouterr().err
