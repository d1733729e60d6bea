"""The examples of external producers, run as docs/producers.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[2]


def start(*command: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return warm.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file)


def test_two_producers_feed_a_run_to_its_end(tmp_path: Path) -> None:
    ring = f"external-{os.getpid()}"
    overrides = [f"door.ring={ring}", f"run.dir={tmp_path}", "train.max_steps=6", "rollout.max_tokens=9"]
    logs = [tmp_path / f"{name}.log" for name in ("run", "one", "two")]
    producers = f"import sys; sys.path.insert(0, 'examples'); import external_producer as e; e.main({ring!r}, "
    started = [start("-m", "asyncrl.main", "examples/external_run.yaml", *overrides, log=logs[0])]
    started += [start("-c", f"{producers}{seed}, 300.0)", log=logs[seed + 1]) for seed in (0, 1)]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0, 0], texts
    assert all("the run is over at version 6" in text for text in texts[1:]), texts
    assert "done: version 6" in texts[0] and "refused" not in texts[0]
    lines = [json.loads(line) for line in (tmp_path / "external/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["staleness/max"] <= 2 and 0.3 < line["reward/mean"] < 1 for line in lines)
    for name in os.listdir("/dev/shm"):  # what was left for a next run, which does not come
        if ring in name:
            os.unlink(f"/dev/shm/{name}")
