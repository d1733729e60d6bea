"""TRL's `tools=[f, g]` and `environment_factory=Environment` as an episode (TRL 1.16).

    GRPOTrainer(..., tools=[search], environment_factory=Game)   ->   episode = from_trl(tools=[search], environment_factory=Game)

A row needs the column `prompt` with messages. With several environments the column `environment` names one of them, as in TRL.
Reward functions need no adapter: TRL's form is asyncrl's form.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def from_trl(
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    max_tool_calling_iterations: int | None = None,
) -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> float | None:
        messages, known, environment = list(task["prompt"]), list(tools), None
        factory, row = environment_factory, dict(task)
        if isinstance(factory, Mapping):
            factory = factory[row.pop("environment")]
        if factory is not None:
            environment = await _call(factory)
            # TRL's rule: every public method but `reset` and `get_reward` is a tool.
            known += [
                getattr(environment, name)
                for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
                if name not in ("reset", "get_reward") and not name.startswith("_")
            ]
            observation = await _call(environment.reset, **row)
            if observation is not None:
                messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], observation)}
        reply = await policy.chat(messages, tools=known)
        calls = 0
        while reply.tool_calls and (max_tool_calling_iterations is None or calls < max_tool_calling_iterations):
            messages += [reply.message, *await reply.run_tools()]
            reply, calls = await policy.chat(messages, tools=known), calls + 1
        if environment is None or not hasattr(environment, "get_reward"):
            # None: the run's reward functions score the episode.
            return None
        return float(await _call(environment.get_reward))

    return episode


async def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of the user. A plain function may block, so it runs on a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def _joined(content: Any, observation: Any) -> Any:
    if isinstance(content, str) and isinstance(observation, str):
        return content + observation
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (content, observation)]
    return parts[0] + parts[1]
