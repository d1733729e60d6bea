"""The run directory: one live run at a time, what counts as a run, what becomes of an old one, and what is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import warm
from runtime_helpers import (
    DRY,
    MODEL,
    REAL,
    REWARDS,
    ROOT,
    complete,
    config_of,
    lines_at_least,
    metrics_of,
    rollouts_of,
    start,
    started_by,
    write_yaml,
)

from asyncrl.concurrency.offload import offload
from asyncrl.config.load import load_config
from asyncrl.distributed import launcher
from asyncrl.errors import ConfigError, DirectoryLost, LifecycleError
from asyncrl.main import main
from asyncrl.runtime.directory import DirectoryLock, RunDirectory
from asyncrl.runtime.plan import plan
from asyncrl.runtime.runtime import Runtime
from asyncrl.telemetry.sinks import read_jsonl

SLOW = DRY | {"dry_run": {"decode_step_s": 0.02}, "train": DRY["train"] | {"max_steps": 100_000}}


def test_a_live_run_is_left_alone_and_named(tmp_path: Path) -> None:
    runs = f"run.dir={tmp_path}/runs"
    first = start(tmp_path, SLOW, runs)
    run = tmp_path / "runs/run"
    try:
        first.wait_until(lines_at_least(run, 1), "first step")
        for how in ("run.overwrite=true", "resume=true", "seed=1"):
            second = start(tmp_path / "second", SLOW, runs, how)
            assert second.wait() == 2, second.output
            assert f"in use by another run: process {first.pid} on {socket.gethostname()}, since 20" in second.output
        seen = len(metrics_of(run))
        first.wait_until(lines_at_least(run, seen + 2), "two more steps")
        first.send(signal.SIGTERM)
        assert first.wait() == 143, first.output
    finally:
        first.kill()
    steps = [line["step"] for line in metrics_of(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == ["run"]  # no lock is left behind


def test_of_runs_that_are_started_together_one_goes_on(tmp_path: Path) -> None:
    """Whoever was later is told so, and nothing of it lies among the other's files."""
    run, processes = tmp_path / "runs/run", []
    assert main([str(write_yaml(tmp_path, DRY)), f"run.dir={tmp_path}/runs", "train.max_steps=1"]) == 0
    try:
        for number in range(3):
            own = f"run.dir={tmp_path}/runs", "run.overwrite=true"
            processes.append(start(tmp_path / f"started {number}", SLOW, *own))
        while len(alive := [each for each in processes if each.ended is None]) > 1:
            time.sleep(0.02)
        [first] = alive
        assert [each.wait() for each in processes if each is not first] == [2, 2]
        for each in processes:
            assert each is first or "in use by another run: " in each.output, each.output
            # The run that is named may have lost the directory to `first` since then, after it moved the old run aside.
            others = [f"process {other.pid} on" for other in processes if other is not each]
            assert each is first or any(word in each.output for word in [*others, "only just begun"]), each.output
        first.wait_until(lambda: metrics_of(run)[-1:] != [] and metrics_of(run)[-1]["step"] >= 3, "third step")
        first.send(signal.SIGTERM)
        assert first.wait() == 143, first.output
    finally:
        for each in processes:
            each.kill()
    steps = [line["step"] for line in metrics_of(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_killed_run_and_its_children_hold_nothing(tmp_path: Path) -> None:
    """A fork of the user's code lives on, with a copy of every descriptor; a kill -9 leaves the file of the lock."""
    tree = SLOW | {"rollout": SLOW["rollout"] | {"environment": f"{MODEL}:Forking"}}
    first = start(tmp_path, tree)
    run = tmp_path / "runs/run"
    try:
        first.wait_until(lines_at_least(run, 1), "first step")
        child = int((tmp_path / "forked").read_text())
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        os.kill(child, 0)  # alive
        assert (tmp_path / "runs/run/.lock").exists()
        complete(tmp_path, SLOW, "run.overwrite=true", "train.max_steps=1")
    finally:
        first.kill()
    assert len(metrics_of(run)) == 1


async def test_two_runs_of_one_process_and_the_ranks_of_one_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, base=DRY)
    async with Runtime(config):
        with pytest.raises(ConfigError, match=f"in use by another run: process {os.getpid()} "):
            async with Runtime(config):
                pass
        async with Runtime(config, write=False):  # leaves no run directory, so it needs none
            pass
    async with Runtime(config):  # the first one is over, and committed nothing
        pass


def test_what_ended_before_its_first_step_is_no_run(here: Path) -> None:
    file = str(write_yaml(here, DRY | {"reward": f"{REWARDS}:broken"}))
    assert main([file]) == 6
    assert (here / "runs/run/trace.json").exists()
    assert main([file, f"reward={REWARDS}:share"]) == 6  # `answer` is missing from the rows of a dry run
    assert main([file, f"reward={REWARDS}:short"]) == 0
    assert [line["step"] for line in metrics_of(here / "runs/run")] == [1, 2, 3]
    assert main([file, f"reward={REWARDS}:short"]) == 2


class Crash(LifecycleError):
    """Of the program around a run."""


async def test_a_restart_of_the_same_job_goes_on_and_moves_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four starts of one job, of which three crash: before the first checkpoint, after it, and after the end."""
    tree = REAL | {"telemetry": {"live": "plain", "report": False}, "preset": "sync", "run": {"overwrite": True}}
    tree |= {"checkpoint": {"every": 2, "save_final": False}, "train": tree["train"] | {"max_steps": 4}}
    run = tmp_path / "runs/run"

    async def life_of(number: int, crash_at: int | None) -> str:
        """What it prints. `number`: of restarts of the job."""
        monkeypatch.setattr(launcher, "_PROCESS", f"process {number}")
        for name, value in started_by("torchrun", number, tmp_path).items():
            monkeypatch.setenv(name, value)
        if number == 2:
            planned = await anyio.to_thread.run_sync(plan, config_of(tmp_path, base=tree))
            assert "restart 2 of this job by torchrun" in planned
        with contextlib.suppress(Crash):
            async with Runtime(config_of(tmp_path, base=tree)) as runtime, anyio.create_task_group() as tasks:
                tasks.start_soon(runtime.run)
                async for report in runtime.steps():
                    if report.version == crash_at:
                        raise Crash
        return capsys.readouterr().out

    config = config_of(tmp_path, base=tree)
    older = await anyio.to_thread.run_sync(RunDirectory, config)
    await anyio.to_thread.run_sync(older.open, config)
    older.close()
    (run / "metrics.jsonl").write_text('{"step": 1}')
    assert "run.overwrite: the run that was here is now" in await life_of(0, 1)
    assert "goes on from version 0: no checkpoint was written" in await life_of(1, 3)
    said = await life_of(2, None)
    assert f"restart 2 of this job by torchrun: the run in {run} goes on from its newest checkpoint" in said
    assert f"resume: {run}/checkpoints/step_2" in said and "step 3" in said and "step 2" not in said
    done = metrics_of(run)
    assert f"resume: {run}/checkpoints/step_4" in await life_of(3, None)  # it had ended
    assert metrics_of(run) == done and [line["step"] for line in done] == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(run / "metrics.discarded.jsonl")] == [1, 3]
    assert len(rollouts_of(run)) == 4 * 16
    [aside] = [each for each in (tmp_path / "runs").iterdir() if each.name.startswith("run.")]
    assert len(metrics_of(aside)) == 1
    monkeypatch.setattr(launcher, "_PROCESS", "another")
    for resume, goes_on in (("auto", True), ("true", True), ("false", False)):  # who wants new runs alone says so
        found = await anyio.to_thread.run_sync(RunDirectory, config_of(tmp_path, f"resume={resume}", base=tree))
        assert (found.resumes, found.restart is not None) == (goes_on, resume == "auto")


def test_a_file_in_its_place_or_a_directory_that_cannot_be_written_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody may make a directory in /sys, root neither."""
    file = str(write_yaml(here, DRY))
    for place in (here / "runs", here / "runs/run"):
        place.parent.mkdir(exist_ok=True)
        place.write_text("mine")
        for more in ([], ["resume=true"]):
            assert main([file, *more]) == 2
            error = capsys.readouterr().err
            assert "Traceback" not in error
            assert "there is a file where a directory is needed" in error or "holds no run" in error
        assert place.read_text() == "mine"
        place.unlink()
    assert main([file, "run.dir=/sys/asyncrl"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the run directory /sys/asyncrl/run cannot be used: " in error


def limited(folder: Path, tree: dict[str, Any], largest: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run that cannot write a file of more than `largest` bytes."""
    program = [sys.executable, "-m", "asyncrl.main", str(write_yaml(folder, tree)), *overrides]
    with warm.Popen(
        program,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest, largest)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return subprocess.CompletedProcess(program, process.returncode, out, err)


def test_a_disk_that_is_full_for_rollouts_costs_no_checkpoint(tmp_path: Path) -> None:
    """The rollouts of a step do not fit, the checkpoint does."""
    tree = REAL | {"rollout": REAL["rollout"] | {"environment": f"{MODEL}:Wordy"}}
    ended, run = limited(tmp_path, tree, 10**6), tmp_path / "runs/run"
    assert ended.returncode == 0, ended.stderr
    assert "could not write runs/run/rollouts/step_1.jsonl: File too large; the run goes on without" in ended.stderr
    assert "3 writes failed; the last: runs/run/rollouts/step_3.jsonl" in ended.stderr
    # The event loop may be blocked on a busy machine.
    assert sum(not line.startswith("event loop blocked") for line in ended.stderr.splitlines()) == 2, ended.stderr
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]
    assert list((run / "rollouts").iterdir()) == []  # nothing half-written takes up room
    assert (run / "checkpoints/latest/state/trainer.pt").exists() and (run / "report.html").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_rollouts_leave_room_for_the_checkpoint(here: Path) -> None:
    """A small disk, which metrics and rollouts fill."""
    disk = here / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=18m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        (disk / "of somebody else").write_bytes(bytes(1_400_000))
        output = complete(here, REAL, f"run.dir={disk}/runs", "train.max_steps=60")
        run = disk / "runs/run"
        assert "are reserved for a checkpoint; the run goes on without" in output
        assert 10 < len(list((run / "rollouts").iterdir())) < 60
        assert (run / "checkpoints/latest").resolve().name == "step_60"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_for_metrics_leaves_the_rest(here: Path) -> None:
    run = here / "runs/run"
    assert main([str(write_yaml(here, REAL)), "train.max_steps=1"]) == 0
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step":1,"padding":"' + 10**6 * "x" + '"}\n')
    (run / "trace.json.partial").symlink_to("/dev/full")
    ended = limited(here, REAL, 10**6, "resume=true")
    assert ended.returncode == 0, ended.stderr
    assert "could not write the metrics of version 2: File too large; the run goes on without" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (run / "checkpoints/latest").resolve().name == "step_3"
    assert len(rollouts_of(run)) == 3 * 16


def test_a_checkpoint_that_does_not_fit_exits_5_with_one_sentence(here: Path) -> None:
    """Written beside the training: the run ends all the same, and the earlier one stays."""
    run = here / "runs/run"
    assert main([str(write_yaml(here, REAL)), "train.max_steps=1"]) == 0
    ended = limited(here, REAL, 60_000, "resume=true", "checkpoint.every=1", "train.max_steps=100")
    assert ended.returncode == 5, ended.stderr
    assert "could not write the checkpoint runs/run/checkpoints/step_2" in ended.stderr
    assert "the latest checkpoint is step_1" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (run / "checkpoints/latest").resolve().name == "step_1"
    assert metrics_of(run)[-1]["step"] < 100


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


def test_a_run_under_another_name_is_not_moved(tmp_path: Path) -> None:
    life(tmp_path, "first")
    (tmp_path / "first").rename(tmp_path / "exp")
    with pytest.raises(ConfigError, match="holds the run 'first', not 'exp'"):
        life(tmp_path)


@pytest.mark.parametrize("within", ["seed1", "checkpoints"])
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


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_only_what_an_overwrite_has_moved_aside_is_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    others = ["exp.2", "exp.20260101-000000", "exp.20260101-000000-2"]
    for name in others:
        life(tmp_path, name)
    for _ in range(3):
        life(tmp_path)
    aside = sorted(each.name for each in tmp_path.iterdir() if each.name not in ("exp", *others))
    shutil.copytree(tmp_path / aside[0], tmp_path / "exp.20250101-000000")  # a copy for safe-keeping
    opened(tmp_path, aside[1], "resume=true", f"run.name={aside[1]}")[0].close()  # somebody goes on with it
    make(tmp_path / aside[0] / "paper")
    said = [line for _ in range(4) for line in life(tmp_path)]
    assert re.search(f"the run that was here is now {tmp_path}/exp.2.*; the newest 2 such runs are kept", said[0])
    names = {each.name for each in tmp_path.iterdir()}
    assert names > {"exp", *others, *aside, "exp.20250101-000000"}
    assert any(f"{aside[0]} is kept: no run made its paper" in line for line in said)
    assert len(names) == 1 + len(others) + len(aside) + 1 + 2 and sum("removed" in line for line in said) > 0


@pytest.mark.parametrize(
    "file",
    ["config.yaml", "report.html", "metrics.jsonl", "rollouts/step_1.jsonl", "trace.json", "job.json", "nodes.json",
     "sinks.json", ".lock", ".moved-aside", "config.yaml.partial"],
)  # fmt: skip
def test_files_that_no_run_wrote_are_not_written_over(tmp_path: Path, file: str) -> None:
    mine = tmp_path / "exp" / file
    mine.parent.mkdir(parents=True)
    mine.write_text("run: {name: exp}")
    words = rf"exp (has a|is not the directory of a run .* over its) {re.escape(file.partition('/')[0])}"
    for overwrite in ("true", "false"):
        with pytest.raises(ConfigError, match=words):
            opened(tmp_path, "exp", f"run.overwrite={overwrite}")
        assert mine.read_text() == "run: {name: exp}" and os.listdir(tmp_path) == ["exp"]
        assert os.listdir(tmp_path / "exp") == [file.partition("/")[0]]


def test_a_lock_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/.lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"symbolic links \(.*exp/\.lock\)"):
        opened(tmp_path, "exp")
    assert (tmp_path / "exp/.lock").is_symlink() and os.listdir(tmp_path) == ["exp"]


def test_what_a_kill_at_the_first_start_leaves_blocks_no_run(tmp_path: Path) -> None:
    (tmp_path / "exp/checkpoints").mkdir(parents=True)
    for name in (".lock", ".moved-aside", "config.yaml.partial"):
        (tmp_path / "exp" / name).touch()
    opened(tmp_path, "exp")[0].close()
    assert sorted(os.listdir(tmp_path / "exp")) == ["checkpoints", "config.yaml", "job.json"]


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


def test_without_its_lock_file_a_directory_is_locked(tmp_path: Path) -> None:
    directory, _ = opened(tmp_path, "exp")
    for each in (tmp_path / "exp").iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    with pytest.raises(ConfigError, match="in use by another run"):
        opened(tmp_path, "exp", "run.overwrite=true")
    directory.check_still_ours()
    directory.close()
    opened(tmp_path, "exp")[0].close()


def test_where_no_locks_are_it_is_said_and_the_first_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NFS without a lock server."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refused)
    first, [said] = opened(tmp_path, "exp")
    assert f"{tmp_path}/exp cannot be locked (No locks available): start no second run there" in said
    first.check_still_ours()
    second, _ = opened(tmp_path, "exp")
    with pytest.raises(DirectoryLost, match=rf"another run writes there \(process {os.getpid()} on "):
        first.check_still_ours()
    second.check_still_ours()
    first.close()
    assert (tmp_path / "exp/.lock").exists()  # of the second
    second.close()


def test_where_only_the_directory_has_no_lock_its_file_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""

    def lock(descriptor: int, operation: int, real: Callable[[int, int], None] = fcntl.flock) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", lock)
    first, said = opened(tmp_path, "exp")
    assert said == []
    with pytest.raises(ConfigError, match="in use by another run"):
        opened(tmp_path, "exp")
    first.close()


def test_a_lock_file_that_cannot_be_opened_is_named_and_leaves_nothing_locked(tmp_path: Path) -> None:
    first, second, path = DirectoryLock(tmp_path), DirectoryLock(tmp_path), tmp_path / ".lock"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        first.acquire()
    path.rmdir()
    assert second.acquire() is None
    path.unlink()
    path.mkdir()
    assert second.find_loss() == f"another run writes there ({path} cannot be read: Is a directory)"
    second.release()


def _removed(path: Path) -> None:
    # The run may write a file while its folder is removed.
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _overwritten(path: Path) -> None:
    _removed(path)
    opened(path.parent, path.name)


@pytest.mark.parametrize("what", [lambda path: path.rename(path.with_name("moved")), _removed, _overwritten])
def test_a_directory_that_is_gone_ends_the_run_and_nothing_more_is_written(
    tmp_path: Path, what: Callable[[Path], object]
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

    with pytest.raises(DirectoryLost, match="it was moved or removed"):
        asyncio.run(program())
    assert 1 <= trained < 50
    left = {each.name for each in (runs / "run").iterdir()} if (runs / "run").exists() else set()
    assert left <= {".lock", "config.yaml", "job.json", "checkpoints"} and not any((runs / "run").glob("checkpoints/*"))
