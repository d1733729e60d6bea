"""A rank does not outlive its launcher: torchrun, killed, or stopped while it starts its ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import warm
from ports import reserved_port

from asyncrl.distributed import launcher as launchers
from asyncrl.distributed.launcher import restart_phrase, this_start

ROOT = Path(__file__).resolve().parents[2]
# A rank without torch. It asks to hear of its launcher's end, says so, and waits; FIRST may come before.
RANK = """
import os, signal, time
from pathlib import Path
place = Path(os.environ["PLACE"])
(place / f"here_{os.environ['RANK']}").touch()
launcher = os.getppid()
while "ORPHANED" in os.environ and os.getppid() == launcher:
    time.sleep(0.01)
from asyncrl.distributed.launcher import tie_to_launcher
from asyncrl.errors import PlatformError
try:
    tie = tie_to_launcher()
except PlatformError as error:
    part = place / f"part_{os.environ['RANK']}"
    part.write_text(str(error))
    part.rename(place / f"refused_{os.environ['RANK']}")
    raise SystemExit(1)
(place / f"tied_{os.environ['RANK']}").touch()
if "STOPPING" in os.environ:
    tie.untie()
    (place / f"untied_{os.environ['RANK']}").touch()
time.sleep(600)
"""
PATIENCE_S = 60.0  # on a busy machine


def launch(folder: Path, ranks: int, first: str = "", **more: str) -> subprocess.Popen[bytes]:
    """torchrun over a shell, which becomes the rank after `first`."""
    (folder / "rank.py").write_text(RANK)
    shell = folder / "rank.sh"
    shell.write_text(f"#!/bin/sh\n{first}\nexec {sys.executable} {folder}/rank.py\n")
    shell.chmod(0o700)
    options = ["--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PLACE": str(folder), **more}
    with (folder / "output.txt").open("wb") as log:
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(shell)]
        return warm.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)


def until(folder: Path, pattern: str, count: int) -> list[Path]:
    end = time.monotonic() + PATIENCE_S
    while len(found := sorted(folder.glob(pattern))) < count:
        assert time.monotonic() < end, (folder / "output.txt").read_text()
        time.sleep(0.01)  # there is no event that a foreign process could set
    return found


def running(folder: Path) -> list[psutil.Process]:
    """The ranks, found by their environment: those too that have not said anything yet."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or it has ended
            environ = process.environ()
            if environ.get("PLACE") == str(folder) and "RANK" in environ:
                found.append(process)
    return found


def require_ended(folder: Path) -> None:
    left = psutil.wait_procs(running(folder), timeout=10.0)[1]
    for each in left:
        each.kill()
    assert not left, (folder / "output.txt").read_text()


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 2)
    until(tmp_path, "tied_*", 2)
    launcher.kill()
    launcher.wait()
    require_ended(tmp_path)


@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_ranks_end_when_their_launcher_does_while_it_starts_them(tmp_path: Path, number: str) -> None:
    """Each of them sends the signal as the first thing that it does; torchrun has forgotten those that it had started then."""
    launcher = launch(tmp_path, 4, first=f"kill -{number} $PPID")
    assert launcher.wait(PATIENCE_S) != 0
    require_ended(tmp_path)


def test_a_rank_whose_launcher_has_ended_says_so(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 2, ORPHANED="1")
    until(tmp_path, "here_*", 2)
    launcher.kill()
    launcher.wait()
    for path in until(tmp_path, "refused_*", 2):
        assert path.read_text().startswith("torchrun ended while it started this rank")
    require_ended(tmp_path)


def test_a_shutdown_in_progress_is_not_cut_short(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 1, STOPPING="1")
    until(tmp_path, "untied_*", 1)
    launcher.kill()
    launcher.wait()
    [rank] = running(tmp_path)
    assert psutil.wait_procs([rank], timeout=1.0)[1] == [rank]
    rank.kill()


def test_without_torchruns_store_where_it_was_nobody_is_there() -> None:
    """In a process of its own: what is asked of the kernel stays."""
    code = "from asyncrl.distributed.launcher import tie_to_launcher; print(tie_to_launcher())"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def ask(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], env=environ | more, capture_output=True, text=True)

    assert ask().stdout == "None\n"
    assert f"Launcher(pid={os.getpid()})" in ask(TORCHELASTIC_RUN_ID="x").stdout
    with reserved_port() as port:
        there = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        refused = ask(TORCHELASTIC_RUN_ID="x", **there)
    assert refused.returncode == 1
    assert f"nobody listens at the address of torchrun's store (127.0.0.1:{port})" in refused.stderr


def torchrun(job: str, number: int, agent: str | None = None, **more: str) -> dict[str, str]:
    """What torchrun sets. `agent`: the directory that it makes once for all its starts."""
    error_file = "" if agent is None else f"/tmp/torchelastic_a/{agent}/attempt_{number}/0/error.json"
    return {
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": error_file,
        **more,
    }


SLURM = [{"SLURM_JOB_ID": "7"}, *({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(count)} for count in (1, 2))]


@pytest.mark.parametrize(
    ("before", "now", "by"),
    [
        (torchrun("none", 0, "none_x"), torchrun("none", 1, "none_x"), "restart 1 of this job by torchrun"),
        # A node that comes or goes starts all workers again, and is not counted.
        (torchrun("none", 0, "none_x"), torchrun("none", 0, "none_x"), "restart 0 of this job by torchrun"),
        # Another torchrun, though every `torchrun` without an id calls its job "none", and scripts repeat theirs.
        (torchrun("none", 0, "none_x"), torchrun("none", 1, "none_y"), None),
        (torchrun("none", 0), torchrun("none", 1), None),
        (torchrun("100", 0, "100_x"), torchrun("100", 0, "100_y"), None),
        # The first rank of the job is on another node now.
        (torchrun("100", 0, "100_x"), torchrun("100", 1, "100_y"), "restart 1 of this job by torchrun"),
        (SLURM[0], SLURM[1], "restart 1 of this job by SLURM"),
        (SLURM[0], SLURM[2], "restart 2 of this job by SLURM"),  # the one between did not come so far
        (SLURM[1], SLURM[1], None),  # two runs, one after the other, of one script
        (SLURM[0], SLURM[0], None),
        (SLURM[0], {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, None),
        (torchrun("none", 2, "none_x", **SLURM[0]), torchrun("none", 0, "none_y", **SLURM[1]), "restart 1 of this job by SLURM"),
        (torchrun("none", 0, "none_y", **SLURM[1]), torchrun("none", 1, "none_y", **SLURM[1]), "restart 1 of this job by torchrun"),
        ({}, torchrun("none", 1, "none_x"), None),
        (torchrun("none", 0, "none_x"), {}, None),
        ({}, {}, None),
    ],
)  # fmt: skip
def test_a_job_knows_that_its_launcher_starts_it_again(
    before: dict[str, str], now: dict[str, str], by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = this_start(before)
    assert restart_phrase(first, this_start(now)) is None, "a second run of one process is none"
    monkeypatch.setattr(launchers, "_PROCESS", "another")
    assert restart_phrase(first, this_start(now)) == by
    assert restart_phrase({}, this_start(now)) is None  # a run of an earlier release
