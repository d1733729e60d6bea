"""Log-probs of the embedded engine equal a plain transformers forward, whatever else is in the batch."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from generation_models import answered, assert_plain, generate_all, opened, plain_logprobs, policy_and_plain, request

from asyncrl.types import FinishReason, Generation, GenerationRequest


def ragged(count: int) -> list[GenerationRequest]:
    """Prompts of 1 to 40 tokens, two shared ones, temperatures and filters of every kind, ends at different steps."""
    requests = []
    for seed in range(count):
        key = f"shared {seed % 2}" if seed % 3 == 0 else None
        requests.append(
            request(
                length=(5, 17)[seed % 2] if key else 1 + 13 * seed % 40,
                seed=seed,
                prefix_key=key,
                temperature=(1.0, 0.7, 1.4, 0.0)[seed % 4],
                top_p=(1.0, 0.9)[seed % 5 == 1],
                top_k=(0, 8)[seed % 7 == 2],
                max_tokens=1 + seed * 5 % 23,
            )
        )
    return requests


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("architecture", "prefill_tokens"), [("qwen3", 33), ("qwen3", 1), ("qwen3", 64), ("llama", 7)])
async def test_ragged_batch_equals_plain_forward_in_float32(architecture: str, prefill_tokens: int) -> None:
    policy, plain = policy_and_plain(architecture)
    requests = ragged(15)
    async with opened(policy, max_sequences=7, prefill_tokens=prefill_tokens) as run:
        answers = await generate_all(run.engine, requests)
        statistics = run.engine.statistics()
    for asked, answer in zip(requests, answers, strict=True):
        assert answer.token_ids.size == asked.sampling.max_tokens
        assert answer.finish_reason is FinishReason.LENGTH and (answer.versions == 0).all()
    assert_plain(plain, requests, answers)
    assert statistics["tokens"] == sum(asked.sampling.max_tokens for asked in requests)
    assert statistics["running"] == statistics["waiting"] == 0


async def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd() -> None:
    policy, _ = policy_and_plain("qwen3")
    requests = ragged(16)
    crowd = await answered(policy, requests, max_sequences=16)
    backwards = (await answered(policy, requests[::-1], max_sequences=5, prefill_tokens=8))[::-1]
    async with opened(policy, max_sequences=1) as run:
        alone = [await run.engine.generate(asked) for asked in requests]
    for one, two, three in zip(crowd, backwards, alone, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist() == three.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, three.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.sampled_logprobs, three.sampled_logprobs, atol=1e-4)


async def test_aborts_and_admissions_around_it_do_not_change_a_sequence() -> None:
    """Rows move into the holes that aborted and finished neighbours leave; nobody notices."""
    policy, plain = policy_and_plain("qwen3")
    long_ones = [request(6 + seed, seed, max_tokens=30) for seed in range(3)]
    answers: list[Generation] = []

    async with opened(policy, max_sequences=6, prefill_tokens=16) as run:

        async def keep(asked: GenerationRequest) -> None:
            answers.append(await run.engine.generate(asked))

        async def give_up(seed: int, after: int) -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(run.engine.generate, request(3 + seed % 9, seed, max_tokens=80))
                    while run.engine.statistics()["decode_steps"] < after:
                        await run.lane.run(lambda: None, name="tick")
                    scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up, 100, 3)
            tasks.start_soon(keep, long_ones[0])
            tasks.start_soon(give_up, 101, 5)
            tasks.start_soon(keep, long_ones[1])
            tasks.start_soon(give_up, 102, 9)
            tasks.start_soon(give_up, 103, 12)
            tasks.start_soon(keep, long_ones[2])
        assert run.engine.statistics()["aborted"] == 4
    by_size = {answer.token_ids.tobytes(): answer for answer in answers}
    assert len(by_size) == 3
    async with opened(policy, max_sequences=1) as run:
        for asked in long_ones:
            alone = await run.engine.generate(asked)
            crowded = by_size[alone.token_ids.tobytes()]
            assert np.abs(crowded.logprobs - plain_logprobs(plain, asked, crowded)).max() < 1e-4


async def test_a_shared_prompt_is_prefilled_once_and_copied() -> None:
    policy, plain = policy_and_plain("qwen3")
    requests = [request(20, seed, prefix_key="a question", max_tokens=4 + seed % 3) for seed in range(12)]
    async with opened(policy, max_sequences=4) as run:  # members come in three batches and more
        answers = await generate_all(run.engine, requests)
        statistics = run.engine.statistics()
    assert statistics["prefill_tokens"] == 19  # the last prompt token is each sequence's first decode input
    assert statistics["copied_tokens"] == 11 * 19
    assert len({answer.token_ids.tobytes() for answer in answers}) > 1
    assert_plain(plain, requests, answers)


async def test_a_shared_prompt_is_computed_again_after_its_last_holder() -> None:
    policy, plain = policy_and_plain("llama")
    requests = [request(9, seed, prefix_key="one row only", max_tokens=3) for seed in range(4)]
    async with opened(policy, max_sequences=1) as run:
        answers = await generate_all(run.engine, requests)
        assert run.engine.statistics()["prefill_tokens"] == 4 * 8
    assert_plain(plain, requests, answers)


async def test_equal_keys_of_different_prompts_share_nothing() -> None:
    policy, plain = policy_and_plain("qwen3")
    requests = [request(length, 0, prefix_key="same", max_tokens=5) for length in (12, 4, 9)]
    async with opened(policy) as run:
        answers = await generate_all(run.engine, requests)
        assert run.engine.statistics()["copied_tokens"] == 0
    assert_plain(plain, requests, answers)
