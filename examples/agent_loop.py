"""Train from a hand-written agent loop.

    python examples/agent_loop.py

The program trains the quickstart's model and prints the reward of every step. An agent takes a question, samples a
group of answers, computes rewards in plain Python and submits the group. Training runs in the same event loop.
`submit` waits until the run has room for the group, and returns False if the group is too old to be trained. Then the
agent puts the question back.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from asyncrl import Runtime, load_config

sys.path.insert(0, str(Path(__file__).parent))
from quickstart_model import reward, rows

CONFIG = Path(__file__).with_name("agent_loop.yaml")
AGENTS = 24


async def agent(runtime: Runtime, questions: list[dict[str, str]]) -> None:
    while questions:
        row = questions.pop()
        group = await runtime.generate(row["prompt"], n=8)
        answers = [str(trajectory.completion) for trajectory in group]
        scores = reward([row["prompt"]] * len(group), answers, None, [row["answer"]] * len(group))
        if not await runtime.submit(group, scores):
            questions.append(row)


async def main(steps: int = 20) -> list[float]:
    config = load_config([CONFIG])
    questions = rows(count=steps * config.rollout.groups_per_step)
    rewards: list[float] = []

    async def watch(runtime: Runtime) -> None:
        async for step in runtime.steps():
            rewards.append(step.metrics["reward/mean"])
            print(f"version {step.version}: reward {rewards[-1]:.3f}, oldest group {step.metrics['staleness/max']:.0f}")

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
