"""skyrl-gym's own multi-turn environment, played and trained by a run: a reward for each turn, and a close for each environment."""

from __future__ import annotations

import threading
from typing import Any

import pytest

skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs skyrl-gym: python tools/adapters.py skyrl_gym")

from adapters_helpers import cancel_play, chat_model, open_run, turns_of
from from_skyrl_gym import from_skyrl_gym
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv

ROW = {"prompt": [{"role": "user", "content": "2+3?"}], "reward_spec": {"ground_truth": "5"}, "max_turns": 3}
asked, released, making, made = (threading.Event() for _ in range(4))
counts = {"opened": 0, "closed": 0}


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, ["#### 5", "#### 6", "five"])


class Watched(GSM8kMultiTurnEnv):  # type: ignore[misc]
    """The package's environment, which counts its ends, and fails or waits if the row says so."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        self.fault, self.steps = extras.get("fault"), 0
        counts["opened"] += 1
        if self.fault == "waits to open":
            making.set()
            made.wait()

    def step(self, action: str) -> Any:
        if self.fault == "raises":
            raise ValueError("broken environment")
        if self.fault == "waits":
            asked.set()
            released.wait()
        self.steps += 1
        return super().step(action)

    def close(self) -> None:
        counts["closed"] += 1
        # Not while a step runs.
        assert self.fault != "waits" or self.steps == 1


skyrl_gym.register(id="watched", entry_point=Watched)


async def test_an_environment_of_skyrl_gym_trains_a_step_and_is_always_closed() -> None:
    episode = from_skyrl_gym("watched")
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        groups = [await runtime.play(episode, ROW, n=8) for _ in range(2)]
        assert counts == {"opened": 16, "closed": 16}
        assert await runtime.play(episode, {**ROW, "fault": "raises"}, n=2) == []
        assert await runtime.play(episode, {"prompt": ROW["prompt"]}, n=2) == []
        threading.Timer(0.5, released.set).start()
        await cancel_play(runtime, episode, {**ROW, "fault": "waits"}, asked.is_set)
        threading.Timer(0.5, made.set).start()
        await cancel_play(runtime, episode, {**ROW, "fault": "waits to open"}, making.is_set)
        summary = await runtime.finish()
    # Of two members that fail, the second may be cancelled before it has an environment.
    assert counts["opened"] == counts["closed"] in (19, 20)
    for trajectory in [*groups[0], *groups[1]]:
        replies = [m["content"] for m in trajectory.completion if m["role"] == "assistant"]
        score = {"#### 5": 1.0, "#### 6": 0.2 / 3}
        assert trajectory.turn_rewards == pytest.approx([score.get(reply, 0.0) for reply in replies])
        assert trajectory.reward == pytest.approx(sum(trajectory.turn_rewards or ()))
        assert turns_of(trajectory) == len(replies) <= 3
        assert trajectory.extras["own/steps"] == len(replies)
    assert len({t.reward for group in groups for t in group}) > 1
    assert summary.version == 1 and summary.books.failed == 2 and summary.books.dropped == 2
