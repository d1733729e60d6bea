"""Train from a hand-written tool loop: generate, append the tool's result with mask 0, generate again, submit.

    python examples/tool_loop.py

The program trains the quickstart's model and prints the reward of every step. `a7=` asks for the letter `a` seven times.
After each answer the tool returns a question for the missing letters, such as `a3=`, and the model answers again. An
episode has up to three answers.

The tool's tokens are part of the trajectory, because the model has read them. Their mask is 0, because the model has not
written them. Sampled tokens are kept as token ids and never tokenized again.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl import Runtime, Trajectory, encode_text, load_config

sys.path.insert(0, str(Path(__file__).parent))
from quickstart_model import rows

CONFIG = Path(__file__).with_name("agent_loop.yaml")
# The prompt of three tokens, two answers and the tool's two results must fit before the third answer.
OVERRIDES = ["data.max_prompt_tokens=40", "rollout.groups_per_step=8"]
AGENTS = 24
TURNS = 3


def tool(question: str, text: str) -> str | None:
    """A question for the letters that are missing in `text`. None if no letter is missing."""
    missing = int(question[1]) - len(text)
    return f"{question[0]}{missing}=" if missing > 0 else None


def judge(question: str, text: str) -> float:
    """The share of right letters in `text`, divided by 1 + the error of its length."""
    wanted = int(question[1])
    return text.count(question[0]) / max(len(text), 1) / (1 + abs(len(text) - wanted))


async def extend(runtime: Runtime, trajectory: Trajectory, result: str) -> tuple[Trajectory, str]:
    """Append the tool's `result` and the model's next answer. Returns the longer trajectory and the text of that answer."""
    # encode_text makes no control tokens, so a tool cannot write the end of a turn.
    ids = np.asarray(encode_text(runtime.tokenizer, result), np.int32)
    [turn] = await runtime.generate([*trajectory.tokens, *ids])

    def column(name: str, filler: float) -> Any:
        before, after = getattr(trajectory, name), getattr(turn, name)[turn.prompt_length :]
        return np.concatenate([before, np.full(ids.size, filler, before.dtype), after])

    longer = replace(
        trajectory,
        tokens=turn.tokens,
        mask=column("mask", False),
        logprobs=column("logprobs", 0.0),
        sampled_logprobs=column("sampled_logprobs", 0.0),
        versions=column("versions", -1),
        # For models with experts: the routes of the last request cover the whole row.
        routed_experts=turn.routed_experts,
        finish_reason=turn.finish_reason,
        completion=f"{trajectory.completion}|{result}{turn.completion}",
    )
    return longer, str(turn.completion)


async def episode(runtime: Runtime, question: str, trajectory: Trajectory) -> tuple[Trajectory, float]:
    text = str(trajectory.completion)
    for _ in range(TURNS - 1):
        result = tool(question, text)
        if result is None:
            break
        trajectory, answer = await extend(runtime, trajectory, result)
        text += answer
    return trajectory, judge(question, text)


async def agent(runtime: Runtime, questions: list[str]) -> None:
    while questions:
        question = questions.pop()
        group = await runtime.generate(question, n=8)
        episodes = await asyncio.gather(*(episode(runtime, question, trajectory) for trajectory in group))
        if not await runtime.submit([trajectory for trajectory, _ in episodes], [reward for _, reward in episodes]):
            # The group is too old to be trained: ask again.
            questions.append(question)


async def main(steps: int = 20) -> list[float]:
    config = load_config([CONFIG], OVERRIDES)
    questions = [row["prompt"] for row in rows(count=steps * config.rollout.groups_per_step)]
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
