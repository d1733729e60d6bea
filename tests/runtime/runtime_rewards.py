"""The reward functions of whole runs. Each reward worker loads this file: it imports next to nothing."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"


def pipe_in_place_of_the_report(completions: list[Any], **columns: Any) -> list[float]:
    """Writing into it waits for a reader, who never comes."""
    path = Path("runs/run/report.html.partial")
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # there are several workers
            os.mkfifo(path)
    return [0.5] * len(completions)


def share(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Share of the characters that are the asked letter."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [text.count(letter) / max(len(text), 1) for text, letter in zip(texts, answer, strict=True)]


another_name = share


def stingy(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """`share`, but for half of the letters nothing is ever right."""
    right = share(completions, answer)
    return [0.0 if letter in LETTERS[::2] else value for value, letter in zip(right, answer, strict=True)]


def short(completions: list[Any], **columns: Any) -> list[float | None]:
    """Does not apply to completions of odd length."""
    return [None if len(text) % 2 == 1 else float(len(text) < 6) for text in completions]


def broken(completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("no such column")


def crash(completions: list[str], **columns: Any) -> list[float]:
    os._exit(9)


def chatty(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    print("scoring " + "x" * 4000, flush=True)
    return share(completions, answer)


def slow(completions: list[str], **columns: Any) -> list[float]:
    time.sleep(3600)
    return [0.0] * len(completions)


def gated(completions: list[str], **columns: Any) -> list[float]:
    """Not before there is a file of that name."""
    while not os.path.exists(os.environ["GATE"]):
        time.sleep(0.01)
    return [0.0] * len(completions)
