"""Runs that are ended at random moments, and go on: the short form of tools/chaos runs, which looks at what they leave."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# With each push test_runtime_signals ends two ranks and their launcher, and test_runtime_resume kills a run.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("1", "KILL all"), ("2", "INT"), ("2", "KILL launcher")])
def test_what_a_run_leaves_is_whole_and_exact(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import warm
    from chaos import runs

    monkeypatch.setattr(runs, "subprocess", warm.in_place_of_subprocess())
    plan = Namespace(lives=2, kinds=[kind], signals=[how], seed=5, minutes=60.0, early=0.0)
    with runs.adopting():  # the second life goes on where the first one ended
        counts = runs.attack(plan, tmp_path)
    assert counts == {f"{kind}, {how}": 2}, capsys.readouterr().out
