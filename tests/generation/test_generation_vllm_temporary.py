"""Files of vLLM's start: a worker that is killed meanwhile leaves them, and the next start removes them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.generation.vllm import temporary
from asyncrl.generation.vllm.temporary import temporary_folder

START = """
import sys
from pathlib import Path
from asyncrl.generation.vllm.temporary import temporary_folder

with temporary_folder() as folder:
    Path(folder, "config.json").write_text("{}")
    Path(folder, "vllm_dist_0a1b").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_next_start_removes_what_a_killed_start_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    for name in ("vllm_dist_0a1b-tp:0-[0-1]-cpushm_0", "vllm_dist_ffff-tp:0-[0-1]-cpushm_0"):
        (memory / name).touch()
    monkeypatch.setattr(temporary, "_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": {"TMPDIR": str(tmp_path)}}
    with (
        subprocess.Popen([sys.executable, "-c", START], **options) as killed,
        subprocess.Popen([sys.executable, "-c", START], **options) as alive,
    ):
        assert killed.stdout is not None and alive.stdout is not None
        folders = [Path(process.stdout.readline().strip()) for process in (killed, alive)]
        killed.kill()
        killed.wait()
        assert [(folder / "config.json").exists() for folder in folders] == [True, True]
        with temporary_folder() as ours:
            assert [folder.exists() for folder in folders] == [False, True]
            assert Path(ours).parent == tmp_path and tempfile.gettempdir() == ours
        assert not Path(ours).exists() and tempfile.gettempdir() == str(tmp_path)
        assert [path.name for path in memory.iterdir()] == ["vllm_dist_ffff-tp:0-[0-1]-cpushm_0"]
        alive.kill()


def test_a_folder_that_cannot_be_locked_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No locks available"), temporary_folder():
        raise AssertionError("the folder is not locked")
    assert os.listdir("/proc/self/fd") == before
