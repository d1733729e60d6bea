"""The agent of the benchmark of waiting tools: four replies, with a tool between them that takes no time or 0.2 to 2 s."""

import asyncio
import math
import random

REPLIES = 4
MEDIAN_S, SIGMA, LEAST_S, MOST_S = 0.6, 0.6, 0.2, 2.0


def seconds() -> float:
    """The time of a call of a tool: log-normal within its bounds."""
    while not LEAST_S <= (drawn := random.lognormvariate(math.log(MEDIAN_S), SIGMA)) <= MOST_S:
        pass
    return drawn


async def waiting(task, policy):  # type: ignore[no-untyped-def]
    return await play(task, policy, seconds)


async def instant(task, policy):  # type: ignore[no-untyped-def]
    return await play(task, policy, lambda: 0.0)


async def play(task, policy, wait):  # type: ignore[no-untyped-def]
    """The reward is the share of vowels in the last reply."""
    messages = list(task["prompt"])
    for number in range(REPLIES):
        reply = await policy.chat(messages)
        if number < REPLIES - 1:
            await asyncio.sleep(wait())
        messages += [reply.message, {"role": "user", "content": "go on"}]
    return sum(letter in "aeiou" for letter in reply.text) / max(len(reply.text), 1)
