"""tinker's `Env` as an episode (tinker 0.38, tinker-cookbook 0.6).

    class MyEnv(Env): initial_observation, step   ->   episode = from_tinker(lambda task: MyEnv(task["question"], ...))

The environment sees and makes token ids, so its renderer must belong to the run's model. Each turn gets the reward of its step.
Instead of an `EnvGroupBuilder` pass a function that makes one environment. Write `compute_group_rewards` as a reward function of
the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tinker_cookbook.rl.types import Env, InitialObservationOverflow


def from_tinker(make: Callable[[dict[str, Any]], Env]) -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> list[float] | float:
        made = make(task)
        environment: Any = await made if inspect.isawaitable(made) else made
        rewards: list[float] = []
        try:
            first = await environment.initial_observation()
            if isinstance(first, InitialObservationOverflow):
                raise ValueError(f"the first observation is too long for the environment: {first.logs}")
            observation, stop = first
            while True:
                reply = await policy.complete(observation.to_ints(), **_stop(stop))
                reason = "length" if reply.finish_reason == "length" else "stop"
                step = await environment.step(reply.token_ids.tolist(), extra={"stop_reason": reason})
                rewards.append(float(step.reward))
                for name, value in step.metrics.items():
                    policy.note(name, float(value))
                if step.episode_done:
                    return rewards
                observation, stop = step.next_observation, step.next_stop_condition
        finally:
            # `Env` has no `close`, but environments that hold resources often have one.
            close = getattr(environment, "close", None) or getattr(environment, "cleanup", None)
            if close is not None and inspect.isawaitable(closing := close()):
                await closing

    return episode


def _stop(condition: list[str] | list[int]) -> dict[str, Any]:
    """The arguments of `complete` for a stop condition, which is a list of texts or of token ids."""
    texts = tuple(each for each in condition if isinstance(each, str))
    ids = tuple(each for each in condition if isinstance(each, int))
    return {name: value for name, value in (("stop", texts), ("stop_token_ids", ids)) if value}
