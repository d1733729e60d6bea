"""Optional packages beside folders of their names, and text files that are the same whatever the locale."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from asyncrl.config.imports import installed
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_a_folder_of_a_package_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as wandb makes one in the directory where it runs. The working directory comes first, as under `python -m`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("yaml", "not_installed_anywhere", "of_the_user"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("")
    (tmp_path / "of_the_user/__init__.py").write_text("")
    assert installed("yaml") and not installed("not_installed_anywhere")
    with pytest.raises(
        ConfigError, match=f"the folder {tmp_path}/of_the_user hides the package of_the_user; rename it"
    ):
        installed("of_the_user")
    assert "not_installed_anywhere" not in sys.modules


def in_the_locale_s_encoding(file: Path) -> list[str]:
    """Calls that read or write text without saying in which encoding."""
    found = []
    for call in (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        of_os = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "os"
        modes = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        text = (name == "read_text" and not call.args) or (name == "write_text" and len(call.args) == 1)
        text |= (
            name == "open" and not of_os and any(mode in ("r", "w", "a", "x", "r+") for mode in modes)
        ) or name == "fdopen"
        text |= isinstance(call.func, ast.Name) and name == "open" and len(call.args) == 1
        if text and "encoding" not in {keyword.arg for keyword in call.keywords}:
            found.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    return found


@pytest.mark.parametrize("folder", ["asyncrl", "tools", "examples", "client"])
def test_text_is_utf8_whatever_the_locale(folder: str) -> None:
    assert [place for file in sorted((ROOT / folder).rglob("*.py")) for place in in_the_locale_s_encoding(file)] == []
