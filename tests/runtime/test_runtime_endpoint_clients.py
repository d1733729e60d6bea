"""A check of other projects against the endpoint of a real run: tools/agent_clients.py openenv."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("aiohttp", reason="needs the extra [http]")

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "adapters"))
from adapters_helpers import call_of, chat_model, open_run  # noqa: E402

PYTHON = os.environ.get("OPENENV_PYTHON")


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, [call_of("bash", '{"command": "ls /tmp"}')])


@pytest.mark.skipif(PYTHON is None, reason="needs openenv: tools/agent_clients.py openenv")
async def test_openenv_grades_the_endpoint_as_trainable() -> None:
    async with open_run(f"{__file__}:build", "rollout.max_tokens=16", "run.name=policy") as runtime:
        url, key = runtime.endpoint()
        command = [str(PYTHON), str(TESTS / "endpoint" / "endpoint_client.py"), "openenv", url, key]
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with anyio.fail_after(200):
            done = await anyio.run_process(command, stderr=subprocess.PIPE, check=False, env=plain)
        assert done.returncode == 0, done.stderr.decode()[-4000:]
        found = json.loads(done.stdout.decode().splitlines()[-1])
    assert found["ok"] and found["capture_level"] == "tokens", found
    assert (found["logprobs_mode"], found["tool_support"]) == ("processed", "ok"), found
    assert found["findings"] == [] and found["param_fixes"] == [], found
