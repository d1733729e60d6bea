"""What a run must leave alone: directories of others, in its place, beside it and within it; links; homes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.runtime.directory import RunDirectory


def opened(place: Path, name: str, *more: str) -> tuple[RunDirectory, list[str]]:
    config = load_config((), [f"run.dir={place}", f"run.name={name}", *more])
    directory = RunDirectory(config)
    try:
        return directory, directory.open(config)
    except ConfigError:
        directory.close()
        raise


def life(place: Path, name: str = "exp") -> list[str]:
    """A run that commits a step, as it leaves its directory. Returns what it says of an older one."""
    directory, lines = opened(place, name, "run.overwrite=true")
    directory.rollouts.mkdir(exist_ok=True)
    (directory.rollouts / "step_1.jsonl").write_text("")
    directory.close()
    return lines


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "../a", "/a", "a/", "a\0b"])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name is .* expected the name of one directory in run\.dir"):
        load_config((), [f"run.name={name}"])
    assert load_config((), ["run.name=exp.2 ~ü"]).run.name == "exp.2 ~ü"


@pytest.mark.parametrize("within", ["seed1", "wandb", "checkpoints"])
def test_another_run_or_a_link_within_is_not_moved(tmp_path: Path, within: str) -> None:
    life(tmp_path)
    inner = tmp_path / "exp" / within
    if within == "checkpoints":
        inner.rmdir()
        (tmp_path / "larger disk").mkdir()
        inner.symlink_to(tmp_path / "larger disk")
    else:
        life(tmp_path / "exp", within)
    for _ in range(4):
        with pytest.raises(ConfigError, match=f"exp holds {within}, which is another run"):
            life(tmp_path)
    assert inner.exists() and sorted(os.listdir(tmp_path)) == ["exp", "larger disk"][: 1 + inner.is_symlink()]


def test_only_what_an_overwrite_has_moved_aside_is_removed(tmp_path: Path) -> None:
    others = ["exp.2", "exp.20260101-000000", "exp.20260101-000000-2"]
    for name in others:
        life(tmp_path, name)
    for _ in range(3):
        life(tmp_path)
    aside = sorted(each.name for each in tmp_path.iterdir() if each.name not in ("exp", *others))
    shutil.copytree(tmp_path / aside[0], tmp_path / "exp.20250101-000000")  # a copy for safe-keeping
    opened(tmp_path, aside[1], "resume=true", f"run.name={aside[1]}")[0].close()  # somebody goes on with it
    (tmp_path / aside[0] / "paper").mkdir()
    said = [line for _ in range(4) for line in life(tmp_path)]
    names = {each.name for each in tmp_path.iterdir()}
    assert names > {"exp", *others, *aside, "exp.20250101-000000"}
    assert any(f"{aside[0]}, an older one, stays: no run made its paper" in line for line in said)
    assert len(names) == 1 + len(others) + len(aside) + 1 + 2 and sum("removed" in line for line in said) > 0


@pytest.mark.parametrize("file", ["config.yaml", "report.html", "metrics.jsonl", "rollouts/step_1.jsonl", "trace.json"])
@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_files_that_no_run_wrote_are_not_written_over(tmp_path: Path, file: str, overwrite: str) -> None:
    mine = tmp_path / "exp" / file
    mine.parent.mkdir(parents=True)
    mine.write_text("run: {name: exp}")
    with pytest.raises(ConfigError, match=rf"exp is not the directory of a run .* over its {file.partition('/')[0]}"):
        opened(tmp_path, "exp", f"run.overwrite={overwrite}")
    assert mine.read_text() == "run: {name: exp}" and os.listdir(tmp_path) == ["exp"]


def test_a_run_under_another_name_is_not_moved(tmp_path: Path) -> None:
    life(tmp_path, "first")
    (tmp_path / "first").rename(tmp_path / "exp")
    with pytest.raises(ConfigError, match="holds the run 'first', not 'exp'"):
        life(tmp_path)


def test_a_link_to_a_larger_disk_stays_one(tmp_path: Path) -> None:
    real, runs = tmp_path / "large" / "experiment", tmp_path / "runs"
    real.mkdir(parents=True)
    runs.mkdir()
    (runs / "exp").symlink_to(real)
    for _ in range(5):
        life(runs)
    assert (runs / "exp").readlink() == real and os.listdir(runs) == ["exp"]
    assert (real / "rollouts/step_1.jsonl").exists() and len(os.listdir(real.parent)) == 3
    first, _ = opened(runs, "exp", "run.overwrite=true")
    with pytest.raises(ConfigError, match="in use by another run"):
        opened(real.parent, "experiment")  # the same directory by its own name
    first.close()
    shutil.rmtree(real)
    with pytest.raises(ConfigError, match=f"exp is a link to {real}, which is no directory"):
        opened(runs, "exp")


PATHS = ("run.dir", "data.train", "data.eval", "model.path", "model.tokenizer", "rollout.environment", "hooks")


@pytest.mark.parametrize("name", [*PATHS, "reward.functions"])
def test_a_home_is_what_a_shell_takes_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    section, _, key = name.rpartition(".")
    file = tmp_path / "run.yaml"
    file.write_text(f"{section}: {{{key}: '~/a.py:b'}}" if section else f"{key}: '~/a.py:b'")
    (tmp_path / "~").mkdir()
    (tmp_path / "~/a.py").write_text("")  # of that literal name, beside the file
    for config in (load_config([file]), load_config((), [f"{name}=~/a.py:b"])):
        found = config
        for part in name.split("."):
            found = getattr(found, part)
        assert (found[0].function if name == "reward.functions" else found) == "/home/me/a.py:b"
    assert load_config((), ["run.dir=~nobody-of-this-name/x"]).run.dir == "~nobody-of-this-name/x"
