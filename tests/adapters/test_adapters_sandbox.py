"""The page's agent with a sandbox, played and trained by a run: the policy writes Python, and reads what the code prints."""

from __future__ import annotations

from typing import Any

import psutil
from adapters_helpers import call_of, chat_model, open_run, turns_of
from support.pages import blocks


def build(seed: int) -> tuple[Any, Any]:
    calls = [
        call_of("python", '{"code": "6 * 7"}'),
        call_of("python", '{"code": "import os; os.kill(os.getppid(), 9)"}'),
    ]
    return chat_model(seed, [*calls, "42"])


async def test_an_agent_with_a_sandbox_trains_a_step_and_leaves_no_process() -> None:
    [block] = blocks("sandbox")
    space: dict[str, Any] = {}
    exec(block.text, space)
    task = {"question": "6 * 7?", "answer": "42"}
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        groups = [await runtime.play(space["episode"], task, n=8) for _ in range(2)]
        assert not [child for child in psutil.Process().children() if "jail" in "".join(child.cmdline())]
        summary = await runtime.finish()
    results = set()
    for trajectory in [*groups[0], *groups[1]]:
        replies = [m for m in trajectory.completion if m["role"] == "assistant"]
        assert turns_of(trajectory) == len(replies) <= 4
        assert trajectory.reward == float("42" in replies[-1]["content"])
        results |= {m["content"] for m in trajectory.completion if m["role"] == "tool"}
    assert "42" in results and any("PermissionError" in result for result in results)
    assert {result for result in results if "PermissionError" not in result} == {"42"}
    assert summary.version == 1
