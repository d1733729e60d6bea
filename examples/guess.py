"""A game of several turns: find one of seven letters with three guesses.

    torchrun -m asyncrl.main examples/guess.yaml

After each guess the agent reads a hint: the letter comes later (+) or earlier (-). At the start the model guesses at random, in
half of its games only among the letters that the hints allow. The reward teaches the model to heed every hint, and to guess the
middle of the allowed letters. `agents_model.py` has the model.
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
    return agents_model.build(seed, f"{LETTERS}?+-", [], example, batches=250)


def example(draw: random.Random) -> agents_model.Conversation:
    """A game. In half of the games each guess is drawn from all letters, in the others from the letters that the hints allow."""
    secret, allowed, heeds_hints = draw.choice(LETTERS), LETTERS, draw.random() < 0.5
    parts: list[tuple[str, bool]] = [("<user>?<end><assistant>", False)]
    for _ in range(GUESSES):
        guess = draw.choice(allowed or LETTERS)
        sign = hint(guess, secret)
        parts += [(f"{guess}<end>", True), (f"<user>{sign}<end><assistant>", False)]
        if heeds_hints:
            allowed = "".join(each for each in allowed if (each > guess if sign == "+" else each < guess))
    return parts
