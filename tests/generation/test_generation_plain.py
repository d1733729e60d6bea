"""The plain path: transformers' own forward and cache, against the untouched eager model, in all its ways."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from generation_models import (
    ATTENTION,
    SIZES,
    answered,
    assert_plain,
    change_weights,
    opened,
    plain_copy,
    plain_logprobs,
    request,
)  # fmt: skip
from transformers import AutoModelForCausalLM, BloomConfig, Lfm2Config, MambaConfig, MiniMaxConfig, PreTrainedModel

from asyncrl.models.paths import PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel

CONFIGS: dict[str, Any] = {
    "lfm2": Lfm2Config(**ATTENTION, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "mamba": MambaConfig(**SIZES, state_size=8),
    "bloom": BloomConfig(**(SIZES | {"n_layer": 3, "n_head": 6})),
    "minimax": MiniMaxConfig(
        **ATTENTION, head_dim=8, block_size=4, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention", "linear_attention", "full_attention"],
    ),
}  # fmt: skip
EAGER, ALONE, UNCACHED = PLAIN[1], PLAIN[2], PLAIN[3]


def policy_and_plain(family: str, path: ModelPath, dtype: str = "float32") -> tuple[PolicyModel, PreTrainedModel]:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32, attn_implementation="eager").eval()
    plain = copy.deepcopy(module).to(getattr(torch, dtype))
    return PolicyModel(module, dtype, path=path), plain


def requests() -> list[Any]:
    """Two groups and two single prompts, one of a single token; rows of a cohort end one after the other."""
    groups = [request(9, 1, prefix_key="a", max_tokens=n) for n in (3, 9, 5)]
    groups += [request(4, 2, prefix_key="b", max_tokens=n) for n in (6, 2)]
    return [*groups, request(1, 3, max_tokens=5), request(23, 4, max_tokens=4)]


async def sampled(engine: Any, tokens: int) -> None:
    """Until so many are; a turn of the engine at a time."""
    while engine.statistics()["tokens"] < tokens:  # noqa: ASYNC110 (the engine has no event for it, and needs none)
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", [EAGER, ALONE, UNCACHED], ids=str)
@pytest.mark.parametrize("family", list(CONFIGS))
async def test_sampled_logprobs_are_those_of_a_forward_over_the_whole_row(family: str, path: ModelPath) -> None:
    policy, plain = policy_and_plain(family, path)
    asked = requests()
    answers = await answered(policy, asked, max_sequences=5, max_context=32, prefill_tokens=16)
    assert [each.token_ids.size for each in answers] == [each.sampling.max_tokens for each in asked]
    assert_plain(plain, asked, answers)


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
async def test_nothing_of_old_weights_is_left_after_an_update(family: str) -> None:
    """The log-prob of each token is that of the whole row under the weights that sampled it."""
    policy, plain = policy_and_plain(family, EAGER)
    before = plain_copy(policy, plain)
    asked = [request(6, seed, prefix_key="a", max_tokens=24) for seed in (1, 2, 3)]
    async with opened(policy, max_sequences=4, max_context=32) as run:
        tasks = [asyncio.ensure_future(run.engine.generate(each)) for each in asked]
        await sampled(run.engine, 12)
        await run.lane.run(lambda: change_weights(policy), name="update")
        answers = await asyncio.gather(*tasks)
    after = plain_copy(policy, plain)
    seen = set()
    for wanted, answer in zip(asked, answers, strict=True):
        expected = np.where(
            answer.versions == 0, plain_logprobs(before, wanted, answer), plain_logprobs(after, wanted, answer)
        )
        assert np.abs(answer.logprobs - expected).max() < 1e-4
        seen |= set(answer.versions.tolist())
    assert seen == {0, 1}


async def test_a_cancelled_request_leaves_its_cohort() -> None:
    policy, plain = policy_and_plain("lfm2", EAGER)
    asked = [request(6, seed, prefix_key="a", max_tokens=20) for seed in (1, 2, 3)]
    async with opened(policy, max_sequences=3, max_context=32) as run:
        tasks = [asyncio.ensure_future(run.engine.generate(each)) for each in asked]
        await sampled(run.engine, 9)
        tasks[1].cancel()
        kept = [await tasks[0], await tasks[2]]
        assert (await run.engine.generate(asked[1])).token_ids.size == 20
    assert_plain(plain, [asked[0], asked[2]], kept)
