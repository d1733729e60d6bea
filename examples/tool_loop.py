"""A tool loop by hand: generate, append what the tool says, mask it, generate again, submit.

    python examples/tool_loop.py             # the quickstart's model; prints the reward of every step

The tool counts. `a7=` asks for the letter `a` seven times; after each answer the tool says what is missing (`a3=`), and
the model goes on behind it, up to three times. What the tool says is part of the trajectory, since the model has read it,
and masked, since the model has not written it. Tokens are kept as they were sampled: text is never tokenized again.
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
# A prompt of three tokens, two answers and what the tool says to each must fit before the third answer.
OVERRIDES = ["data.max_prompt_tokens=40", "rollout.groups_per_step=8"]
AGENTS = 24
TURNS = 3


def tool(asked: str, said: str) -> str | None:
    """What is missing, in the form of a question. None: nothing, the episode is over."""
    missing = int(asked[1]) - len(said)
    return f"{asked[0]}{missing}=" if missing > 0 else None


def judge(asked: str, said: str) -> float:
    """The share of right letters, less where the number is wrong."""
    wanted = int(asked[1])
    return said.count(asked[0]) / max(len(said), 1) / (1 + abs(len(said) - wanted))


async def go_on(runtime: Runtime, trajectory: Trajectory, result: str) -> tuple[Trajectory, str]:
    """The trajectory with the tool's `result` and the model's next answer behind it, and the text of that answer."""
    # A tool writes text: what looks like the end of a turn is none.
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
        routed_experts=turn.routed_experts,  # of a model with experts: its last request spans all of the row
        finish_reason=turn.finish_reason,
        completion=f"{trajectory.completion}|{result}{turn.completion}",
    )
    return longer, str(turn.completion)


async def episode(runtime: Runtime, asked: str, trajectory: Trajectory) -> tuple[Trajectory, float]:
    said = str(trajectory.completion)
    for _ in range(TURNS - 1):
        result = tool(asked, said)
        if result is None:
            break
        trajectory, more = await go_on(runtime, trajectory, result)
        said += more
    return trajectory, judge(asked, said)


async def agent(runtime: Runtime, questions: list[str]) -> None:
    while questions:
        asked = questions.pop()
        group = await runtime.generate(asked, n=8)
        played = await asyncio.gather(*(episode(runtime, asked, each) for each in group))
        if not await runtime.submit([each for each, _ in played], [reward for _, reward in played]):
            questions.append(asked)  # too old by now: asked again


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
