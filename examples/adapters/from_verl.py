"""verl's `compute_score` as the reward of an episode (verl 0.9).

    compute_score(data_source, solution_str, ground_truth, extra_info)   ->   episode = from_verl(compute_score, tools=[calculator])

A row has verl's columns: `prompt`, `data_source`, `reward_model` with `ground_truth`, and `extra_info`.
Episodes with one turn and no tools need no adapter: `compute_score` may be the value of `reward`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def from_verl(compute_score: Callable[..., Any], tools: Sequence[Callable[..., Any]] = (), max_turns: int = 5) -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> float:
        messages, texts = list(task["prompt"]), []
        for _ in range(max_turns):
            reply = await policy.chat(messages, tools=tools)
            texts.append(reply.text)
            if not reply.tool_calls:
                break
            messages += [reply.message, *await reply.run_tools()]
        arguments = {
            "data_source": task["data_source"],
            # All replies: verl scores the whole response.
            "solution_str": "\n".join(texts),
            "ground_truth": task["reward_model"]["ground_truth"],
            "extra_info": task.get("extra_info"),
        }
        if inspect.iscoroutinefunction(compute_score):
            score = await compute_score(**arguments)
        else:
            score = await asyncio.to_thread(compute_score, **arguments)
        if isinstance(score, dict):
            for name, value in score.items():
                if isinstance(value, int | float) and name != "score":
                    policy.note(name, float(value))
            score = score["score"]
        return float(score)

    return episode
