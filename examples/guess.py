"""A game of several turns: find one of seven letters with three guesses.

    torchrun -m asyncrl.main examples/guess.yaml

After each guess the agent reads whether the letter comes later (+) or earlier (-). The first model guesses at random and finds the
letter in less than half of the games. Its reward teaches it to halve what is left. `agents_model.py` has the model.
"""

from __future__ import annotations

import random
from typing import Any

import agents_model

LETTERS = "abcdefg"
GUESSES = 3


async def episode(task: dict[str, Any], policy: Any) -> float:
    messages = [{"role": "user", "content": task["prompt"]}]
    for number in range(GUESSES):
        reply = await policy.chat(messages)
        if reply.text == task["secret"]:
            policy.note("guesses", number + 1)
            return 1.0
        messages += [reply.message, {"role": "user", "content": hint(reply.text, task["secret"])}]
    return 0.0


def hint(guess: str, secret: str) -> str:
    return "+" if guess < secret else "-"


def rows() -> list[dict[str, str]]:
    """A row for each letter."""
    return [{"prompt": "?", "secret": letter} for letter in LETTERS]


def build(seed: int) -> tuple[Any, Any]:
    """Returns (model, tokenizer)."""
    return agents_model.build(seed, f"{LETTERS}?+-", [], example, batches=20)


def example(draw: random.Random) -> agents_model.Conversation:
    """A game with random guesses and random answers."""
    parts: list[tuple[str, bool]] = [("<user>?<end><assistant>", False)]
    for _ in range(GUESSES):
        parts += [(f"{draw.choice(LETTERS)}<end>", True), (f"<user>{draw.choice('+-')}<end><assistant>", False)]
    return parts
