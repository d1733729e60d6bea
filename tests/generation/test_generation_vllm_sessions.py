"""Requests of a session with vLLM: its prefix cache across versions of the weights, by the salt of the version that computed it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from generation_cores import KINDS, OpenedCore, opened_core, small_model
from generation_models import assert_plain, change_weights, generate_all, plain_copy, plain_logprobs, request
from test_generation_sessions import first_turn, next_turn, replayed

from asyncrl.generation.vllm.versions import BLOCK
from asyncrl.models.policy import PolicyModel
from asyncrl.types import GenerationRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM's own modules, wherever they are called first
SAME = 5e-5  # nats, in float32


def policy_and_plain() -> tuple[PolicyModel, Any]:
    module = small_model("llama")
    plain = copy.deepcopy(module)
    return PolicyModel(module, "float32"), plain


def watched(made: OpenedCore) -> list[str]:
    """The salts of all requests from now on."""
    salts: list[str] = []
    add = made.cores[0].add

    def added(*given: Any, salt: str) -> None:
        salts.append(salt)
        add(*given, salt=salt)

    made.cores[0].add = added
    return salts


async def train(made: OpenedCore, policy: PolicyModel, plain: Any, seed: int) -> Any:
    """An optimizer step that vLLM gets. Returns a plain model with the new weights."""
    version = change_weights(policy, seed)
    await made.move(policy.weights.working.clone(), version)
    return plain_copy(policy, plain)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_turn_goes_on_with_blocks_of_older_weights_up_to_the_age_limit(kind: str) -> None:
    policy, plain = policy_and_plain()
    asked = first_turn(2 * BLOCK - 4, 1, "a", max_tokens=8)
    models = {0: plain}
    async with opened_core(kind, policy, copy.deepcopy(plain), max_context=192, kept_prefix_max_age=1) as made:
        salts, engine = watched(made), made.engine
        answer = await engine.generate(asked)
        # Same weights, another request of the same prompt that no session has: the prompt is shared, as always.
        await engine.generate(replace(asked, session=None, seed=9))
        models[1] = await train(made, policy, plain, 1)
        asked = next_turn(asked, answer, 2, new=BLOCK)
        computed = engine.statistics()["prefill_tokens"]
        answer = await engine.generate(asked)
        assert salts == ["0", "0", "0"] and set(answer.versions.tolist()) == {1}
        if kind == "vllm":
            # Two whole blocks: the prompt and four sampled tokens, the last computed by decode steps.
            assert engine.statistics()["prefill_tokens"] - computed == asked.prompt_ids.size - 2 * BLOCK
            made_by = [0] * (2 * BLOCK) + [1] * (asked.prompt_ids.size - 2 * BLOCK - 1)
            assert np.abs(answer.logprobs - replayed(models, asked, answer, made_by)).max() < SAME
            assert np.abs(answer.logprobs - plain_logprobs(models[1], asked, answer)).max() > 1e-3
            found = engine.recorder.drain()
            assert found["engine/kept_prefix_hits"] == found["engine/kept_prefix_age_max"] == 1
            assert found["engine/kept_prefix_tokens_reused"] == 2 * BLOCK
        # Two versions later the whole history is computed again, and a third turn uses what this one computed.
        models[2] = await train(made, policy, plain, 2)
        asked = next_turn(asked, answer, 3)
        answer = await engine.generate(asked)
        assert salts[3:] == ["2"]
        assert_plain(models[2], [asked], [answer], SAME)
        models[3] = await train(made, policy, plain, 3)
        await engine.generate(next_turn(asked, answer, 4))
        assert salts[4:] == ["2"]
        # No sampled token of the older version is in this prompt.
        fresh = replace(asked, prompt_ids=asked.prompt_ids[:20], seed=5)
        assert_plain(models[3], [fresh], [await engine.generate(fresh)], SAME)
        assert salts[5:] == ["3"]
        engine.end_session("a")
        await engine.generate(request(3, 1, max_tokens=1))
        assert engine._prefixes == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"kept_prefix_max_age": 1, "kv_after_update": "recompute"}])
async def test_without_an_age_limit_and_with_recompute_no_key_is_older_than_the_weights(
    kind: str, options: dict[str, Any]
) -> None:
    """Off, the next turn finds no block of its own history, so what it computes does not depend on what vLLM has dropped."""
    policy, plain = policy_and_plain()
    asked = [first_turn(BLOCK + 8, 1, f"s{n}", max_tokens=8) for n in range(3)]
    async with opened_core(kind, policy, copy.deepcopy(plain), max_context=192, **options) as made:
        salts, engine = watched(made), made.engine
        answers = await generate_all(engine, asked)
        assert salts == ["0"] * 3, "the members of a group share their prompt"
        computed = engine.statistics()["prefill_tokens"]
        turns = [next_turn(*pair, seed=2) for pair in zip(asked, answers, strict=True)]
        answers = await generate_all(engine, turns)
        assert_plain(plain, turns, answers, SAME)
        whole = sum(each.prompt_ids.size for each in turns)
        new = engine.statistics()["prefill_tokens"] - computed
        if options:
            assert salts[3:] == ["0"] * 3 and (kind == "plain" or new < whole)
        else:
            assert len(set(salts[3:])) == 3 and "0" not in salts[3:] and new == whole
        now = await train(made, policy, plain, 1)
        turns = [next_turn(*pair, seed=3) for pair in zip(turns, answers, strict=True)]
        assert_plain(now, turns, await generate_all(engine, turns), SAME)


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_noted_of_requests_that_outlive_their_session(kind: str) -> None:
    policy, plain = policy_and_plain()
    asked: list[GenerationRequest] = [first_turn(9, n, f"s{n % 2}", max_tokens=12) for n in range(6)]
    async with opened_core(kind, policy, plain, max_sequences=2, kept_prefix_max_age=2) as made:

        async def end() -> None:
            while made.engine.statistics()["tokens"] < 4:
                await made.lane.run(lambda: None, name="tick")
            for session in ("s0", "s1"):
                made.engine.end_session(session)

        assert_plain(plain, asked, await generate_all(made.engine, asked, end), SAME)
        await made.lane.run(made.engine._apply_changes, name="engine/changes")
        assert made.engine._prefixes == {}
