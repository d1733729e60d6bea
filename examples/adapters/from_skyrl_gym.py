"""An environment of skyrl-gym as an episode (skyrl-gym 0.4).

    skyrl_gym.make("gsm8k_multi_turn", extras=row)   ->   episode = from_skyrl_gym("gsm8k_multi_turn")

A row needs the column `prompt` with messages; the whole row becomes `extras`. Each turn gets the reward of its step.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import skyrl_gym


def from_skyrl_gym(env_id: str, env_config: Any = None) -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> list[float]:
        # One thread for each environment: its calls may block, and `close` waits until a cancelled call has returned.
        thread = ThreadPoolExecutor(1)
        call = partial(asyncio.get_running_loop().run_in_executor, thread)
        made, rewards, done = [], [], False
        try:
            # The thread stores the environment, because a cancelled call returns nothing.
            await call(lambda: made.append(skyrl_gym.make(env_id, env_config=env_config or {}, extras=task)))
            [environment] = made
            messages, _ = await call(environment.init, list(task["prompt"]))
            while not done:
                reply = await policy.chat(messages)
                step = await call(environment.step, reply.text)
                rewards.append(float(step["reward"]))
                messages, done = [*messages, reply.message, *step["observations"]], step["done"]
            for name, value in environment.get_metrics().items():
                if isinstance(value, int | float):
                    policy.note(name, value)
            return rewards
        finally:
            try:
                await call(lambda: [each.close() for each in made])
            finally:
                thread.shutdown(wait=False)

    return episode
