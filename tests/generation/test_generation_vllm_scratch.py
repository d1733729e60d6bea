"""Folders that vLLM is made in: gone with whoever used them, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.generation.vllm.scratch import PREFIX, scratch_folder, sweep_scratch

USER = """
import sys, tempfile
from asyncrl.generation.vllm.scratch import scratch_folder
with scratch_folder() as folder:
    print(tempfile.mkstemp()[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test and what it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def user() -> tuple[subprocess.Popen[str], Path]:
    """A process in a folder of its own, and the folder, with a file in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_folder_of_a_process_that_was_killed_is_swept_and_no_other(temporary: Path) -> None:
    dead, left = user()
    living, used = user()
    stopped, waiting = user()
    other = temporary / f"{PREFIX}link"
    other.symlink_to(temporary / "elsewhere")
    (temporary / "elsewhere").mkdir()
    try:
        end(dead)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert left.is_dir() and left.parent == temporary
        assert sweep_scratch() == [str(left)]
        assert not left.exists() and used.is_dir() and waiting.is_dir() and (temporary / "elsewhere").is_dir()
    finally:
        for each in (living, stopped):
            end(each)
    assert sorted(sweep_scratch()) == sorted(map(str, (used, waiting))) and sweep_scratch() == []


def test_whoever_ends_by_itself_leaves_nothing_and_temporary_files_go_where_they_went(temporary: Path) -> None:
    before = tempfile.gettempdir()
    with pytest.raises(RuntimeError, match="in between"), scratch_folder() as folder:
        assert tempfile.gettempdir() == folder and Path(folder).parent == temporary
        assert sweep_scratch() == [] and Path(folder).is_dir()
        raise RuntimeError("in between")
    assert tempfile.gettempdir() == before and not list(temporary.iterdir())
