"""Requests of a session: what the engine keeps between them, and that tokens and log-probs are those of a whole prefill."""

from __future__ import annotations

import asyncio
import inspect
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from generation_models import (
    Opened,
    assert_plain,
    change_weights,
    generate_all,
    opened,
    picked,
    plain_copy,
    plain_logprobs,
    policy_and_plain,
    prompt,
    request,
)
from ragged_reference import ReferenceKernel
from transformers import DynamicCache, PreTrainedModel

from asyncrl.models.policy import PolicyModel
from asyncrl.types import Generation, GenerationRequest

KEPT = {"kept_prefix_max_age": 1}


def first_turn(length: int, seed: int, session: str, **sampling: Any) -> GenerationRequest:
    return replace(request(length, seed, **sampling), session=session)


def next_turn(before: GenerationRequest, answer: Generation, seed: int, new: int = 5, **changes: Any) -> Any:
    """The request of the next turn: the whole history, and `new` tokens of a tool."""
    ids = np.concatenate([before.prompt_ids, answer.token_ids, prompt(new, 1000 + seed)]).astype(np.int32)
    return replace(before, prompt_ids=ids, seed=seed, **changes)


def prefilled(run: Opened) -> float:
    return run.engine.statistics()["prefill_tokens"]


async def kept_rows(run: Opened) -> float:
    """Once the owner task has done what it was told."""
    await run.engine.update_weights(-1)
    return run.engine.statistics()["kept_rows"]


async def train(run: Opened, policy: PolicyModel, seed: int = 1) -> int:
    """An optimizer step, which the engine acknowledges."""
    version = await run.lane.run(lambda: change_weights(policy, seed), name="train/finish", priority=1)
    await run.engine.update_weights(version)
    return version


@torch.no_grad()
def replayed(
    models: dict[int, PreTrainedModel], asked: GenerationRequest, answer: Generation, made: list[int]
) -> np.ndarray:
    """Log-probs of the answer by transformers with a cache, each token under the weights of a version. `made`: versions of the
    prompt's tokens but the last, which the first sampled token's weights compute."""
    tokens = np.concatenate([asked.prompt_ids, answer.token_ids[:-1]]).astype(np.int64)
    versions = [*made, *answer.versions.tolist()]
    assert len(versions) == tokens.size
    logits = []
    # The name of the argument until transformers 5.24, and after.
    known = inspect.signature(models[versions[0]].forward).parameters
    cached: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": DynamicCache(), "use_cache": True}
    for version, token in zip(versions, tokens.tolist(), strict=True):
        logits.append(models[version](input_ids=torch.tensor([[token]]), **cached).logits[0])
    return picked(torch.cat(logits)[asked.prompt_ids.size - 1 :].double(), asked, answer)


@pytest.fixture(params=["native", "torch", "ragged"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layouts and kernels of the cache: those of a CPU, with native code and without, and that of a GPU."""
    if request.param != "native":
        monkeypatch.setattr("asyncrl.generation.embedded.cache.native.attends", lambda *case: False)
    if request.param == "ragged":
        monkeypatch.setattr("asyncrl.generation.embedded.cache.kernel_for", lambda *case: ReferenceKernel())
    return str(request.param)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
async def test_the_next_turn_computes_only_what_is_new(architecture: str) -> None:
    policy, plain = policy_and_plain(architecture)
    asked = [first_turn(9 + seed, seed, f"episode {seed}", max_tokens=6 + seed) for seed in range(4)]
    done: list[tuple[GenerationRequest, Generation]] = []
    async with opened(policy, max_sequences=5, **KEPT) as run:
        answers = await generate_all(run.engine, asked)
        for turn in (1, 2):
            assert await kept_rows(run) == 4
            before = prefilled(run)
            pairs = zip(asked, answers, strict=True)
            asked = [next_turn(*pair, seed=10 * turn + number) for number, pair in enumerate(pairs)]
            answers = await generate_all(run.engine, asked)
            # The last sampled token and the tool's five, but for the last, which is the input of the first decode step.
            assert prefilled(run) - before == 4 * 5
            assert_plain(plain, asked, answers)
            done += zip(asked, answers, strict=True)
        for each in asked:
            run.engine.end_session(str(each.session))
        assert await kept_rows(run) == 0
        found = run.recorder.drain()
    assert found["engine/kept_prefix_hits"] == 8 and found["engine/kept_prefix_age_max"] == 0
    assert found["engine/kept_prefix_tokens_reused"] == sum(each.prompt_ids.size - 6 for each, _ in done)
    # Without sessions, in an engine that keeps nothing.
    async with opened(policy, max_sequences=5) as run:
        for each, answer in done:
            alone = await run.engine.generate(each)
            assert alone.token_ids.tolist() == answer.token_ids.tolist()
            assert np.abs(alone.logprobs - answer.logprobs).max() < 1e-4
        assert await kept_rows(run) == 0


async def test_a_turn_is_bit_equal_however_often_its_row_has_moved() -> None:
    """The same closures with and without rows that move: neighbours that come and go must not change a bit."""
    policy, _ = policy_and_plain("qwen3", "float64")

    async def play(neighbours: int) -> Generation:
        async with opened(policy, max_sequences=8, **KEPT) as run:
            asked = first_turn(12, 1, "a", max_tokens=9)
            answer = await run.engine.generate(asked)
            for number in range(neighbours):
                others = [first_turn(30 - 7 * n, n, f"{number} {n}", max_tokens=3 + n) for n in range(4)]
                await generate_all(run.engine, others)
                for gone in {0, 1, 2, 3} - {number}:
                    run.engine.end_session(f"{number} {gone}")
            before = prefilled(run)
            answer = await run.engine.generate(next_turn(asked, answer, 2))
            assert prefilled(run) - before == 5
            return answer

    alone = await play(0)
    for neighbours in (1, 3):
        again = await play(neighbours)
        assert again.token_ids.tolist() == alone.token_ids.tolist()
        assert again.logprobs.tobytes() == alone.logprobs.tobytes()


@pytest.mark.usefixtures("layout")
async def test_branches_share_their_history() -> None:
    """Three at once from the end of the history, one from the middle of it, and one that shares nothing."""
    policy, plain = policy_and_plain("qwen3")
    asked = first_turn(10, 1, "a", max_tokens=12)
    async with opened(policy, max_sequences=6, **KEPT) as run:
        answer = await run.engine.generate(asked)
        before = prefilled(run)
        branches = [next_turn(asked, answer, seed) for seed in (2, 3, 4)]
        answers = await generate_all(run.engine, branches)
        assert prefilled(run) - before == 3 * 5 and await kept_rows(run) == 3
        assert_plain(plain, branches, answers)
        # The whole history lies in three rows now; 4 sampled tokens of it are used.
        before = prefilled(run)
        cut = replace(answer, token_ids=answer.token_ids[:4])
        other, alien = next_turn(asked, cut, 5), first_turn(8, 77, "a", max_tokens=5)
        answers = await generate_all(run.engine, [other, alien])
        assert prefilled(run) - before == (5 - 1) + 7 and await kept_rows(run) == 5
        assert_plain(plain, [other, alien], answers)
        # Each branch goes on with its own row.
        before = prefilled(run)
        deeper = [next_turn(*pair, seed=9) for pair in zip([other, alien], answers, strict=True)]
        assert_plain(plain, deeper, await generate_all(run.engine, deeper))
        assert prefilled(run) - before == 2 * 5
        run.engine.end_session("a")
        assert await kept_rows(run) == 0


async def test_kept_rows_give_way_to_running_requests_oldest_first() -> None:
    policy, plain = policy_and_plain("qwen3")
    first = [first_turn(8, seed, f"s{seed}", max_tokens=4) for seed in range(3)]
    async with opened(policy, max_sequences=4, kv_positions=100, max_context=96, **KEPT) as run:
        answers = [await run.engine.generate(each) for each in first]
        assert await kept_rows(run) == 3
        # 40 positions: two rows of that length fit beside nothing but one kept row.
        crowd = [request(30, seed, max_tokens=10) for seed in (10, 11)]
        assert_plain(plain, crowd, await generate_all(run.engine, crowd))
        assert await kept_rows(run) == 0
        before = prefilled(run)
        again = [next_turn(*pair, seed=5) for pair in zip(first, answers, strict=True)]
        found = [await run.engine.generate(each) for each in again]
        assert prefilled(run) - before == sum(each.prompt_ids.size - 1 for each in again)
        assert_plain(plain, again, found)
        # Four rows of 25 positions: one more request drops the oldest of three kept rows, and no other.
        await generate_all(run.engine, [request(8, 20, max_tokens=17), request(8, 21, max_tokens=17)])
        assert {each for each in run.engine.core.sequences.session if each} == {"s1", "s2"}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
async def test_a_prefix_of_older_weights_is_used_up_to_the_age_limit(architecture: str) -> None:
    policy, plain = policy_and_plain(architecture)
    asked = [first_turn(9, seed, f"s{seed}", max_tokens=8) for seed in range(3)]
    models = {0: plain}
    async with opened(policy, max_sequences=4, **KEPT) as run:
        answers = await generate_all(run.engine, asked)
        made = [[0] * (each.prompt_ids.size + 7) for each in asked]
        version = await train(run, policy, 1)
        models[version] = plain_copy(policy, plain)
        for each in answers:
            assert set(each.versions.tolist()) == {0}
        run.recorder.drain()
        before = prefilled(run)
        asked = [next_turn(*pair, seed=5) for pair in zip(asked, answers, strict=True)]
        answers = await generate_all(run.engine, asked)
        assert prefilled(run) - before == 3 * 5
        found = run.recorder.drain()
        assert found["engine/kept_prefix_age"] == found["engine/kept_prefix_age_max"] == 1
        differs = []
        for each, answer, old in zip(asked, answers, made, strict=True):
            assert set(answer.versions.tolist()) == {1}
            assert np.abs(answer.logprobs - replayed(models, each, answer, old + [1] * 5)).max() < 1e-4
            differs.append(np.abs(answer.logprobs - plain_logprobs(models[1], each, answer)).max())
        assert max(differs) > 1e-2, "the oracle can tell old keys from new ones"
        # The row's beginning is two versions old now.
        version = await train(run, policy, 2)
        models[version] = plain_copy(policy, plain)
        before = prefilled(run)
        asked = [next_turn(*pair, seed=6) for pair in zip(asked, answers, strict=True)]
        assert_plain(models[2], asked, await generate_all(run.engine, asked))
        assert prefilled(run) - before == sum(each.prompt_ids.size - 1 for each in asked)
        assert "engine/kept_prefix_hits" not in run.recorder.drain()
        assert await kept_rows(run) == 3


async def test_weights_that_change_before_a_turns_first_token_count_too() -> None:
    """The update comes when the request is admitted but not sampled: its prefix of age 1 becomes one of age 2."""
    policy, plain = policy_and_plain("qwen3")
    for updates in (1, 2):
        async with opened(policy, max_sequences=2, prefill_tokens=3, **KEPT) as run:
            asked = first_turn(9, 1, "a", max_tokens=6)
            answer = await run.engine.generate(asked)
            oldest = int(answer.versions[0])
            models = {oldest: plain_copy(policy, plain)}
            if updates == 2:
                await train(run, policy, 1)
            follow = next_turn(asked, answer, 2, new=12)
            before = prefilled(run)
            task = asyncio.ensure_future(run.engine.generate(follow))
            # Four closures prefill 12 tokens.
            while prefilled(run) - before < 3:
                await run.lane.run(lambda: None, name="tick")
            version = await train(run, policy, 2)
            models[version] = plain_copy(policy, plain)
            answer = await task
            newest = policy.version
            assert set(answer.versions.tolist()) == {newest}
            if updates == 1:
                made = [oldest] * 14 + [newest] * 12
                assert np.abs(answer.logprobs - replayed(models, follow, answer, made)).max() < 1e-4
            else:
                assert_plain(models[newest], [follow], [answer])


async def test_an_older_prompt_without_a_sampled_token_is_computed_again() -> None:
    """No token of the new row would have the version of those keys and values."""
    policy, plain = policy_and_plain("qwen3")
    asked = first_turn(20, 1, "a", max_tokens=6)
    async with opened(policy, **KEPT) as run:
        answer = await run.engine.generate(asked)
        before = prefilled(run)
        await run.engine.generate(replace(asked, seed=2))
        assert prefilled(run) == before, "the same weights: nothing to compute"
        await train(run, policy)
        retry = replace(asked, seed=3)
        assert_plain(plain_copy(policy, plain), [retry], [await run.engine.generate(retry)])
        assert prefilled(run) - before == 19
        # With one sampled token in it the prefix is used.
        before = prefilled(run)
        await run.engine.generate(next_turn(asked, answer, 4))
        assert prefilled(run) - before == 5


async def test_recompute_keeps_rows_of_the_present_weights_only() -> None:
    policy, plain = policy_and_plain("llama")
    asked = first_turn(9, 1, "a", max_tokens=6)
    async with opened(policy, kv_after_update="recompute", **KEPT) as run:
        answer = await run.engine.generate(asked)
        asked = next_turn(asked, answer, 2)
        before = prefilled(run)
        answer = await run.engine.generate(asked)
        assert prefilled(run) - before == 5
        await train(run, policy)
        asked = next_turn(asked, answer, 3)
        before = prefilled(run)
        assert_plain(plain_copy(policy, plain), [asked], [await run.engine.generate(asked)])
        assert prefilled(run) - before == asked.prompt_ids.size - 1


async def test_nothing_is_kept_at_age_zero_for_cancelled_requests_and_after_the_end_of_a_session() -> None:
    policy, plain = policy_and_plain("qwen3")
    asked = first_turn(9, 1, "a", max_tokens=6)
    async with opened(policy) as run:
        await run.engine.generate(asked)
        assert await kept_rows(run) == 0
    async with opened(policy, max_sequences=2, **KEPT) as run:
        requests = [replace(asked, seed=seed) for seed in range(3)]
        tasks = [asyncio.ensure_future(run.engine.generate(each)) for each in requests]
        while run.engine.statistics()["tokens"] < 2:
            await run.lane.run(lambda: None, name="tick")
        # Two run and one waits.
        run.engine.end_session("a")
        assert_plain(plain, requests, await asyncio.gather(*tasks))
        assert await kept_rows(run) == 0


async def test_rows_stay_kept_while_few_rows_run() -> None:
    policy, plain = policy_and_plain("qwen3")
    asked = [first_turn(9, seed, f"s{seed}", max_tokens=4) for seed in range(40)]
    async with opened(policy, max_sequences=42, **KEPT) as run:
        answers = await generate_all(run.engine, asked)
        await run.engine.generate(request(5, 1, max_tokens=3))
        assert await kept_rows(run) == 40
        before = prefilled(run)
        asked = [next_turn(*pair, seed=2) for pair in zip(asked, answers, strict=True)]
        assert_plain(plain, asked, await generate_all(run.engine, asked))
        assert prefilled(run) - before == 40 * 5


@pytest.mark.parametrize("when", range(10))
async def test_a_turn_may_be_cancelled_at_every_closure(when: int) -> None:
    """While it waits, prefills (three closures) and decodes (six). A copy of its history stays right for a retry."""
    policy, plain = policy_and_plain("qwen3")
    asked = first_turn(9, 1, "a", max_tokens=6)
    async with opened(policy, max_sequences=3, prefill_tokens=4, **KEPT) as run:
        answer = await run.engine.generate(asked)
        follow = next_turn(asked, answer, 2, new=11)
        before = prefilled(run), run.engine.statistics()["decode_steps"]
        cancelled = asyncio.ensure_future(run.engine.generate(follow))
        beside = asyncio.ensure_future(run.engine.generate(first_turn(7, 3, "b", max_tokens=20)))
        await asyncio.sleep(0)

        def closures() -> float:
            prefills = -(-(prefilled(run) - before[0]) // 4)
            return float(prefills + run.engine.statistics()["decode_steps"] - before[1])

        while closures() < when and not cancelled.done():
            await run.lane.run(lambda: None, name="tick")
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        retry = replace(follow, seed=4)
        assert_plain(plain, [retry], [await run.engine.generate(retry)])
        await beside
        assert await kept_rows(run) >= 2
        for session in "ab":
            run.engine.end_session(session)
        assert await kept_rows(run) == 0
        columns = run.engine.core.sequences
        assert sorted(columns._free) == [0, 1, 2] and columns.count == 0


@pytest.mark.slow
@pytest.mark.usefixtures("layout")
async def test_two_hundred_sessions_with_random_ends_leave_nothing_behind() -> None:
    """One to four turns, forks, tools that take a while, cancelled requests, and too few positions for all that run and wait."""
    policy, plain = policy_and_plain("qwen3")
    draw, places = random.Random(0), asyncio.Semaphore(9)
    done: list[tuple[GenerationRequest, Generation]] = []
    async with opened(policy, max_sequences=12, kv_positions=500, prefill_tokens=64, **KEPT) as run:

        async def tool() -> None:
            for _ in range(draw.randrange(4)):
                await run.lane.run(lambda: None, name="tool")

        async def turn(asked: GenerationRequest) -> Generation | None:
            if draw.random() < 0.1:
                try:
                    async with asyncio.timeout(draw.uniform(0, 0.02)):
                        return await run.engine.generate(asked)
                except TimeoutError:
                    return None
            return await run.engine.generate(asked)

        async def episode(number: int) -> None:
            session = f"episode {number}"
            await places.acquire()
            try:
                asked = first_turn(draw.randint(2, 12), number, session, max_tokens=draw.randint(1, 7))
                for _ in range(draw.randint(1, 4)):
                    answer = await turn(asked)
                    if answer is None:
                        return
                    done.append((asked, answer))
                    await tool()
                    if draw.random() < 0.2:
                        forks = [next_turn(asked, answer, draw.randrange(1 << 20), draw.randint(1, 4)) for _ in "ab"]
                        done.extend(zip(forks, await asyncio.gather(*map(run.engine.generate, forks)), strict=True))
                    asked = next_turn(asked, answer, draw.randrange(1 << 20), draw.randint(1, 6))
            finally:
                run.engine.end_session(session)
                places.release()

        await asyncio.gather(*map(episode, range(200)))
        assert await kept_rows(run) == 0
        statistics, columns = run.engine.statistics(), run.engine.core.sequences
        assert statistics["running"] == statistics["waiting"] == 0
        assert columns.count == 0 and sorted(columns._free) == list(range(12)) and not columns.moves
        assert not any(columns.session) and (columns._slot_of_row == -1).all()
        found = run.recorder.drain()
    assert found["engine/kept_prefix_hits"] > 50 and len(done) > 250
    asked, answers = zip(*done, strict=True)
    assert_plain(plain, asked, answers)
