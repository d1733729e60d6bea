"""TRL's tools and environments, played and trained by a run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: python tools/adapters.py trl")

from adapters_helpers import call_of, cancel_play, chat_model, open_run, turns_of
from from_trl import from_trl

GUESS, ADD = call_of("guess", '{"number": 3}'), call_of("add", '{"a": 1, "b": 2}')
PROMPT = [{"role": "user", "content": "guess"}]


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, [GUESS, ADD, "no"])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


class Game:
    """An environment in the form of TRL's documentation."""

    asked = threading.Event()
    released = threading.Event()

    def reset(self, secret: int, **_: Any) -> str:
        if secret == -1:
            raise ValueError("no such game")
        self.secret, self.right = secret, False
        return f" (below {secret + 5})"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        if self.secret == -2:
            Game.asked.set()
            Game.released.wait()
        self.right = number == self.secret
        return "right" if self.right else "wrong"

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return float(self.right)


class OtherGame(Game):
    async def get_reward(self) -> float:  # type: ignore[override]
        return -1.0


async def test_tools_and_environments_of_trl_train_a_step() -> None:
    episode = from_trl([add], {"game": Game, "other": OtherGame}, max_tool_calling_iterations=3)
    rows = [{"prompt": PROMPT, "environment": "game", "secret": secret} for secret in (3, 4)]
    async with open_run(f"{__file__}:build") as runtime:
        right, wrong = [await runtime.play(episode, row, n=8) for row in rows]
        other = await runtime.play(episode, {**rows[0], "environment": "other"}, n=2)
        assert [t.reward for t in other] == [-1, -1]
        assert await runtime.play(episode, {**rows[0], "secret": -1}, n=2) == []
        await cancel_play(runtime, episode, {**rows[0], "secret": -2}, Game.asked.is_set)
        Game.released.set()
        summary = await runtime.finish()
    # A guess of 3 is right where 3 is the secret. An episode without a guess has no reward.
    for trajectory in right:
        said = [call["function"]["name"] for m in trajectory.completion for call in m.get("tool_calls", ())]
        assert trajectory.reward == float("guess" in said)
        assert trajectory.mask.sum() >= 2 * turns_of(trajectory) - 1
        assert turns_of(trajectory) == sum(m["role"] == "assistant" for m in trajectory.completion) <= 4
        results = [m["content"] for m in trajectory.completion if m["role"] == "tool"]
        assert results == [{"guess": "right", "add": "3"}[name] for name in said][: len(results)]
    assert {t.reward for t in right} == {0.0, 1.0} and {t.reward for t in wrong} == {0.0}
    # TRL's rule: public methods are tools, but `reset` and `get_reward`.
    read = runtime.tokenizer.decode(right[0].tokens)
    assert "guess (below 8)" in read and '"add"' in read and '"guess"' in read
    assert "reset" not in read and "hidden" not in read and "get_reward" not in read
    assert summary.version >= 1 and summary.books.failed == 1 and summary.books.dropped == 1
