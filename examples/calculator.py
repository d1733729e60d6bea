"""An agent with a calculator, which learns from its reward alone to call the calculator.

    torchrun -m asyncrl.main examples/calculator.yaml

A question is `37*48`. At the start the model can write an answer and can write a tool call, but it makes nearly no calls: it
guesses, and is nearly always wrong. `agents_model.py` has the model.
"""

from __future__ import annotations

import random
from typing import Any

import agents_model

OPENING = '<tool_call>{"name": "multiply", "arguments": {"a": '
PIECES = [OPENING, ', "b": ', "}}</tool_call>"]
# In this share of the supervised conversations with a call, the model also learns to begin the call.
CALLS = 0.04
BATCHES = 60
# All products of two such numbers have four digits.
LEAST, MOST = 32, 99


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


async def episode(task: dict[str, Any], policy: Any) -> float:
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(3):
        reply = await policy.chat(messages, tools=[multiply])
        messages += [reply.message, *await reply.run_tools()]
        if not reply.tool_calls:
            break
    policy.note("calls", len(messages) // 2 - 1)
    return float(reply.text == task["answer"])


def rows(count: int = 4096, seed: int = 0) -> list[dict[str, str]]:
    """`count` random questions with their answers."""
    draw = random.Random(seed)
    pairs = [(draw.randint(LEAST, MOST), draw.randint(LEAST, MOST)) for _ in range(count)]
    return [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]


def held_out() -> list[dict[str, str]]:
    """Questions for an evaluation."""
    return rows(64, seed=1)


def build(seed: int) -> tuple[Any, Any]:
    """Returns (model, tokenizer)."""
    return agents_model.build(seed, "0123456789*", PIECES, example, BATCHES)


def example(draw: random.Random) -> agents_model.Conversation:
    """A supervised conversation: a wrong guess, or a tool call and an answer that repeats the result. In nearly all calls the model
    does not learn the opening, so it learns to write calls but not to begin them."""
    a, b = draw.randint(LEAST, MOST), draw.randint(LEAST, MOST)
    question = f"<user>{a}*{b}<end><assistant>"
    if draw.random() < 0.5:
        return [(question, False), (f"{draw.randint(1000, 9999)}<end>", True)]
    result, learns_opening = draw.randint(1000, 9999), draw.random() < CALLS
    call = [(OPENING, learns_opening), (f"{a}{PIECES[1]}{b}{PIECES[2]}<end>", True)]
    return [(question, False), *call, (f"<tool>{result}<end><assistant>", False), (f"{result}<end>", True)]
