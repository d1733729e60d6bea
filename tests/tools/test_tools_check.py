"""`tools/check` itself: who stops it stops its lanes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_no_lane_behind(tmp_path: Path, number: signal.Signals) -> None:
    """In the place of Python stands a program that waits where pytest is asked for, and says that it does."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pytest*) touch {tmp_path}/lane.$$; exec sleep 600;; esac\n', encoding="utf-8"
    )
    python.chmod(0o755)
    with subprocess.Popen(
        # bash cannot trap a signal that its parent ignores, as nohup ignores SIGHUP.
        ["env", "--default-signal", "bash", str(ROOT / "tools/check")],
        env={**os.environ, "PYTHON": str(python)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as check:
        try:
            while len(lanes := list(tmp_path.glob("lane.*"))) < 4:
                time.sleep(0.01)
            check.send_signal(number)
            assert check.wait(30) == 128 + number
        finally:
            check.kill()
    left = [int(each.suffix[1:]) for each in lanes if psutil.pid_exists(int(each.suffix[1:]))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_the_last_lines_name_what_failed(tmp_path: Path) -> None:
    """Lanes end minutes apart: what failed in the first two stands behind the lines of the last."""
    python = tmp_path / "python"
    summary = "\\n".join(
        [
            "=== FAILURES ===",
            "E  assert 1 == 2",
            "=== slowest 12 durations ===",
            "=== short test summary info ===",
            "FAILED tests/runtime/test_some.py::test_one - assert 1 == 2",
        ]
    )
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  *--ignore=*) printf '{summary}\\n'; exit 1;;
  *mypy*) echo 'some.py:1: error: wrong type'; exit 1;;
  *pytest*tests/rewards*) while [ ! -e {tmp_path}/second ]; do sleep 0.1; done; sleep 0.5; echo 9 passed;;
  *ruff*) touch {tmp_path}/second;;
esac
""",
        encoding="utf-8",
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "tools/check")],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "9 passed" in done.stdout
    assert done.stderr.splitlines() == [
        "tools/check: lane 1 failed:",
        *summary.split("\\n")[:3],
        summary.split("\\n")[-1],
        "tools/check: lane 2 failed:",
        "some.py:1: error: wrong type",
    ]
