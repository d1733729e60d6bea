"""What a run must leave alone: directories of others, in its place, beside it and within it; links; homes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime_helpers import config_of

from asyncrl.concurrency.offload import offload
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, DirectoryLost
from asyncrl.runtime.directory import RunDirectory
from asyncrl.runtime.runtime import Runtime
from asyncrl.runtime.saving import SavedRun


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
    assert re.search(f"the run that was here is now {tmp_path}/exp.2.*; the newest 2 such runs are kept", said[0])
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


@pytest.mark.parametrize("gone", ["the lock", "all that lies in it"])
def test_without_its_lock_file_a_directory_is_locked(tmp_path: Path, gone: str) -> None:
    directory, _ = opened(tmp_path, "exp")
    if gone == "the lock":
        (tmp_path / "exp/.lock").unlink()
    else:
        for each in (tmp_path / "exp").iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    with pytest.raises(ConfigError, match="in use by another run"):
        opened(tmp_path, "exp", "run.overwrite=true")
    directory.look()
    directory.close()
    opened(tmp_path, "exp")[0].close()


def test_where_no_locks_are_it_is_said_and_the_first_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NFS without a lock server."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refused)
    first, [said] = opened(tmp_path, "exp")
    assert f"{tmp_path}/exp cannot be locked (No locks available): start no second run there" in said
    first.look()
    second, _ = opened(tmp_path, "exp")
    with pytest.raises(DirectoryLost, match=rf"another run writes there \(process {os.getpid()} on "):
        first.look()
    second.look()
    assert first.path.parent == tmp_path and first.path != second.path and first.config_file.exists()
    first.close()
    assert (tmp_path / "exp/.lock").exists()  # of the second
    second.close()


def _overwritten(path: Path) -> None:
    shutil.rmtree(path)
    opened(path.parent, path.name)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            lambda path: path.rename(path.with_name("moved")),
            r"was moved to .*/moved\. The last checkpoint goes to .*/moved:",
        ),
        (shutil.rmtree, r"it was removed\. The last checkpoint goes to .*/run\.\d"),
        (_overwritten, r"another one took its place\. The last checkpoint goes to .*/run\.\d"),
    ],
)
def test_a_directory_that_is_gone_ends_the_run_and_costs_no_checkpoint(
    tmp_path: Path, what: Callable[[Path], object], said: str
) -> None:
    runs, trained = tmp_path / "runs", 0

    async def program() -> None:
        nonlocal trained
        async with Runtime(config_of(tmp_path, "train.max_steps=50")) as runtime:

            async def lose() -> None:
                async for _ in steps:
                    await offload(lambda: what(runs / "run"), "loss")
                    return

            steps = runtime.steps()
            runtime.start("who loses it", lose)
            try:
                await runtime.run()
            finally:
                trained = runtime.version

    with pytest.raises(DirectoryLost, match=said) as lost:
        asyncio.run(program())
    assert 1 <= trained < 50
    place = Path(re.search("goes to (.*?):", str(lost.value))[1])  # type: ignore[index]
    again = load_config([place / "config.yaml"], [f"run.dir={place.parent}", f"run.name={place.name}", "resume=true"])
    assert SavedRun.latest(RunDirectory(again)).version == trained
    left = {each.name for each in (runs / "run").iterdir()} if (runs / "run").exists() else set()
    assert left <= {".lock", "config.yaml", "job.json", "checkpoints"} and not any((runs / "run").glob("checkpoints/*"))
