"""Agents of a user, as `rollout.environment` names them."""

from __future__ import annotations

from typing import Any


async def scored_here(task: dict[str, Any], policy: Any) -> float:
    """Two turns. The reward is the share of the right letter."""
    reply = await policy.complete(task["prompt"])
    second = await policy.complete([*reply.ids, *policy.encode("=")])
    policy.note("letters", len(reply.text) + len(second.text))
    return (reply.text + second.text).count(task["prompt"][0]) / 16


async def scored_elsewhere(task: dict[str, Any], policy: Any) -> None:
    """For reward functions."""
    await policy.complete(task["prompt"])


async def one_argument(task: dict[str, Any]) -> float:
    """No form."""
    return 1.0


number = 3
