"""A run from YAML whose HTTP port is attacked (`tools/chaos http`, its short form) trains every good group."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from runtime_door import SECONDS, door_of, in_shared_memory, running
from runtime_helpers import FED, ROOT, write_yaml

pytest.importorskip("aiohttp", reason="needs the extra [http]")
CONSOLE = ("-m", "asyncrl.cli.app", "run")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from chaos import http

    return http


@pytest.mark.slow
def test_a_run_that_is_attacked_trains_every_good_group_and_ends_in_good_order(tmp_path: Path, tool: Any) -> None:
    name, key = f"attacked-{os.getpid()}", "only-this-test-knows-it"
    door = {**FED["door"], "ring": name, "http_port": 0, "http_key": key}
    rollout = {**FED["rollout"], "max_staleness": 1000}
    train = {**FED["train"], "max_steps": 10_000}
    file = str(write_yaml(tmp_path, {**FED, "door": door, "rollout": rollout, "train": train}))
    with running(tmp_path, file, program=CONSOLE) as process:
        url = door_of(process)
        assert url.endswith(f"/{key}")
        target = tool.Target(url, process.pid)
        found = tool.attack(target, 150)
        assert not tool.failures(found), list(tool.rows_of(found))
        assert found["strangers"].answers == {"401": 3, "403": 1, "415": 1, "421": 1}
        assert found["bombs"].answers == {"413": 9, "400": 2, "422": 1} and found["bombs"].memory_mib < 400
        assert found["silent connections"].descriptors < 400
        assert found["registrations"].answers == {"200": 200}
        assert not tool.untrained(target, tmp_path / "runs/run/rollouts")
        process.send(signal.SIGTERM)
        assert process.wait(SECONDS) == 143, process.output
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not written, "the key is a secret"
    for path in Path("/dev/shm").iterdir():
        if name in path.name:
            path.unlink()  # what was accepted behind the last step waits for a next run, which there is not
    assert not in_shared_memory(name)
