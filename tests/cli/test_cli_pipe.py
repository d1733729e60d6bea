"""Of every command: nobody reads what it writes (`asyncrl report RUN | head -1`), or Ctrl-C. It ends, and says nothing of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import app, report

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def started(arguments: list[str], folder: Path, **streams: Any) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "asyncrl.cli.app", *arguments]
    return subprocess.Popen(program, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, text=True, **streams)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a run `done`, which has no checkpoint."""
    run = tmp_path / "runs/done"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: done}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 0.5}\n')
    return tmp_path


def test_nobody_reads(folder: Path) -> None:
    """Not at the exit of the process either, which flushes once more."""
    with started(["report", "done"], folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before it writes: a reader that is gone, as `head` is after its lines
        said = process.stderr.read()
        assert (process.wait(), said) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--version"],
        ["run", "--help"],
        ["prompts", str(ROOT / "examples/quickstart.yaml")],
        ["check", "done"],
        ["check-model", "--help"],
        ["explain", "grpo"],
        ["report", "done"],
        ["examples"],
        ["shm"],
        ["bench", "--help"],
    ],
    ids=lambda arguments: " ".join(Path(each).name for each in arguments) or "usage",
)
def test_nobody_reads_any_command(
    folder: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        try:
            code = app.main(arguments)
        except SystemExit as left:  # of argparse, after its help
            code = int(left.code or 0)
    # Beside what is being imported.
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("asyncrl: ")]
    assert (code, said) == (0, [])


def test_nobody_reads_a_complaint(folder: Path) -> None:
    """Its exit code is still that of the complaint."""
    with started(["explain", "nonsense"], folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 2


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "main", interrupted)
    assert app.main(["report", "done"]) == 128 + signal.SIGINT


@pytest.mark.parametrize("module", ["asyncrl.main", "asyncrl.cli.app"])
@pytest.mark.parametrize("closed", ["0", "1", "012"])
def test_streams_that_were_closed_at_the_start_lead_nowhere(module: str, closed: str) -> None:
    """libuv aborts a process that closes something whose descriptor is one of theirs; a child would write into it."""
    program = f"""if True:
        import asyncio, os, subprocess, sys, {module} as command, uvloop
        async def probe():
            reader, writer = os.pipe()
            return min(reader, writer)
        def inside(given):
            for stream in (sys.stdout, sys.stderr):
                print("nobody reads this", file=stream, flush=True)
            assert sys.stdin.read() == ""
            child = "import os; [os.fstat(number) for number in range(3)]"
            return 3 - (uvloop.run(probe()) > 2) - (subprocess.run([sys.executable, "-c", child]).returncode == 0) - 1
        command._main = inside
        sys.exit(command.main())
    """
    shell = "; ".join([*(f"exec {number}>&-" for number in closed), 'exec "$0" -c "$1"'])
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, program], env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == 0, done.stderr
