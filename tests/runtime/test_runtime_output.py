"""A closed pipe, a dead `tee`, a closed terminal: output that nobody reads ends no run and costs no checkpoint."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm
from runtime_helpers import MODEL, REAL, REWARDS, ROOT, lines_at_least, metrics_of, write_yaml
from test_runtime_signals import endless, last_checkpoint

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Run:
    """`python -m asyncrl.main` with outputs that the test chooses."""

    def __init__(self, folder: Path, tree: dict[str, Any], **streams: Any) -> None:
        self.directory = folder / "runs/run"
        self.output = "(nobody reads it)"
        program = [sys.executable, "-m", "asyncrl.main", str(write_yaml(folder, tree))]
        self.popen = warm.Popen(program, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, **streams)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def steps(self, count: int) -> None:
        enough = lines_at_least(self.directory, count)
        while not enough():
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"ended with {self.popen.wait(0.05)}")

    def ends(self) -> int:
        return self.popen.wait(60)


def test_a_pipe_that_is_closed_after_two_lines(tmp_path: Path) -> None:
    """Rewards and environment print, too: `asyncrl run x.yaml 2>&1 | head -2`."""
    tree = REAL | {"telemetry": {"live": "plain"}, "reward": f"{REWARDS}:chatty"}
    tree = tree | {"rollout": REAL["rollout"] | {"environment": f"{MODEL}:Chatty"}}
    with Run(tmp_path, tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.popen.stdout is not None
        assert run.popen.stdout.readline().strip() and run.popen.stdout.readline().strip()
        run.popen.stdout.close()
        assert run.ends() == 0
    assert [line["step"] for line in metrics_of(run.directory)] == [1, 2, 3]
    assert (run.directory / "checkpoints/latest/state/trainer.pt").exists()
    assert (run.directory / "report.html").exists()


def test_ctrl_c_after_tee_is_gone(tmp_path: Path) -> None:
    with Run(tmp_path, endless(telemetry={"live": "plain"}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.popen.stdout is not None
        run.steps(2)
        run.popen.stdout.close()
        run.steps(4)
        run.popen.send_signal(signal.SIGINT)
        assert run.ends() == 130
        assert last_checkpoint(run.directory, run) >= 4


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the session, the shell sends another; writing fails with EIO."""
    master, slave = pty.openpty()
    terminal = {"stdout": slave, "stderr": slave, "start_new_session": True}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored here, under nohup
    try:
        run = Run(tmp_path, endless(telemetry={"live": "auto"}), **terminal)
    finally:
        signal.signal(signal.SIGHUP, before)
    with run:
        os.close(slave)
        seen, committed = b"", lines_at_least(run.directory, 1)
        while b"step" not in seen or b"reward" not in seen or not committed():  # the bar is there
            seen += os.read(master, 4096)
        os.close(master)
        run.popen.send_signal(signal.SIGHUP)
        run.popen.send_signal(signal.SIGHUP)
        assert run.ends() == 129
        assert last_checkpoint(run.directory, run) >= 1


def test_nohup_is_respected(tmp_path: Path) -> None:
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        run = Run(tmp_path, endless(), **streams)
    finally:
        signal.signal(signal.SIGHUP, before)
    with run:
        run.steps(1)
        run.popen.send_signal(signal.SIGHUP)
        run.steps(len(metrics_of(run.directory)) + 2)
        run.popen.send_signal(signal.SIGTERM)
        assert run.ends() == 143


def test_a_full_disk_behind_the_output(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, Run(tmp_path, REAL | {"telemetry": {"live": "plain"}}, stdout=full) as run:
        assert run.ends() == 0
    assert len(metrics_of(run.directory)) == 3
