"""A fault while a run ends: the short form of tools/chaos phases, which also plays the life after it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_whose_disk_is_full_at_its_end_says_so_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import warm
    from chaos import runs
    from chaos.phases import meet

    monkeypatch.setattr(runs, "subprocess", warm.in_place_of_subprocess())
    with runs.adopting():
        assert meet(tmp_path, 1, "disk full", "stage writing the last metrics") == []
