"""The real clients of other projects against the endpoint. tools/agent_clients.py makes their environments and runs this."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("aiohttp", reason="needs the extra [http]")

from endpoint_helpers import CALL, Opened, opened
from environments_chat import Script

CLIENT = Path(__file__).with_name("endpoint_client.py")


def interpreter(name: str) -> str:
    python = os.environ.get(f"{name.upper().replace('-', '_').replace('.', '_')}_PYTHON")
    if python is None:
        pytest.skip(f"needs the client {name}: tools/agent_clients.py {name}")
    return python


async def talk(python: str, name: str, o: Opened) -> dict[str, Any]:
    command = [python, str(CLIENT), name, o.url, o.key]
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with anyio.fail_after(300):
        done = await anyio.run_process(command, stderr=subprocess.PIPE, check=False, env=plain)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return dict(json.loads(done.stdout.decode().splitlines()[-1]))


def alternating(replies: int) -> Script:
    return Script("qwen2_5", *([CALL, "Sunny"] * replies))


@pytest.mark.parametrize("name", ["openai", "openai-2.54"])
async def test_openai(name: str) -> None:
    python = interpreter(name)
    script = alternating(9)
    async with opened(script, max_context=1 << 14) as o:
        found = await talk(python, "openai", o)
        ids = script.generations[0].token_ids.tolist()
        call = ["look", {"city": "Bonn"}]
        assert found["model"] == "policy" and found["call"] == [*call, "tool_calls"] and found["text"] == "Sunny"
        assert found["ids"] == ids and found["tokens"] == [f"token_id:{each}" for each in ids]
        assert found["versions"] == [[1, len(ids)]] and found["usage"] > 0
        assert found["streamed"] == ["", {"city": "Bonn"}] and found["helper"] == "Sunny"
        assert found["response_call"] == call and found["response"] == "Sunny"
        assert found["response_stream"] == ["response.created", "response.completed", 1]
        assert found["completion"] == "Sunny" and found["stranger"] == 401
        assert found["seed"][:2] == ["seed", "invalid_request_error"] and found["guided"][0] == "guided_json"
        # Each route continued its own conversation by its tokens.
        trajectory = o.session.trajectory()
        assert trajectory.sampled_length == sum(each.token_ids.size for each in script.generations)
        assert o.session.turns == len(script.generations) == 8


async def test_anthropic() -> None:
    python = interpreter("anthropic")
    script = alternating(4)
    async with opened(script, max_context=1 << 14) as o:
        found = await talk(python, "anthropic", o)
        assert found["call"] == ["look", {"city": "Bonn"}, "tool_use"] and found["text"] == "Sunny"
        assert found["streamed"] == [{"city": "Bonn"}, "tool_use", True] and found["pieces"] == ["Sunny"]
        assert "chat_template_kwargs" in found["thinking"] and found["stranger"] == 401
        assert o.session.turns == 4


async def test_openai_agents() -> None:
    python = interpreter("openai-agents")
    script = alternating(4)
    async with opened(script, max_context=1 << 14) as o:
        found = await talk(python, "agents", o)
        assert {key: value for key, value in found.items() if key != "seen"} == dict.fromkeys(
            ("responses", "responses_streamed", "chat_completions", "chat_completions_streamed"), "Sunny"
        )
        assert found["seen"] == ["Bonn"] * 4 and o.session.turns == 8
        assert o.session.trajectory().sampled_length == sum(each.token_ids.size for each in script.generations)


async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    python = interpreter("schemathesis")
    async with opened(alternating(100_000), max_context=1 << 20) as o:
        # Of no episode, because an episode has one temperature, which no schema can say.
        _, key = o.endpoint.open(None)
        command = [str(Path(python).with_name("schemathesis")), "run", f"{o.origin}/openapi.json"]
        command += [
            "-H",
            f"Authorization: Bearer {key}",
            "--max-examples",
            "60",
            "--request-timeout",
            "30",
            "--seed",
            "1",
        ]
        with anyio.fail_after(500):
            done = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout.decode()[-8000:]
        assert o.session.turns == 0
