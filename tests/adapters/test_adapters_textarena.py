"""Games of textarena, played and trained by a run: against an opponent, against itself, and closed in every case."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

ta = pytest.importorskip("textarena", reason="needs textarena: python tools/adapters.py textarena")

from adapters_helpers import cancel_play, chat_model, open_run, turns_of
from from_textarena import from_textarena
from textarena.envs.TicTacToe.env import TicTacToeEnv

CELLS = [f"[{cell}]" for cell in range(9)]
asked, released, making, made = (threading.Event() for _ in range(4))
counts = {"opened": 0, "closed": 0}


def build(seed: int) -> tuple[Any, Any]:
    return chat_model(seed, CELLS)


class Watched(TicTacToeEnv):  # type: ignore[misc]
    """The package's game, which counts its ends, and fails or waits if the test says so."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        counts["opened"] += 1
        if fault == "waits to open":
            making.set()
            made.wait()

    def step(self, action: str) -> Any:
        if self.fault == "raises":
            raise ValueError("broken game")
        if self.fault == "waits":
            asked.set()
            released.wait()
        return super().step(action)

    def close(self) -> Any:
        counts["closed"] += 1
        return super().close()


ta.register("Watched-v0", Watched)


def some_cell(text: str) -> str:
    return random.choice(CELLS)


async def test_games_of_textarena_train_a_step_and_are_always_closed() -> None:
    async with open_run(f"{__file__}:build", "rollout.max_tokens=2", "rollout.max_context=4090") as runtime:
        against = await runtime.play(from_textarena("Watched-v0", 2, some_cell), {"seat": 1}, n=8)
        itself = await runtime.play(from_textarena("Watched-v0", 2), {"seat": 0}, n=8)
        assert counts == {"opened": 16, "closed": 16}
        assert await runtime.play(from_textarena("Watched-v0", 2, fault="raises"), {}, n=2) == []
        threading.Timer(0.5, released.set).start()
        await cancel_play(runtime, from_textarena("Watched-v0", 2, fault="waits"), {}, asked.is_set)
        threading.Timer(0.5, made.set).start()
        await cancel_play(runtime, from_textarena("Watched-v0", 2, fault="waits to open"), {}, making.is_set)
        summary = await runtime.finish()
    # Of two members that fail, the second may be cancelled before it has a game.
    assert counts["opened"] == counts["closed"] in (19, 20)
    assert {t.reward for t in [*against, *itself]} <= {-1.0, 0.0, 1.0} and len({t.reward for t in against}) > 1
    # Without the note: rollout.max_context ended the game. Both seats are branches of one episode, and the rules are read by each.
    assert {t.extras.get("own/invalid_moves", 0) for t in itself} == {0, 1}
    assert all(t.branches is not None and turns_of(t) >= 2 for t in itself)
    text = runtime.tokenizer.decode(against[0].tokens)
    assert "You are Player 1" in text
    assert summary.version == 1 and summary.books.failed == 1 and summary.books.dropped == 2, summary.reasons
