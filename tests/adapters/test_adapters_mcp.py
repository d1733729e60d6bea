"""Tools of real MCP servers, over standard input and output and over HTTP, in the hands of a trained policy. No process is left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs mcp: python tools/adapters.py mcp")

from adapters_helpers import EXAMPLES, call_of, cancel_play, chat_model, open_run
from mcp_tools import mcp_tools
from transport_helpers import running

SERVER = str(Path(__file__).with_name("mcp_server.py"))
RUN = f"""
import asyncio, sys
sys.path.append({str(EXAMPLES)!r})
from mcp_tools import mcp_tools

async def main():
    async with mcp_tools(sys.argv[1:]) as tools:
        await {{tool.name: tool for tool in tools}}["spawn"].call(word="of_a_killed_run")
        print("started", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, [call_of("add", '{"a": 2, "b": 3}'), call_of("fail", "{}"), "5"])


def command(word: str) -> list[str]:
    return [sys.executable, SERVER, f"# {word}"]


def episode_of(server: Any, fault: str = "") -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> float:
        messages = [{"role": "user", "content": "2+3?"}]
        async with mcp_tools(server) as tools:
            for _ in range(3):
                reply = await policy.chat(messages, tools=tools)
                if not reply.tool_calls:
                    break
                messages += [reply.message, *await reply.run_tools()]
            if fault == "raises":
                raise ValueError("broken episode")
            if fault == "hangs":
                await {tool.name: tool for tool in tools}["hang"].call()
        return float(any(m["content"] == "5" for m in messages if m["role"] == "tool"))

    return episode


async def test_tools_over_standard_input_train_a_step_and_every_server_ends() -> None:
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        groups = [await runtime.play(episode_of(command("of_a_run")), {"question": 1}, n=4) for _ in range(2)]
        assert not running("of_a_run")
        assert await runtime.play(episode_of(command("that_raises"), "raises"), {}, n=2) == []
        assert not running("that_raises")
        assert await runtime.play(episode_of(["/no/such/server"]), {}, n=2) == []
        hanging = episode_of(command("that_hangs"), "hangs")
        await cancel_play(runtime, hanging, {}, lambda: running("that_hangs"))
        assert not running("that_hangs")
        summary = await runtime.finish()
    for trajectory in [*groups[0], *groups[1]]:
        results = [m["content"] for m in trajectory.completion if m["role"] == "tool"]
        assert all(result == "5" or "broken tool" in result for result in results), results
        assert trajectory.reward == float("5" in results)
    assert summary.version >= 1 and summary.books.failed == 2


async def test_tools_over_http_and_their_schemas() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as server:  # noqa: ASYNC220
        try:
            await until_listening(port)
            async with mcp_tools(f"http://127.0.0.1:{port}/mcp", prefix="far_") as tools:
                known = {tool.name: tool for tool in tools}
                assert sorted(known) == ["far_add", "far_fail", "far_hang", "far_spawn"]
                function = known["far_add"].schema["function"]
                assert function["description"] == "Add two numbers."
                assert function["parameters"]["required"] == ["a", "b"]
                assert await known["far_add"].call(a=2, b=40) == "42"
                with pytest.raises(RuntimeError, match="broken tool"):
                    await known["far_fail"].call()
        finally:
            server.kill()


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with mcp_tools([sys.executable, "-c", "import time; time.sleep(1000) # that_is_silent"], start_s=1):
            pass
    assert time.monotonic() - began < 30 and not running("that_is_silent")
    async with mcp_tools(command("that_is_slow"), timeout_s=2) as tools:
        with pytest.raises(Exception, match=r"(?i)timed out"):
            await {tool.name: tool for tool in tools}["hang"].call()
    assert not running("that_is_slow")


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.2, 0.5, 1.0, 2.0])
async def test_a_cancellation_at_any_moment_leaves_no_process(moment: float) -> None:
    async def episode() -> None:
        async with mcp_tools(command("that_is_cancelled")) as tools:
            known = {tool.name: tool for tool in tools}
            await known["spawn"].call(word="of_the_cancelled")
            await known["hang"].call()

    task = asyncio.create_task(episode())
    await asyncio.sleep(moment)
    task.cancel()
    await asyncio.wait([task])
    assert not running("that_is_cancelled") and not running("of_the_cancelled")


def test_kill_9_of_the_run_leaves_no_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *command("of_the_killed")], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "started\n"
        assert running("of_a_killed_run")
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (running("of_a_killed_run") or running("of_the_killed")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running("of_a_killed_run") and not running("of_the_killed")


async def until_listening(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the server does not listen")
