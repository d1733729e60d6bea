"""One suite for every engine behind `ports.Engine`: results, limits, cancellation, closing, failure, weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import uvloop
from generation_cores import PlainCore
from generation_models import VOCABULARY, generate_all, policy_and_plain, request

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.errors import DivergenceError, EngineClosed, GenerationError, LifecycleError
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.generation.owner import OwnedEngine
from asyncrl.generation.vllm.engine import CoreSpec, VllmEngine
from asyncrl.ports import Engine, WeightSink
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason

KINDS = ["embedded", "vllm", "dry_run"]  # vllm: its engine, on a core of transformers' forward


class Bench:
    """An engine that is not open yet, its open lane, and a handle on the version."""

    def __init__(self, kind: str, lane: ThreadLane, recorder: Recorder, **numbers: int) -> None:
        self.lane = lane
        self.recorder = recorder
        self.version = 0
        self.broken: BaseException | None = None  # raised by the next closure that reads the version
        self.failures: list[GenerationError] = []
        sizes = {"max_sequences": 3, "max_context": 64} | numbers
        self.engine: OwnedEngine
        if kind == "embedded":
            policy, _ = policy_and_plain("qwen3")
            hidden = policy.hidden

            def guarded(*args: Any) -> Any:
                self._read()
                return hidden(*args)

            policy.hidden = guarded  # type: ignore[method-assign]
            self._set: Callable[[int], None] = lambda version: setattr(policy, "version", version)
            self.engine = EmbeddedEngine(policy, None, lane, recorder, **sizes)
        elif kind == "vllm":
            self.engine = engine = self._vllm(sizes)
            engine.version = 0
            self._set = lambda version: setattr(engine, "version", version)
        else:
            self._set = lambda version: None
            self.engine = DryRunEngine(
                lane, recorder, version_source=self._read, decode_step_s=0.0, length_sigma=0.4, **sizes
            )

    def _vllm(self, sizes: dict[str, int]) -> VllmEngine:
        policy, plain = policy_and_plain("qwen3")
        read = self._read

        class Guarded(PlainCore):
            def step(self) -> list[Any]:
                read()
                return super().step()

        made = CoreSpec(torch.float32, VOCABULARY, ())
        return VllmEngine(lambda choose: Guarded(policy, plain, choose), made, None, self.lane, self.recorder, **sizes)

    def _read(self) -> int:
        if self.broken is not None:
            raise self.broken
        return self.version

    async def advance(self) -> None:
        def train() -> None:
            self.version += 1
            self._set(self.version)

        await self.lane.run(train, name="train/finish", priority=1)

    async def fail(self, seed: int) -> None:
        """A long request, whose failure is kept."""
        try:
            await self.engine.generate(request(3, seed, max_tokens=60, ignore_eos=True))
        except GenerationError as error:
            self.failures.append(error)

    async def steps(self, count: int) -> None:
        while self.engine.statistics()["decode_steps"] < count:
            await self.lane.run(lambda: None, name="tick")


@asynccontextmanager
async def bench(kind: str, **numbers: int) -> AsyncIterator[Bench]:
    recorder = Recorder(nvtx=False)
    async with ThreadLane("test", recorder) as lane:
        yield Bench(kind, lane, recorder, **numbers)


pytestmark = pytest.mark.parametrize("kind", KINDS)


async def test_answers_have_their_form(kind: str) -> None:
    requests = [request(2 + seed, seed, max_tokens=1 + 4 * seed) for seed in range(9)]
    async with bench(kind) as made, made.engine:
        assert isinstance(made.engine, Engine) and isinstance(made.engine, WeightSink)
        answers = await generate_all(made.engine, requests)
        statistics = made.engine.statistics()
    for asked, answer in zip(requests, answers, strict=True):
        size = answer.token_ids.size
        assert 1 <= size <= asked.sampling.max_tokens
        assert answer.token_ids.dtype == answer.versions.dtype == np.int32
        assert answer.logprobs.dtype == answer.sampled_logprobs.dtype == np.float32
        assert answer.logprobs.shape == answer.sampled_logprobs.shape == answer.versions.shape == (size,)
        assert (answer.logprobs <= 0).all() and np.isfinite(answer.logprobs).all()
        assert (answer.versions == 0).all()
        assert (answer.finish_reason is FinishReason.LENGTH) == (size == asked.sampling.max_tokens)
    assert statistics["tokens"] == sum(answer.token_ids.size for answer in answers)
    assert statistics["finished"] == 9
    assert statistics["running"] == statistics["waiting"] == statistics["aborted"] == 0


async def test_a_request_is_answered_the_same_in_any_company(kind: str) -> None:
    requests = [request(4, seed, max_tokens=12) for seed in range(6)]
    async with bench(kind) as made, made.engine:
        crowd = await generate_all(made.engine, requests)
    async with bench(kind, max_sequences=1) as made, made.engine:
        alone = [await made.engine.generate(asked) for asked in requests[::-1]][::-1]
    for one, two in zip(crowd, alone, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
    assert len({answer.token_ids.tobytes() for answer in crowd}) == 6


async def test_at_most_max_sequences_run_and_of_those_that_wait_the_smaller_priority_is_first(kind: str) -> None:
    ended: list[int] = []
    async with bench(kind, max_sequences=1) as made, made.engine:

        async def one(seed: int, priority: int) -> None:
            await made.engine.generate(replace(request(3, seed, max_tokens=5), priority=priority))
            ended.append(seed)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, 0, 9)
            await made.steps(1)
            for seed, priority in enumerate((3, 1, 3, -1, 1), start=1):  # all of them wait for the one that runs
                tasks.start_soon(one, seed, priority)
            await made.steps(2)
            assert made.engine.statistics()["running"] == 1
    assert ended == [0, 4, 2, 5, 1, 3]


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (0, {}, "prompt is empty"),
    (60, {"max_tokens": 5}, "60 prompt tokens and max_tokens=5 are 65.*max_context=64"),
    (4, {"max_tokens": 0}, "max_tokens is 0"),
    (4, {"max_tokens": 8.0}, r"max_tokens is 8\.0, expected an integer"),
    (4, {"top_k": 2**70}, "top_k is .*, expected an integer from 0"),
    (4, {"top_k": float("inf")}, "top_k is inf, expected an integer from 0"),
    (4, {"temperature": -1.0}, "temperature is -1"),
    (4, {"temperature": float("nan")}, "temperature is nan"),
    (4, {"top_p": 0.0}, "top_p is 0"),
    (4, {"top_p": "1"}, "top_p is '1', expected 0 < top_p <= 1"),
    (4, {"stop": (5,)}, r"stop is \(5,\), expected a tuple of strings"),
    (4, {"logit_bias": {1: "x"}}, "logit_bias is {1: 'x'}, expected a dict of token ids"),
    (4, {"stop_token_ids": ("x",)}, r"stop_token_ids is \('x',\), expected a tuple of token ids"),
    (4, {"top_k": -2}, "top_k is -2"),
]


async def test_what_cannot_be_served_is_refused_with_numbers(kind: str) -> None:
    async with bench(kind) as made, made.engine:
        for size, sampling, text in REFUSED:
            with pytest.raises(GenerationError, match=text):
                await made.engine.generate(request(size, 0, **sampling))
            answer = await made.engine.generate(request(59, 0, max_tokens=5))  # exactly what fits
            assert answer.token_ids.size <= 5


async def test_a_cancelled_caller_frees_its_place(kind: str) -> None:
    async with bench(kind, max_sequences=2) as made, made.engine:
        async with anyio.create_task_group() as tasks:
            for seed in range(4):  # two run, two wait
                tasks.start_soon(made.engine.generate, request(3, seed, max_tokens=60, ignore_eos=True))
            await made.steps(1)
            assert made.engine.statistics()["waiting"] == 2
            tasks.cancel_scope.cancel()
        assert made.engine.statistics()["waiting"] == 0
        answer = await made.engine.generate(request(3, 9))
        assert answer.token_ids.size
        assert made.engine.statistics()["aborted"] == 4
        assert made.engine.statistics()["running"] == 0


async def test_cancellation_at_every_await_point(kind: str) -> None:
    """The caller is cancelled after 0, 1, ... passes of the loop, wherever the engine is then; the others never notice."""
    kept = request(4, 1, max_tokens=6, ignore_eos=True)
    async with bench(kind, max_sequences=2) as made, made.engine:
        alone = await made.engine.generate(kept)
        for turns in range(12):
            answers: list[Any] = []

            async def keep(answers: list[Any] = answers) -> None:
                answers.append(await made.engine.generate(kept))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep)
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as inner:
                        inner.start_soon(made.engine.generate, request(9, 2, max_tokens=40, ignore_eos=True))
                        for _ in range(turns):
                            await asyncio.sleep(0)
                        scope.cancel()
            await made.engine.generate(request(3, 3, max_tokens=2))
            assert made.engine.statistics()["running"] == made.engine.statistics()["waiting"] == 0, turns
            assert answers[0].token_ids.tolist() == alone.token_ids.tolist(), turns


async def test_closing_fails_everybody_who_waits(kind: str) -> None:
    async with bench(kind, max_sequences=2) as made, anyio.create_task_group() as tasks:
        async with made.engine:
            for seed in range(5):
                tasks.start_soon(made.fail, seed)
            await made.steps(2)
    assert len(made.failures) == 5
    assert all(type(failure) is EngineClosed for failure in made.failures)
    with pytest.raises(EngineClosed, match="closed"):
        await made.engine.generate(request(3, 0))
    with pytest.raises(EngineClosed, match="closed"):
        await made.engine.update_weights(0)


async def test_an_error_in_the_admission_of_a_request_fails_its_caller_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is on its way from those that wait to those that run."""

    def broken(engine: Any, job: Any) -> int:
        raise ZeroDivisionError("broken")

    with anyio.fail_after(60):
        async with bench(kind) as made, anyio.create_task_group() as tasks:
            monkeypatch.setattr(type(made.engine), "_add", broken)
            with pytest.raises(ZeroDivisionError):
                async with made.engine:
                    tasks.start_soon(made.fail, 1)
                    await anyio.sleep_forever()
    assert [str(failure.__cause__) for failure in made.failures] == ["broken"]


async def test_an_error_in_a_closure_fails_everybody_with_the_cause(kind: str) -> None:
    boom = DivergenceError("the weights are NaN")
    async with bench(kind, max_sequences=2) as made:

        def break_it() -> None:
            made.broken = boom

        async with anyio.create_task_group() as tasks:
            with pytest.raises(DivergenceError, match="NaN"):
                async with made.engine:
                    for seed in range(5):
                        tasks.start_soon(made.fail, seed)
                    await made.steps(2)
                    await made.lane.run(break_it, name="break")
                    await anyio.sleep_forever()  # the failed owner cancels the block
        assert len(made.failures) == 5
        assert all(failure.__cause__ is boom and "the weights are NaN" in str(failure) for failure in made.failures)
        with pytest.raises(GenerationError, match="failed: DivergenceError"):
            await made.engine.generate(request(3, 0))


async def test_a_closed_lane_is_a_failure_and_not_a_hang(kind: str) -> None:
    recorder = Recorder(nvtx=False)
    lane = ThreadLane("gone", recorder)
    async with lane:
        made = Bench(kind, lane, recorder)
    with pytest.raises(LifecycleError):
        async with made.engine:
            with pytest.raises(GenerationError, match="LifecycleError"):
                await made.engine.generate(request(3, 0))
            await anyio.sleep_forever()


async def test_three_states(kind: str) -> None:
    async with bench(kind) as made:
        with pytest.raises(EngineClosed, match="never opened"):
            await made.engine.generate(request(3, 0))
        async with made.engine:
            with pytest.raises(LifecycleError, match="open"):
                await made.engine.__aenter__()
            await made.engine.generate(request(3, 0))
        await made.engine.__aexit__(None, None, None)  # closing twice is fine
        with pytest.raises(LifecycleError, match="closed"):
            await made.engine.__aenter__()


async def test_an_error_of_the_block_leaves_as_it_is(kind: str) -> None:
    async with bench(kind) as made:
        with pytest.raises(KeyError, match="mine"):
            async with made.engine:
                await made.engine.generate(request(3, 0))
                raise KeyError("mine")


@pytest.mark.parametrize("native", [True, False])
async def test_a_cancellation_from_outside_goes_through(kind: str, native: bool) -> None:
    """Native (`asyncio.timeout`) and anyio's: neither is swallowed by the engine's own scope."""
    async with bench(kind) as made:
        after = False
        if native:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02), made.engine:
                    await anyio.sleep_forever()
        else:
            with anyio.CancelScope() as scope:
                async with made.engine:
                    scope.cancel()
                    await anyio.sleep_forever()
                after = True
            assert scope.cancelled_caught and not after
        await asyncio.sleep(0)  # this task is not left cancelled


async def test_versions_and_acknowledgement_of_weights(kind: str) -> None:
    async with bench(kind, max_sequences=2) as made, made.engine, anyio.create_task_group() as tasks:
        answers: list[Any] = []

        async def one() -> None:
            answers.append(await made.engine.generate(request(3, 1, max_tokens=50, ignore_eos=True)))

        tasks.start_soon(one)
        await made.steps(3)
        await made.advance()
        await made.engine.update_weights(1)
        late = await made.engine.generate(request(3, 2))
        assert (late.versions == 1).all()
        with pytest.raises(GenerationError, match="version 7"):
            await made.engine.update_weights(7)
    async with bench(kind) as idle, idle.engine:
        await idle.advance()
        await idle.engine.update_weights(1)
        assert set((await idle.engine.generate(request(3, 2))).versions.tolist()) == {1}
    versions = answers[0].versions
    assert versions[0] == 0 and versions[-1] == 1 and (np.diff(versions) >= 0).all()


async def test_telemetry(kind: str) -> None:
    async with bench(kind) as made:
        async with made.engine:
            await generate_all(made.engine, [request(3, seed, max_tokens=7, ignore_eos=True) for seed in range(3)])
            await asyncio.sleep(0)
            waits = [wait for wait in made.recorder.active_waits() if wait.who == "engine"]
            assert [wait.cause for wait in waits] == ["requests"]
        metrics = made.recorder.drain()
        assert metrics["engine/tokens"] == 21
        assert 1 <= metrics["engine/decode_batch"] <= 3
        spans = {event.name for event in made.recorder.events()}
        assert {"decode", "engine/decode"} <= spans


def run_under(kind: str, runner: Callable[..., Any]) -> list[int]:
    async def main() -> list[int]:
        async with bench(kind) as made, made.engine:
            answers = await generate_all(made.engine, [request(3, seed) for seed in range(4)])
            return [token for answer in answers for token in answer.token_ids.tolist()]

    return runner(main())


def test_asyncio_and_uvloop_agree(kind: str) -> None:
    assert run_under(kind, asyncio.run) == run_under(kind, uvloop.run)
