"""`asyncrl prompts`: what is asked for wrongly is said, and nothing is trained. (What it shows: tests/runtime.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli.app import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.yaml", "-n"], "-n is ''; expected a number of prompts"),
        (["x.yaml", "-n", "0"], "-n is '0'; expected a number of prompts"),
        (["gone.yaml"], "gone.yaml does not exist"),
        (["x.yaml"], "data.train is not set"),
        (["x.yaml", "data.chat_template_kwargs=3"], "data.chat_template_kwargs is 3"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: {path: nowhere}\n")
    assert main(["prompts", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts"]) == 2 and main(["prompts", "--help"]) == 0
    assert "usage: asyncrl prompts CONFIG.yaml" in capsys.readouterr().out
