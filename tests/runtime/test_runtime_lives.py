"""Runs that are ended at random moments, and go on: the short form of tools/attack_runs.py, which looks at what they leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("kind", "how"), [("1", "KILL all"), ("2", "INT")])
def test_what_a_run_leaves_is_whole_and_exact(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import attack_runs
    import warm

    monkeypatch.setattr(attack_runs, "subprocess", warm.in_place_of_subprocess())
    counts = attack_runs.attack(
        2, [kind], [how], seed=5, keep=tmp_path
    )  # the second one goes on where the first one ended
    assert counts == {f"{kind}, {how}": 2}, capsys.readouterr().out
    sys.modules.pop("attack_runs")
