"""Rewards of the SmolLM2 example, in TRL's form. A reward worker loads this file in 0.1 s, because it imports no torch."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")


def _text(completion: str | list[dict[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 if the last number of the completion is the answer, else 0."""
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = _NUMBER.findall(_text(completion))
        scores.append(float(bool(numbers) and int(numbers[-1]) == int(expected)))
    return scores


def bare(completions: list[Any], **columns: Any) -> list[float]:
    """1 for a completion that is only a number, 0.5 for at most 60 characters that end in a number, else 0."""
    scores = []
    for completion in completions:
        text = _text(completion).strip().rstrip(".").strip("* ")
        if _NUMBER.fullmatch(text):
            scores.append(1.0)
        else:
            last = text.rsplit(maxsplit=1)[-1].strip("* ") if text else ""
            scores.append(0.5 if _NUMBER.fullmatch(last) and len(text) <= 60 else 0.0)
    return scores
