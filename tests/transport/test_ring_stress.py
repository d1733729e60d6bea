"""The record ring under kills, stops and restarts, in the ten-second form of `tools/chaos stress`."""

from __future__ import annotations

import json
import subprocess
import sys

from transport_helpers import ROOT, environment


def test_nothing_accepted_is_lost_torn_or_trained_twice() -> None:
    command = [sys.executable, str(ROOT / "tools" / "chaos"), "stress", "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["lost"], result["twice"], result["torn"], result["left in /dev/shm"]) == (0, 0, 0, [])
    assert result["accepted"] > 100
    kills = result["kills"]
    assert kills["died"] >= 5 and kills["owner"] >= 2 and kills["stopped"] >= 1
