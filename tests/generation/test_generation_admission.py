"""Admission within a budget of cached positions: order, bound, reservations given back, and a cache that changes its shape."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from generation_models import generate_all, opened, policy_and_plain, request

from asyncrl.generation.embedded.cache import CacheShape, KVCache
from asyncrl.generation.embedded.core import Core
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.paths import PLAIN
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import GenerationRequest

MIXED = [request(3 + 11 * seed % 29, seed, max_tokens=6 + 7 * seed % 20, ignore_eos=True) for seed in range(14)]


def longest(requests: list[GenerationRequest]) -> int:
    return max(each.prompt_ids.size + each.sampling.max_tokens for each in requests)


async def watched(
    policy: PolicyModel, requests: list[GenerationRequest], **numbers: Any
) -> tuple[list[Any], list[float]]:
    """Answers, and the positions that were reserved at each closure."""
    reserved = []
    async with opened(policy, **numbers) as run:
        advance = run.engine._advance

        async def noted() -> Any:
            reserved.append(run.engine.statistics()["reserved_positions"])
            return await advance()

        run.engine._advance = noted  # type: ignore[method-assign]
        answers = await generate_all(run.engine, requests)
        assert run.engine.statistics()["reserved_positions"] == 0
        if isinstance(run.engine.core, Core):
            assert run.engine.core.cache.total_positions == run.engine.kv_positions
    return answers, reserved


@pytest.mark.parametrize("path", [None, PLAIN[0]])
async def test_the_budget_is_never_exceeded_and_changes_no_answer(path: Any) -> None:
    policy, plain = policy_and_plain("qwen3")
    if path is not None:
        policy = PolicyModel(plain, path=path)
    wide, _ = await watched(policy, MIXED, max_sequences=14, max_context=60)
    budget = longest(MIXED) + 25
    narrow, reserved = await watched(policy, MIXED, max_sequences=14, max_context=60, kv_positions=max(budget, 60))
    assert max(reserved) <= max(budget, 60) and len({*reserved}) > 3
    for one, two in zip(wide, narrow, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-4)


async def test_short_sequences_take_all_rows_where_long_ones_take_turns() -> None:
    policy, _ = policy_and_plain("llama")
    short = [request(4, seed, max_tokens=6, ignore_eos=True) for seed in range(8)]
    long = [request(24, seed, max_tokens=16, ignore_eos=True) for seed in range(4)]
    _, reserved = await watched(policy, short, max_sequences=8, max_context=40, kv_positions=80)
    assert max(reserved) == 8 * 10
    _, reserved = await watched(policy, long, max_sequences=8, max_context=40, kv_positions=80)
    assert max(reserved) == 2 * 40


async def test_nobody_overtakes_the_first_that_waits() -> None:
    """A large request is followed by small ones that would fit: it is still the next one to run."""
    policy, _ = policy_and_plain("llama")
    ended: list[int] = []
    sizes = [(8, 12), (30, 10), (2, 3), (2, 3)]
    async with opened(policy, max_sequences=4, max_context=40, kv_positions=45) as run:

        async def one(number: int, size: int, tokens: int) -> None:
            await run.engine.generate(request(size, number, max_tokens=tokens, ignore_eos=True))
            ended.append(number)

        async with anyio.create_task_group() as tasks:
            for number, (size, tokens) in enumerate(sizes):
                tasks.start_soon(one, number, size, tokens)
    assert ended[:2] == [0, 1] and sorted(ended) == [0, 1, 2, 3]


async def steps_before_prefills(
    policy: PolicyModel, prefill_steps: int, arrivals: dict[int, GenerationRequest]
) -> tuple[list[int], dict[int, Any]]:
    """A batch of eight long requests, and later ones: number of decode steps before the request -> request. Returns the number of
    decode steps before each prefill, and all answers."""
    steps, found, answers, started = 0, list[int](), dict[int, Any](), set[int]()
    async with opened(policy, max_sequences=16, max_context=110) as run, anyio.create_task_group() as tasks:
        run.engine.prefill_steps = prefill_steps
        advance = run.engine._advance

        async def one(number: int, asked: GenerationRequest) -> None:
            answers[number] = (await run.engine.generate(asked)).token_ids.tolist()

        async def noted() -> Any:
            nonlocal steps
            if run.engine.core.needs_prefill:
                found.append(steps)
            else:
                steps += 1
            ended = await advance()
            for number in [number for number in arrivals if number <= steps and number not in started]:
                started.add(number)
                tasks.start_soon(one, number, arrivals[number])
            await anyio.lowlevel.checkpoint()
            return ended

        run.engine._advance = noted  # type: ignore[method-assign]
        for number in range(8):
            tasks.start_soon(one, -1 - number, request(4, number, max_tokens=100, ignore_eos=True))
    return found, answers


async def test_requests_wait_for_each_other_where_a_prefill_is_dear() -> None:
    """One request arrives with each decode step. If a prefill takes four steps from eight rows, all eight requests are admitted
    together: they have lost 1 + 2 + ... + 8 = 36 row-steps by then, and seven of them only 28."""
    policy, _ = policy_and_plain("qwen3")
    arrivals = {20 + number: request(5, 50 + number, max_tokens=30, ignore_eos=True) for number in range(8)}
    at_once, expected = await steps_before_prefills(policy, 0, arrivals)
    assert at_once == [0, *arrivals]
    together, found = await steps_before_prefills(policy, 4, arrivals)
    assert together == [0, 27]
    assert found == expected and len(found) == 16


@pytest.mark.parametrize(("prefill_steps", "steps"), [(2, 15), (40, 31)])
async def test_one_request_waits_for_nobody_for_long(prefill_steps: int, steps: int) -> None:
    """Beside eight rows it has lost as much as its prefill takes after 8 x 2 = 16 closures. After 32 it is admitted in any case."""
    policy, _ = policy_and_plain("qwen3")
    arrivals = {20: request(5, 50, max_tokens=9, ignore_eos=True)}
    found, answers = await steps_before_prefills(policy, prefill_steps, arrivals)
    assert found == [0, 20 + steps] and len(answers) == 9


async def test_a_cancelled_request_gives_its_reservation_back() -> None:
    policy, _ = policy_and_plain("llama")
    async with (
        opened(policy, max_sequences=4, max_context=90, kv_positions=90) as run,
        anyio.create_task_group() as tasks,
    ):
        scopes = [anyio.CancelScope(), anyio.CancelScope()]

        async def one(scope: anyio.CancelScope) -> None:
            with scope:
                await run.engine.generate(request(5, 1, max_tokens=85, ignore_eos=True))

        for scope in scopes:
            tasks.start_soon(one, scope)
        while run.engine.statistics()["decode_steps"] < 2:
            await run.lane.run(lambda: None, name="tick")
        assert run.engine.statistics()["running"] == run.engine.statistics()["waiting"] == 1
        scopes[1].cancel()  # waits
        scopes[0].cancel()  # runs
        answer = await run.engine.generate(request(40, 2, max_tokens=50, ignore_eos=True))
        assert answer.token_ids.size == 50


async def test_groups_share_their_prompt_while_the_cache_changes_its_shape() -> None:
    """Copies of prompts, moves of rows and new shapes in one run: answers stay what each request gives alone."""
    policy, _ = policy_and_plain("qwen3")
    groups = [
        request(4 + 9 * group, 10 * group + member, prefix_key=f"g{group}", max_tokens=3 + 5 * member, ignore_eos=True)
        for group in (2, 0, 3, 1)
        for member in range(4)
    ]
    crowd, _ = await watched(policy, groups, max_sequences=16, max_context=50, kv_positions=150, prefill_tokens=20)
    async with opened(policy, max_sequences=1) as run:
        alone = [await run.engine.generate(asked) for asked in groups]
    for one, two in zip(crowd, alone, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()


def test_a_budget_below_one_sequence_is_refused() -> None:
    policy, _ = policy_and_plain("llama")
    with pytest.raises(ValueError, match="kv_positions is 39, expected at least max_context = 40"):
        recorder = Recorder(nvtx=False)
        EmbeddedEngine(policy, None, None, recorder, max_sequences=8, max_context=40, kv_positions=39)  # type: ignore[arg-type]


def test_what_rows_hold_survives_a_new_shape() -> None:
    cache = KVCache(
        CacheShape(layers=2, rows=6, heads=2, positions=20, head_size=4), torch.float32, torch.device("cpu")
    )
    cached = np.array([7, 0, 19, 0, 0, 0])
    wanted = torch.randn(2, 2, 3, 2, 19, 4)
    cache.data[:, :, :3, :, :19] = wanted
    for rows, positions in ((3, 40), (6, 20), (5, 23)):
        cache.fit(rows, positions, 1, cached[:rows])
        assert cache.shape.rows >= rows and cache.shape.positions >= positions
        assert cache.shape.rows * cache.shape.positions <= cache.total_positions == 120
        for row in range(3):
            own = slice(0, cached[row])
            assert torch.equal(cache.data[:, :, row, :, own], wanted[:, :, row, :, own])
    with pytest.raises(ValueError, match="7 rows of 20 positions do not fit into the cache of 120"):
        cache.fit(7, 20, 1, cached)


# -- memory of the cache


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_are_touched_where_they_are_used_only() -> None:
    before = resident()
    cache = KVCache(
        CacheShape(layers=4, rows=256, heads=4, positions=1024, head_size=64), torch.float32, torch.device("cpu")
    )
    cache.data[0, 0, 0] = 1.0
    assert resident() - before < 16 << 20 < cache.shape.nbytes(torch.float32)
