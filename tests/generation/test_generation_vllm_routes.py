"""Which experts `VllmEngine` says that its tokens went to, against the embedded engine and transformers' forward over the row."""

from __future__ import annotations

import copy
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from generation_cores import KINDS, MOST_MIXTURES, needs_vllm, opened_core, plain_routes
from generation_models import change_weights, generate_all, opened, plain_copy, request
from test_generation_vllm_engine import flipped, policy_and_plain
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routing import RoutesShape
from asyncrl.types import Generation, GenerationRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM's own modules, wherever they are called first


def shape_of(policy: PolicyModel) -> RoutesShape:
    assert policy.routing is not None
    return policy.routing.shape


def known(asked: GenerationRequest, answer: Generation) -> np.ndarray:
    """Those of all tokens but the last, whose route nobody knows; in order of experts: vLLM has none."""
    routes = answer.routed_experts
    assert routes is not None and routes.dtype == np.int8
    assert routes.shape[0] == asked.prompt_ids.size + answer.token_ids.size and (routes[-1] == -1).all()
    assert (routes[:-1] >= 0).all()
    return np.sort(routes[:-1], -1)


def expected(plain: PreTrainedModel, asked: GenerationRequest, answer: Generation) -> np.ndarray:
    row = np.concatenate([asked.prompt_ids, answer.token_ids])[:-1]
    return np.sort(plain_routes(plain, torch.from_numpy(row.astype(np.int64))), -1)


def many() -> list[GenerationRequest]:
    """Prompts alone and shared, longer than a step and than a block, and more of them than the cache holds at a time."""
    alone = [request(3 + 7 * index, index, temperature=1.0) for index in range(10)]
    shared = [request(70, 20 + index, prefix_key="shared", temperature=1.0) for index in range(6)]
    return [*alone, *shared, *alone[:4]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", MOST_MIXTURES)
async def test_routes_are_those_of_the_embedded_engine(kind: str, architecture: str) -> None:
    policy, plain = policy_and_plain(architecture)
    asked = many()
    async with opened_core(kind, policy, copy.deepcopy(plain), routes=shape_of(policy)) as made:
        ours = await generate_all(made.engine, asked)
        again = await generate_all(made.engine, asked[10:16])
        assert kind == "plain" or made.engine.statistics()["copied_tokens"] >= 64 * 6
    async with opened(policy, max_sequences=8, record_routes=True) as embedded:
        theirs = await generate_all(embedded.engine, asked)
    for each, mine, other in zip([*asked, *asked[10:16]], [*ours, *again], [*theirs, *theirs[10:16]], strict=True):
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_array_equal(known(each, mine), known(each, other))
        np.testing.assert_array_equal(known(each, mine), expected(plain, each, mine))


def turn_gates(policy: PolicyModel) -> None:
    """Every router chooses others; what reaches the first of them stays."""
    with torch.no_grad():
        for name, master in policy.flat.named_masters():
            if name.endswith("mlp.gate.weight"):
                master.mul_(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
async def test_after_an_update_each_token_has_the_routes_it_was_sampled_with(
    monkeypatch: pytest.MonkeyPatch, kind: str, after: str
) -> None:
    policy, plain = policy_and_plain("qwen3_moe")
    models = {0: plain_copy(policy, plain)}
    asked = [request(33 + index, index, max_tokens=30, temperature=1.0) for index in range(3)]
    asked.append(request(33, 0, max_tokens=30, temperature=1.0))  # the first one's prompt

    def turn(policy: PolicyModel) -> int:
        turn_gates(policy)
        return policy.advance()

    monkeypatch.setattr("test_generation_vllm_engine.change_weights", turn)
    options: dict[str, Any] = dict(routes=shape_of(policy), kv_after_update=after)
    async with opened_core(kind, policy, copy.deepcopy(plain), **options) as made:
        answers = await flipped(made, policy, asked)
    models[1] = plain_copy(policy, plain)
    for each, answer in zip(asked, answers, strict=True):
        assert set(answer.versions) == {0, 1}
        # The token at a place was computed when the next one was sampled; all before the last of the prompt with that one.
        versions = np.concatenate([np.full(each.prompt_ids.size - 1, answer.versions[0]), answer.versions])
        by = {version: expected(model, each, answer) for version, model in models.items()}
        right = np.where((versions == 0)[:, None, None], by[0], by[1])
        found = known(each, answer)
        assert not np.array_equal(by[0][:, 0], by[1][:, 0])
        np.testing.assert_array_equal(found[:, 0], right[:, 0])
        np.testing.assert_array_equal(found[versions == 0], right[versions == 0])
        if after == "recompute" or kind == "plain":
            np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_of_an_earlier_version_leaves_no_routes(kind: str) -> None:
    """Computed whole, or the half of it: a step computes 64 tokens."""
    policy, plain = policy_and_plain("qwen3_moe")
    asked = [request(70, seed, prefix_key="shared", max_tokens=6, temperature=1.0) for seed in range(4)]
    asked += [request(50, 30 + seed, max_tokens=6, temperature=1.0) for seed in range(3)]
    async with opened_core(kind, policy, copy.deepcopy(plain), routes=shape_of(policy)) as made:
        await generate_all(made.engine, asked[:4])
        before = made.engine.statistics()["tokens"]
        version = await made.lane.run(lambda: change_weights(policy), name="train")

        async def move() -> None:
            while made.engine.statistics()["tokens"] < before + 1:
                await anyio.lowlevel.checkpoint()
            await made.move(policy.weights.working.clone(), version)

        asked.reverse()
        answers = await generate_all(made.engine, asked, move)
    now = plain_copy(policy, plain)
    late = [pair for pair in zip(asked, answers, strict=True) if (pair[1].versions == 1).all()]
    assert kind == "plain" or len(late) > 2
    for pair in late:
        np.testing.assert_array_equal(known(*pair), expected(now, *pair))


@needs_vllm
@pytest.mark.parametrize(
    ("architecture", "shape", "text"),
    [
        ("qwen3_moe", RoutesShape(3, 2, 6), r"has 3 layers that choose 2 of 6 experts; vLLM has 2,.*\[\(2, 6\)\]"),
        ("qwen3_moe", RoutesShape(2, 2, 8), r"has 2 layers that choose 2 of 8 experts; vLLM has 2,.*\[\(2, 6\)\]"),
        ("llama", RoutesShape(2, 2, 6), r"has 2 layers that choose 2 of 6 experts; vLLM has 0,"),
    ],
)
async def test_other_routers_than_the_trainers_are_refused(architecture: str, shape: RoutesShape, text: str) -> None:
    policy, plain = policy_and_plain(architecture)
    with pytest.raises(ConfigError, match=f"{text}.*switch it off, or use generation.engine=embedded"):
        async with opened_core("vllm", policy, plain, routes=shape):
            pytest.fail("it was opened")


@needs_vllm
async def test_a_router_that_is_not_heard_ends_the_engine() -> None:
    """As a kernel would that routes by itself: what its tokens chose is known to nobody."""
    policy, plain = policy_and_plain("qwen3_moe")
    with pytest.raises(RuntimeError, match="vLLM computed 9 tokens, and 1 of 2 routers chose"):
        async with opened_core("vllm", policy, plain, routes=shape_of(policy)) as made:
            made.cores[0].model.model.layers[1].mlp.experts.router.set_capture_fn(None)
            await made.engine.generate(request(9, 1))
