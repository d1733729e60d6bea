"""Train an agent with a tool in your own program.

    python examples/tool_loop.py

The program trains the quickstart's model and prints the reward of every step. `a7=` asks for the letter `a` seven times.
After each answer the tool returns a question for the missing letters, such as `a3=`, and the model answers again. An
episode has up to three answers.

The model has no chat template, so the agent works with token ids: a request has the ids of the request before, of its reply and of
the tool's text. `calculator.py` is an agent with messages.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from asyncrl import Runtime, load_config

sys.path.insert(0, str(Path(__file__).parent))
from quickstart_model import rows

CONFIG = Path(__file__).with_name("agent_loop.yaml")
# An episode has at most 45 tokens: a prompt of 3, three answers of 12 and two results of 3. The limit is 40 + max_tokens = 52.
OVERRIDES = ["data.max_prompt_tokens=40", "rollout.groups_per_step=8"]
AGENTS = 24
TURNS = 3


def tool(question: str, text: str) -> str | None:
    """A question for the letters that are missing in `text`. None if no letter is missing."""
    missing = int(question[1]) - len(text)
    return f"{question[0]}{missing}=" if missing > 0 else None


def judge(question: str, text: str) -> float:
    """The share of right letters in `text`, divided by 1 plus the difference between its length and the wanted length."""
    wanted = int(question[1])
    return text.count(question[0]) / max(len(text), 1) / (1 + abs(len(text) - wanted))


async def episode(task: dict[str, Any], policy: Any) -> float:
    reply = await policy.complete(task["prompt"])
    text = reply.text
    for _ in range(TURNS - 1):
        result = tool(task["prompt"], text)
        if result is None:
            break
        reply = await policy.complete([*reply.ids, *policy.encode(result)])
        text += reply.text
    return judge(task["prompt"], text)


async def agent(runtime: Runtime, questions: list[dict[str, str]]) -> None:
    while questions:
        await runtime.play(episode, questions.pop())


async def main(steps: int = 20) -> list[float]:
    config = load_config([CONFIG], OVERRIDES)
    questions = rows(count=steps * config.rollout.groups_per_step)
    rewards: list[float] = []

    async def watch(runtime: Runtime) -> None:
        async for step in runtime.steps():
            rewards.append(step.metrics["reward/mean"])
            print(f"version {step.version}: reward {rewards[-1]:.3f}")

    async with Runtime(config, write=False) as runtime, asyncio.TaskGroup() as watchers:
        watcher = watchers.create_task(watch(runtime))
        async with asyncio.TaskGroup() as agents:
            for _ in range(AGENTS):
                agents.create_task(agent(runtime, questions))
        await runtime.finish()
        await watcher
    return rewards


if __name__ == "__main__":
    asyncio.run(main())
