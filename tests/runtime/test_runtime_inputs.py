"""What is wrong with a run's inputs is told before anything is made or loaded, all at once, and in a dry run too."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import DRY, MODEL, REAL, metrics_of, write_yaml

from asyncrl.main import main

NEVER = {"path": f"{MODEL}:build_never"}  # raises: the model may not be asked for


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_everything_that_is_missing_is_named_at_once_and_nothing_is_made(
    here: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    tree = REAL | {
        "model": {"path": "./nope"},
        "data": {"train": "nope.jsonl", "eval": "no_eval.parquet", "max_prompt_tokens": 12},
        "evaluate": {"every": 1},
        "reward": ["nope.py:reward", f"{MODEL}:share"],
        "rollout": REAL["rollout"] | {"environment": "play.py:Play"},
    }
    assert main([str(write_yaml(here, tree)), *more]) == 2
    error = capsys.readouterr().err
    for words in (
        "model.path: there is no directory './nope'",
        "data.train: the prompt file nope.jsonl does not exist",
        "data.eval: the prompt file no_eval.parquet does not exist",
        "reward.functions: there is no file nope.py",
        "rollout.environment: there is no file play.py",
    ):
        assert words in error
    assert error.count("\n") == 5 and not (here / "runs").exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"reward": f"{MODEL}:shar"}, "did you mean 'share'"),
        ({"rollout": REAL["rollout"] | {"environment": f"{MODEL}:Thinkin"}}, "did you mean 'Thinking'"),
        ({"data": REAL["data"] | {"train": "empty.jsonl"}}, "empty.jsonl holds no rows"),
        (
            {"data": REAL["data"] | {"train": "other.jsonl"}},
            "other.jsonl row 1 has no column 'prompt'; found question",
        ),
        ({"data": REAL["data"] | {"train": f"{MODEL}:row"}}, "has no 'row'; did you mean 'rows'"),
        ({"model": {"path": f"{MODEL}:buil"}}, "has no 'buil'; did you mean 'build'"),
    ],
)
def test_it_is_told_without_the_model(
    here: Path, capsys: pytest.CaptureFixture[str], setting: dict[str, Any], words: str, more: list[str]
) -> None:
    (here / "empty.jsonl").write_text("")
    (here / "other.jsonl").write_text('{"question": "?"}\n')
    assert main([str(write_yaml(here, REAL | {"model": NEVER} | setting)), *more]) == 2
    assert words in capsys.readouterr().err


def test_a_mistake_does_not_stand_in_the_way_of_its_correction(here: Path) -> None:
    """Nor does it cost the run that was there."""
    (here / "rows.jsonl").write_text('{"prompt": "a3="}\n' * 8)
    file = str(write_yaml(here, DRY))
    assert main([file, "train.max_steps=2"]) == 0
    assert main([file, "run.overwrite=true", "data.train=row.jsonl"]) == 2
    assert len(metrics_of(here / "runs/run")) == 2
    assert main([file, "run.overwrite=true", "data.train=rows.jsonl"]) == 0
    assert len(metrics_of(here / "runs/run")) == 3


@pytest.mark.parametrize("path", ["./nope", "runs/nope", "~/nope-of-asyncrl", "/nope", "a/b/c", "run.yaml"])
def test_a_path_that_looks_local_is_not_looked_for_on_the_hub(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **more: asked.append(address))
    (here / "runs").mkdir()
    for setting in ("model.path", "model.tokenizer"):
        assert main([str(write_yaml(here, REAL)), f"model.path={MODEL.parent}", f"{setting}={path}"]) == 2
        assert f"{setting}: there is no directory '{path}'" in capsys.readouterr().err
    assert asked == []


def test_files_are_read_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inside = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return inside(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    (here / "rows.jsonl").write_text('{"prompt": "a3=", "answer": "a"}\n' * 8)
    assert main([str(write_yaml(here, REAL)), "data.train=rows.jsonl", "train.max_steps=1"]) == 0
    assert read.count("rows.jsonl") == 1
