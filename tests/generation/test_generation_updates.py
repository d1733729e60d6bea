"""Weights that change while sequences are in flight: versions on tokens, `keep`, `recompute`, acknowledgements."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from generation_models import (
    Opened,
    assert_plain,
    cached_logprobs,
    change_weights,
    generate_all,
    opened,
    plain_copy,
    plain_logprobs,
    policy_and_plain,
    request,
)
from transformers import PreTrainedModel

from asyncrl.models.policy import PolicyModel
from asyncrl.types import Generation, GenerationRequest


async def steps(run: Opened, count: int) -> None:
    """Wait until `count` decode steps are done, by queueing behind them on the lane."""
    while run.engine.statistics()["decode_steps"] < count:
        await run.lane.run(lambda: None, name="tick")


async def generate_across_updates(
    policy: PolicyModel,
    plain: PreTrainedModel,
    requests: list[GenerationRequest],
    mode: Literal["keep", "recompute"],
    at: tuple[int, ...],
    **numbers: int,
) -> tuple[list[Generation], dict[int, PreTrainedModel]]:
    """Answers, a plain model per version. The weights change after the decode steps named in `at`."""
    models = {0: plain}
    async with opened(policy, kv_after_update=mode, **numbers) as run:

        async def update() -> None:
            for seed, step in enumerate(at):
                await steps(run, step)

                def train(seed: int = seed) -> None:
                    version = change_weights(policy, seed)
                    models[version] = plain_copy(policy, plain)

                await run.lane.run(train, name="train/finish", priority=1)
                await run.engine.update_weights(len(models) - 1)

        answers = await generate_all(run.engine, requests, update)
    return answers, models


def crowd() -> list[GenerationRequest]:
    """More sequences than rows, so that some begin before, some between and some after the updates."""
    return [
        request(
            11 if seed in (2, 3, 7) else 3 + 5 * seed % 14,
            seed,
            prefix_key="shared" if seed in (2, 3, 7) else None,
            temperature=(1.0, 0.8)[seed % 2],
            max_tokens=8 + seed * 3 % 11,
        )
        for seed in range(10)
    ]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
async def test_keep_equals_a_cached_replay_over_both_weights(architecture: str) -> None:
    policy, plain = policy_and_plain(architecture)
    requests = crowd()
    answers, models = await generate_across_updates(
        policy, plain, requests, "keep", (4, 11), max_sequences=6, prefill_tokens=9
    )
    assert_mixed(answers)
    differs = [0.0]
    for asked, answer in zip(requests, answers, strict=True):
        assert np.abs(answer.logprobs - cached_logprobs(models, asked, answer)).max() < 1e-4
        # Where the cache holds old keys, a plain forward disagrees: the replay can tell the difference.
        last = int(answer.versions[-1])
        if answer.versions[0] < last:
            difference = np.abs(answer.logprobs - plain_logprobs(models[last], asked, answer))
            differs.append(difference[answer.versions == last].max())
    assert max(differs) > 1e-2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("prefill_tokens", [9, 512])
async def test_recompute_equals_the_plain_forward_of_each_tokens_version(
    architecture: str, prefill_tokens: int
) -> None:
    policy, plain = policy_and_plain(architecture)
    requests = crowd()
    answers, models = await generate_across_updates(
        policy, plain, requests, "recompute", (4, 11), max_sequences=6, prefill_tokens=prefill_tokens
    )
    assert_mixed(answers)
    for asked, answer in zip(requests, answers, strict=True):
        for version in np.unique(answer.versions):
            own = answer.versions == version
            expected = plain_logprobs(models[int(version)], asked, answer)
            assert np.abs(answer.logprobs - expected)[own].max() < 1e-4


def assert_mixed(answers: list[Generation]) -> None:
    for answer in answers:
        assert (np.diff(answer.versions) >= 0).all()
    assert sum(np.unique(answer.versions).size > 1 for answer in answers) >= 3
    assert {int(answer.versions[-1]) for answer in answers} >= {1, 2}


async def test_a_shared_prompt_is_not_shared_across_versions() -> None:
    policy, plain = policy_and_plain("llama")
    asked = [request(10, seed, prefix_key="q", max_tokens=size) for seed, size in enumerate((20, 12, 6))]
    # Two rows: the first request runs on with its prompt, while the third waits until the second has ended.
    async with opened(policy, max_sequences=2) as run:

        async def update() -> None:
            await steps(run, 6)
            await run.lane.run(lambda: change_weights(policy), name="train/finish", priority=1)

        answers = await generate_all(run.engine, asked, update)
        assert run.engine.statistics()["prefill_tokens"] == 18  # once per version
    assert answers[0].token_ids.size == 20 and (answers[2].versions == 1).all()
    assert_plain(plain_copy(policy, plain), asked[2:], answers[2:])


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_a_prompt_never_mixes_versions(mode: Literal["keep", "recompute"]) -> None:
    """The weights change while a long prompt is half prefilled: it starts again, and is all of one version."""
    policy, plain = policy_and_plain("qwen3")
    asked = [request(41, 3, max_tokens=5)]
    async with opened(policy, kv_after_update=mode, prefill_tokens=4) as run:

        def train() -> int:
            change_weights(policy)
            return run.engine.core.tokens_prefilled

        async def update() -> None:
            while run.engine.statistics()["prefill_tokens"] < 12:
                await run.lane.run(lambda: None, name="tick")
            done.append(await run.lane.run(train, name="train/finish", priority=1))

        done = list[int]()
        answers = await generate_all(run.engine, asked, update)
        assert 12 <= done[0] < 40
        assert run.engine.statistics()["prefill_tokens"] == done[0] + 40
    assert (answers[0].versions == 1).all()
    assert_plain(plain_copy(policy, plain), asked, answers)
