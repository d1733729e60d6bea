"""Reward models beside reward functions: weights, names, what an error means, and a loop that never waits for them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from rewards_helpers import FILE, prompt, trajectories

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.pool import RewardPool, RewardSpec
from asyncrl.telemetry.recorder import Recorder


class Letters:
    """A score is the number of letters; texts and batches of two, so that one call takes several closures."""

    def __init__(self, name: str = "letters", max_text_tokens: int = 20) -> None:
        self.name, self.max_text_tokens = name, max_text_tokens
        self.threads: set[str] = set()
        self.batched: list[int] = []
        self.answer: Any = None

    def tokenize(self, prompt: Any, completion: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return [ord(letter) for letter in prompt + completion]

    def batches(self, texts: Sequence[list[int]]) -> Iterator[list[int]]:
        yield from ([place for place in (start, start + 1) if place < len(texts)] for start in range(0, len(texts), 2))

    def scores(self, texts: Sequence[list[int]]) -> list[float]:
        self.threads.add(threading.current_thread().name)
        self.batched.append(len(texts))
        if isinstance(self.answer, Exception):
            raise self.answer
        return [float(len(text)) if self.answer is None else self.answer for text in texts]


@pytest.fixture
async def lane() -> AsyncIterator[ThreadLane]:
    async with ThreadLane("device") as opened:
        yield opened


@asynccontextmanager
async def rewards(
    lane: ThreadLane, *models: tuple[Letters, float], on_error: Any = "fail", functions: Any = ()
) -> AsyncIterator[tuple[RewardPool, Recorder]]:
    recorder = Recorder(max_events=0, nvtx=False)
    async with RewardPool(RewardConfig(on_error=on_error), recorder, functions) as pool:
        pool.add_models(models, lane)
        yield pool, recorder


async def test_components_are_added_by_their_weights_after_those_of_the_functions(lane: ThreadLane) -> None:
    one, two = Letters("one"), Letters("two")
    async with rewards(lane, (one, 2.0), (two, 0.1), functions=[RewardSpec(f"{FILE}:half", 10.0)]) as (made, _):
        assert made.weights == {"half": 10.0, "one": 2.0, "two": 0.1}
        found = await made.score(prompt(0, "ab"), trajectories("c", "nn", "ddd"))
    assert [dict(t.components) for t in found] == [
        {"half": 0.5, "one": 3.0, "two": 3.0},
        {"half": None, "one": 4.0, "two": 4.0},
        {"half": 0.5, "one": 5.0, "two": 5.0},
    ]
    assert [t.reward for t in found] == pytest.approx([5 + 6.3, 8.4, 5 + 10.5])
    assert one.batched == [2, 1] and one.threads == {"lane:device"}


async def test_the_environments_own_reward_stays_in_the_sum(lane: ThreadLane) -> None:
    async with rewards(lane, (Letters(), 1.0)) as (made, _):
        [found] = await made.score(prompt(0, "a"), [replace(trajectories("bc")[0], reward=100.0)])
        assert found.reward == 103.0 and await made.score(prompt(0, "a"), []) == []


@pytest.mark.parametrize(("on_error", "value"), [("none", None), ("zero", 0.0)])
async def test_a_text_that_is_too_long_is_no_score_and_is_counted(lane: ThreadLane, on_error: str, value: Any) -> None:
    judge = Letters(max_text_tokens=4)
    async with rewards(lane, (judge, 1.0), on_error=on_error) as (made, recorder):
        found = await made.score(prompt(0, "ab"), trajectories("c", "ddd", "cd"))
    assert [t.components["letters"] for t in found] == [3.0, value, 4.0]
    assert [t.reward for t in found] == [3.0, value, 4.0] and judge.batched == [2]
    assert recorder.take_counts(("reward/",))["reward/letters/errors"] == 1


async def test_a_model_that_raises_counts_an_error_for_each_text(lane: ThreadLane) -> None:
    broken = Letters()
    broken.answer = ZeroDivisionError("no scale")
    async with rewards(lane, (broken, 1.0), on_error="none") as (made, recorder):
        assert [t.reward for t in await made.score(prompt(), trajectories("a", "b", "c"))] == [None] * 3
    assert recorder.take_counts(("reward/",))["reward/letters/errors"] == 3


async def test_a_text_that_is_too_long_ends_the_run_where_errors_do(lane: ThreadLane) -> None:
    async with rewards(lane, (Letters(max_text_tokens=4), 1.0)) as (made, _):
        with pytest.raises(
            RewardError,
            match=r"'letters' \(group 7\).*5 tokens, but the model takes at most 4, and texts are never cut",
        ):
            await made.score(prompt(7, "ab"), trajectories("ddd"))


@pytest.mark.parametrize("answer", [math.nan, math.inf, ZeroDivisionError("no scale")])
async def test_what_is_no_finite_number_is_an_error_that_names_the_model(lane: ThreadLane, answer: Any) -> None:
    for on_error, value in (("none", None), ("fail", ...)):
        judge = Letters()
        judge.answer = answer
        async with rewards(lane, (judge, 1.0), on_error=on_error) as (made, _):
            scoring = made.score(prompt(0, "a"), trajectories("b"))
            if on_error == "none":
                assert [t.reward for t in await scoring] == [value]
            else:
                with pytest.raises(RewardError, match=r"'letters'.*(finite|no scale)"):
                    await scoring


async def test_names_are_told_apart(lane: ThreadLane) -> None:
    with pytest.raises(ConfigError, match="2 reward models are named 'letters'"):
        async with rewards(lane, (Letters(), 1.0), (Letters(), 1.0)):
            pass
    with pytest.raises(ConfigError, match="both named 'half'"):
        async with rewards(lane, (Letters("half"), 1.0), functions=[RewardSpec(f"{FILE}:half")]):
            pass


async def test_the_loop_goes_on_while_a_model_scores(lane: ThreadLane) -> None:
    """The model waits for what only the loop can do: with a blocked loop this would never end."""
    done = threading.Event()

    class Waiting(Letters):
        def scores(self, texts: Sequence[list[int]]) -> list[float]:
            assert done.wait(30)
            return [1.0] * len(texts)

    async with rewards(lane, (Waiting(), 1.0)) as (made, _), asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(made.score(prompt(0, "a"), trajectories("b")))
        await asyncio.sleep(0)
        done.set()
        assert [t.reward for t in await scoring] == [1.0]
