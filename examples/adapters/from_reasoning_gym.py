"""A data set of reasoning-gym as an episode with several tries (reasoning-gym 0.1).

    reasoning_gym.create_dataset("basic_arithmetic", seed=0)   ->   rows, episode = from_reasoning_gym("basic_arithmetic", seed=0)

Episodes with one try need no adapter: a function that returns the data set may be the value of `data.train` and of `reward`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

WRONG = "That is not right. Try again, and write the answer between <answer> and </answer>."


def from_reasoning_gym(name: str, tries: int = 2, **options: Any) -> tuple[Callable[[], list[dict[str, Any]]], Any]:
    """(function for `data.train`, episode)."""
    dataset = reasoning_gym.create_dataset(name, **options)

    def rows() -> list[dict[str, Any]]:
        # With `number` the episode finds the whole entry again, which `score_answer` needs.
        return [
            {"prompt": [{"role": "user", "content": entry["question"]}], "number": n} for n, entry in enumerate(dataset)
        ]

    async def episode(task: dict[str, Any], policy: Any) -> float:
        messages, entry, score = list(task["prompt"]), dataset[task["number"]], 0.0
        for attempt in range(tries):
            reply = await policy.chat(messages)
            answer = extract_answer(reply.text) or reply.text
            # Some scores compute for long.
            score = await asyncio.to_thread(dataset.score_answer, answer=answer, entry=entry)
            if score == 1.0 or attempt == tries - 1:
                break
            messages += [reply.message, {"role": "user", "content": WRONG}]
        policy.note("tries", attempt + 1)
        # A later try is worth less.
        return float(score) / (attempt + 1)

    return rows, episode
