"""A data set of reasoning-gym with two tries, played and trained by a run and scored by the package."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: python tools/adapters.py reasoning_gym")

from adapters_helpers import chat_model, open_run, turns_of
from from_reasoning_gym import WRONG, from_reasoning_gym

# The answers of this data set are digits here.
rows, episode = from_reasoning_gym(
    "basic_arithmetic", size=40, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
)


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, [f"<answer>{n}</answer>" for n in (0, 4, 8)])


async def test_a_data_set_of_reasoning_gym_trains_a_step() -> None:
    answers = {entry["answer"]: row for row, entry in zip(rows(), episode.__closure__[0].cell_contents, strict=True)}
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        groups = [await runtime.play(episode, answers[answer], n=8) for answer in ("4", "8")]
        summary = await runtime.finish()
    for answer, group in zip(("4", "8"), groups, strict=True):
        for trajectory in group:
            tries = [m["content"] for m in trajectory.completion if m["role"] == "assistant"]
            right = [f"<answer>{answer}</answer>" == each for each in tries]
            assert turns_of(trajectory) == len(tries) == trajectory.extras["own/tries"] == (1 if right[0] else 2)
            # A wrong answer gets a small score from the package.
            assert trajectory.reward == (1.0 if right[0] else 0.5) if right[-1] else (trajectory.reward or 0) < 0.5
            assert (WRONG in runtime.tokenizer.decode(trajectory.tokens)) == (not right[0])
    assert len({t.reward for group in groups for t in group}) > 1
    assert summary.version == 1 and summary.books.trained == 2
