"""Agents of a user, as `rollout.environment` names them."""

from __future__ import annotations

import asyncio
import random
from typing import Any


async def scored_here(task: dict[str, Any], policy: Any) -> float:
    """Two turns. The reward is the share of the right letter."""
    reply = await policy.complete(task["prompt"])
    second = await policy.complete([*reply.ids, *policy.encode("=")])
    policy.note("letters", len(reply.text) + len(second.text))
    return (reply.text + second.text).count(task["prompt"][0]) / 16


async def branching(task: dict[str, Any], policy: Any) -> list[float]:
    """A reply, a tool that takes any time, and two branches. A reward for each reply."""
    first = await policy.complete(task["prompt"])
    await asyncio.sleep(random.uniform(0, 0.01))
    begun = [*first.ids, *policy.encode("=")]
    replies = [first, *await asyncio.gather(*(policy.branch().complete(begun) for _ in range(2)))]
    policy.note("letters", sum(len(reply.text) for reply in replies))
    return [reply.text.count(task["prompt"][0]) / 8 for reply in replies]


async def scored_elsewhere(task: dict[str, Any], policy: Any) -> None:
    """For reward functions."""
    await policy.complete(task["prompt"])


async def one_argument(task: dict[str, Any]) -> float:
    """No form."""
    return 1.0


number = 3


def plain(task: dict[str, Any], policy: Any) -> float:
    """No coroutine function."""
    return 1.0


class Desk:
    """No environment."""


async def with_a_bare_tool(task: dict[str, Any], policy: Any) -> float:
    """Its tool has no docstring."""

    def look(drawer: str) -> str:
        return drawer

    await policy.complete(task["prompt"])
    await policy.chat(task["prompt"], tools=[look])
    return 1.0


async def without_a_template(task: dict[str, Any], policy: Any) -> None:
    """Its model has no chat template."""
    await policy.chat([{"role": "user", "content": task["prompt"]}])


async def of_a_wrong_type(task: dict[str, Any], policy: Any) -> Any:
    """Returns its reply."""
    return await policy.complete(task["prompt"])


async def over_http(task: dict[str, Any], policy: Any) -> float:
    """`scored_here` with a client that knows nothing of asyncrl."""
    text = await _post(policy, task["prompt"])
    return (text[0] + (await _post(policy, [*text[1], *policy.encode("=")]))[0]).count(task["prompt"][0]) / 16


async def _post(policy: Any, prompt: Any) -> tuple[str, list[int]]:
    import aiohttp

    headers = {"Authorization": f"Bearer {policy.api_key}"}
    body = {"prompt": prompt, "return_token_ids": True}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{policy.base_url}/completions", json=body) as reply,
    ):
        found = await reply.json()
    return found["choices"][0]["text"], [*found["prompt_token_ids"], *found["choices"][0]["token_ids"]]
