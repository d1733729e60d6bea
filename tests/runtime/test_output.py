"""What a user sees of a run from outside: its report while it runs, and output that nobody reads any more."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from runtime_helpers import DRY, MODEL, REAL, REWARDS, ROOT, lines_at_least, metrics_of, start, write_yaml
from test_runtime_signals import endless, last_checkpoint

from asyncrl.cli.app import main
from asyncrl.telemetry.output import LossyStream

# Empty: streams are buffered, whatever the tests were started with.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


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


def test_a_stream_that_was_closed_leaves_no_descriptor(tmp_path: Path) -> None:
    stream = LossyStream((tmp_path / "out").open("w"))
    stream.close()
    before = os.listdir("/proc/self/fd")
    assert stream.write("x") == 1
    stream.flush_last()
    assert os.listdir("/proc/self/fd") == before


def test_characters_that_a_charmap_lacks_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="iso8859-15") as file:
        LossyStream(file).write("a \xa4 \u20ac z")
    assert path.read_text(encoding="iso8859-15") == "a ? \u20ac z"


def test_a_full_disk_behind_the_output(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, Run(tmp_path, DRY | {"telemetry": {"live": "plain"}}, stdout=full) as run:
        assert run.ends() == 0
    assert len(metrics_of(run.directory)) == 3


REWARD = "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def shown(page: Path) -> dict[str, object]:
    """The data of the page."""
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def test_a_run_that_runs_and_then_dies_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n' * 8)
    tree = {**DRY, "reward": "rewards.py:length", "run": {"name": "long"}}
    tree |= {"data": {**DRY["data"], "train": "train.jsonl"}, "train": {**DRY["train"], "max_steps": 1_000_000}}
    run = tmp_path / "runs" / "long"
    process = start(tmp_path, tree)
    monkeypatch.chdir(tmp_path)
    try:
        process.wait_until(lines_at_least(run, 3), "three lines")
        assert main(["report", "long"]) == 0
        said = capsys.readouterr().out
        assert "report.html: version " in said
        running = shown(run / "report.html")
        assert len(running["steps"]) >= 3 and running["name"] == "long"  # type: ignore[arg-type]
        assert re.match(r"as of \d{4}-.*: version \d+$", str(running["result"]))
        process.wait_until(lines_at_least(run, len(running["steps"]) + 1), "another line")  # type: ignore[arg-type]
    finally:
        process.kill()
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert len(shown(run / "report.html")["steps"]) > len(running["steps"])  # type: ignore[arg-type]


def test_no_such_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "mine"]) == 2
    assert "mine is not a run directory (it has no config.yaml); runs/ has no run directory" in capsys.readouterr().err
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "config.yaml").write_text("{}")
    assert main(["report", "mine"]) == 2
    assert "runs/ holds other" in capsys.readouterr().err
    assert main(["report", "other"]) == 0  # it ended before its first step
    assert "no step yet" in capsys.readouterr().out
    assert main(["report"]) == 2
