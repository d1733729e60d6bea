"""Reward of the GSM8K examples: whether the completion ends with the right number."""

from __future__ import annotations

import re
from typing import Any

_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def _number(text: str) -> float | None:
    """The number after the last `####`; None if there is no such number."""
    found = _ANSWER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 if completion and `answer` have the same number after their last `####`, else 0."""
    texts = [each if isinstance(each, str) else str(each[-1]["content"]) for each in completions]
    numbers = [(_number(text), _number(expected)) for text, expected in zip(texts, answer, strict=True)]
    return [float(found is not None and found == expected) for found, expected in numbers]
