"""A reward that compares answers: a judge reads all pairs of a group. The score of an answer is its mean over its pairs.

    reward: {functions: [pairwise.py:wins], timeout_s: 300, retries: 0}

JUDGE_URL is the address of an OpenAI-compatible endpoint, and JUDGE_MODEL its model. Every pair is asked in both orders, because
judges prefer the first answer. A group of 8 needs 56 requests, which run at the same time. A pair without a judgement counts 0.5.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import asyncrl
from asyncrl.errors import RewardError

judge = asyncrl.Judge(
    os.environ.get("JUDGE_URL", "http://localhost:8000/v1"),
    "Answer A is better than answer B (5: both are equally good).",
    model=os.environ.get("JUDGE_MODEL"),
    request={"temperature": 0, "max_tokens": 512},
)


@asyncrl.whole_group
async def wins(prompts: list[Any], completions: list[Any], log_metric: Any) -> list[float | None]:
    """The mean over the pairs of each completion. None for a group of one, which has no pair."""

    async def compare(first: int, second: int) -> float:
        texts = {"conversation": prompts[0], "answer A": completions[first], "answer B": completions[second]}
        return (await judge.ask(judge.messages(texts), judge.read))["score"]

    pairs = list(itertools.permutations(range(len(completions)), 2))
    scores = await asyncio.gather(*(compare(*pair) for pair in pairs), return_exceptions=True)
    points: list[list[float]] = [[] for _ in completions]
    for (first, second), score in zip(pairs, scores, strict=True):
        if isinstance(score, BaseException):
            if not isinstance(score, RewardError):
                raise score
            score = 0.5
        points[first].append(score)
        points[second].append(1 - score)
    log_metric("undecided", sum(isinstance(score, RewardError) for score in scores))
    return [sum(each) / len(each) if each else None for each in points]
