"""verl's own `compute_score` as the reward of an episode with a tool, played and trained by a run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: python tools/adapters.py verl")

from adapters_helpers import call_of, chat_model, open_run, turns_of
from from_verl import from_verl
from verl.utils.reward_score import default_compute_score

ROW = {
    "prompt": [{"role": "user", "content": "2+3?"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 0},
}


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, ["#### 5", "#### 6", call_of("add", '{"a": 2, "b": 3}')])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def score_with_parts(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
    assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", "5", {"index": 0})
    return {"score": len(solution_str), "acc": 0.5, "pred": "text"}


async def test_compute_score_of_verl_trains_a_step() -> None:
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2") as runtime:
        groups = [await runtime.play(from_verl(default_compute_score, [add], 3), ROW, n=8) for _ in range(2)]
        [parts] = await runtime.play(from_verl(score_with_parts), ROW, n=1)
        assert await runtime.play(from_verl(default_compute_score), {**ROW, "data_source": "no such"}, n=2) == []
        summary = await runtime.finish()
    for trajectory in [*groups[0], *groups[1]]:
        said = [m for m in trajectory.completion if m["role"] == "assistant"]
        assert turns_of(trajectory) == len(said) and all(m.get("tool_calls") for m in said[:-1])
        # verl's score takes the last answer of the whole response.
        assert trajectory.reward == float("#### 5" in said[-1]["content"])
    assert len({t.reward for group in groups for t in group}) > 1
    assert parts.extras["own/acc"] == 0.5 and "own/pred" not in parts.extras
    assert summary.version >= 1 and summary.books.failed == 1
