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
