"""An `Env` of tinker-cookbook, played and trained by a run: token ids in both directions, and a reward for each step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

tinker = pytest.importorskip("tinker", reason="needs tinker: python tools/adapters.py tinker")

from adapters_helpers import cancel_play, chat_model, open_run, turns_of
from from_tinker import from_tinker
from tinker_cookbook.rl.types import Env, InitialObservationOverflow, StepResult

counts = {"opened": 0, "closed": 0}
asked = asyncio.Event()


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, ["yes", "no"])


class Asking(Env):  # type: ignore[misc]
    """Asks until the policy says yes, at most three times. `tokenizer`: the run's, as tinker's renderers need it."""

    def __init__(self, tokenizer: Any, fault: str = "") -> None:
        self.tokenizer, self.fault = tokenizer, fault
        self.ids = tokenizer.encode("<user>well?<end><assistant>")
        self.steps = 0
        self.reasons: list[str] = []
        counts["opened"] += 1

    async def initial_observation(self) -> Any:
        if self.fault == "overflows":
            return InitialObservationOverflow(reward=0.0)
        return tinker.ModelInput.from_ints(self.ids), ["yes"] if self.fault == "stops" else [1]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        if self.fault == "raises":
            raise ValueError("broken environment")
        if self.fault == "waits":
            asked.set()
            await asyncio.Event().wait()
        assert extra["stop_reason"] == ("stop" if action[-1] == 1 or self.fault == "stops" else "length")
        self.steps += 1
        agreed = "yes" in self.tokenizer.decode(action)
        self.ids += [*action, *self.tokenizer.encode("<user>really?<end><assistant>")]
        return StepResult(
            reward=float(agreed) / self.steps,
            episode_done=agreed or self.steps == 3,
            next_observation=tinker.ModelInput.from_ints(self.ids),
            next_stop_condition=[1],
            metrics={"steps": self.steps},
        )

    async def close(self) -> None:
        await asyncio.sleep(0)
        counts["closed"] += 1


async def test_an_environment_of_tinker_trains_a_step_and_is_always_closed() -> None:
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:

        def episode(fault: str = "") -> Any:
            return from_tinker(lambda task: Asking(runtime.tokenizer, fault))

        groups = [await runtime.play(episode(), {"question": 1}, n=8) for _ in range(2)]
        assert counts == {"opened": 16, "closed": 16}
        [stopped] = await runtime.play(episode("stops"), {}, n=1)
        assert await runtime.play(episode("raises"), {}, n=2) == []
        assert await runtime.play(episode("overflows"), {}, n=2) == []
        await cancel_play(runtime, episode("waits"), {}, asked.is_set)
        # Of two members that fail, the second may be cancelled before it has an environment.
        assert counts["opened"] == counts["closed"] in (20, 21, 22)
        summary = await runtime.finish()
    for trajectory in [*groups[0], *groups[1]]:
        text = runtime.tokenizer.decode(trajectory.tokens)
        said = text.split("<assistant>")[1:]
        # One line of tokens: every observation goes on from the sampled tokens themselves.
        assert trajectory.branches is None and turns_of(trajectory) == len(said) <= 3
        assert list(trajectory.turn_rewards or ()) == [part.startswith("yes") / (n + 1) for n, part in enumerate(said)]
        assert trajectory.extras["own/steps"] == len(said)
    assert len({t.reward for group in groups for t in group}) > 1
    assert stopped.reward in (0.0, 1.0)
    assert summary.version >= 1 and summary.books.failed == 2
