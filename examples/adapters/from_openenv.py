"""A server of OpenEnv as an episode (openenv 0.10).

    async with GenericEnvClient(base_url=URL) as env: ...   ->   episode = from_openenv(lambda: GenericEnvClient(base_url=URL))

`show(observation)` makes the text for the policy, `act(text)` makes the action. Each client has its own session on the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openenv.core import EnvClient


def from_openenv(
    connect: Callable[[], EnvClient[Any, Any, Any]],
    show: Callable[[Any], str] = str,
    act: Callable[[str], Any] = lambda text: {"message": text},
    max_turns: int = 20,
) -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> float:
        total, messages = 0.0, list(task["prompt"]) if task.get("prompt") else []
        # The end of the block closes the session, also after an error or a cancellation.
        async with connect() as client:
            result = await client.reset(**task.get("reset", {}))
            for _ in range(max_turns):
                messages.append({"role": "user", "content": show(result.observation)})
                reply = await policy.chat(messages)
                messages.append(reply.message)
                result = await client.step(act(reply.text))
                total += float(result.reward or 0.0)
                if result.done:
                    break
        return total

    return episode
