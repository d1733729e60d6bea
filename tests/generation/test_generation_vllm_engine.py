"""`VllmEngine` against the embedded engine, on vLLM where it is installed, and everywhere on a core of transformers' forward."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from generation_cores import KINDS, MIXTURES, MOST, OpenedCore, needs_vllm, opened_core, small_model
from generation_models import (
    assert_plain,
    cached_logprobs,
    change_weights,
    generate_all,
    opened,
    plain_copy,
    plain_logprobs,
    request,
)  # fmt: skip

from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.types import FinishReason, Generation, GenerationRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM's own modules, wherever they are called first
SAME = 5e-5  # nats, in float32


def policy_and_plain(architecture: str) -> tuple[PolicyModel, Any]:
    module = small_model(architecture)
    plain = copy.deepcopy(module)
    return PolicyModel(module, "float32"), plain


def mixed() -> list[GenerationRequest]:
    """Every way to sample, prompts alone and shared, all at once."""
    return [
        request(5, 1, temperature=1.0),
        request(9, 2, temperature=0.7),
        request(40, 3, prefix_key="shared", temperature=1.0),
        request(40, 4, prefix_key="shared", temperature=1.3),
        request(7, 5, temperature=0.0),
        request(3, 6, temperature=1.0, top_k=5),
        request(12, 7, temperature=0.9, top_p=0.6),
        request(12, 8, temperature=0.9, top_p=0.8, top_k=20, max_tokens=30),
        request(2, 9, temperature=1.0, max_tokens=1),
        request(6, 10, temperature=1.0, max_tokens=40, stop_token_ids=tuple(range(0, 97, 5))),
        request(6, 11, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, min_p=0.02),
        request(40, 12, prefix_key="shared", max_tokens=30, min_tokens=20, stop_token_ids=tuple(range(0, 97, 3))),
        request(9, 13, temperature=0.8, logit_bias={3: 6.0, 4: -100.0}, bad_words=((3,), (8, 9)), top_p=0.9),
    ]


def compare(ours: list[Generation], theirs: list[Generation]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=SAME)
        np.testing.assert_allclose(mine.sampled_logprobs, other.sampled_logprobs, atol=SAME)
        np.testing.assert_array_equal(mine.versions, other.versions)
        assert mine.finish_reason is other.finish_reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", MOST)
async def test_it_samples_what_the_embedded_engine_samples(kind: str, architecture: str) -> None:
    policy, plain = policy_and_plain(architecture)
    async with opened_core(kind, policy, plain) as made:
        ours = await generate_all(made.engine, mixed())
        again = await generate_all(made.engine, mixed()[:3])
    async with opened(policy, max_sequences=8) as embedded:
        theirs = await generate_all(embedded.engine, mixed())
    compare(ours, theirs)
    compare(again, theirs[:3])
    assert {each.finish_reason for each in ours} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any((each.logprobs != each.sampled_logprobs).any() for each in ours)


async def flipped(made: OpenedCore, policy: PolicyModel, asked: list[GenerationRequest]) -> list[Generation]:
    """The weights change as soon as every request has a token."""

    async def flip() -> None:
        while made.engine.statistics()["tokens"] < 3 * len(asked):
            await anyio.lowlevel.checkpoint()
        version = change_weights(policy)
        await made.move(policy.weights.working.clone(), version)

    return await generate_all(made.engine, asked, flip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("architecture", "after"),
    [("llama", "keep"), ("llama", "recompute"), pytest.param("qwen3_moe", "keep", marks=pytest.mark.slow)],
)
async def test_tokens_on_both_sides_of_a_flip_have_the_version_that_sampled_them(
    kind: str, architecture: str, after: str
) -> None:
    policy, plain = policy_and_plain(architecture)
    before = plain_copy(policy, plain)
    asked = [request(20 + index, index, max_tokens=30, temperature=1.0) for index in range(4)]
    async with opened_core(kind, policy, copy.deepcopy(plain), kv_after_update=after) as made:
        answers = await flipped(made, policy, asked)
        later = await made.engine.generate(asked[0])
        assert made.engine.statistics()["running"] == 0
    now = plain_copy(policy, plain)
    for each, answer in zip(asked, answers, strict=True):
        flip = int((answer.versions == 0).sum())
        assert 0 < flip < 30 and (np.diff(answer.versions) >= 0).all() and answer.versions[-1] == 1
        np.testing.assert_allclose(answer.logprobs[:flip], plain_logprobs(before, each, answer)[:flip], atol=SAME)
        if after == "recompute" or kind == "plain":
            expected = plain_logprobs(now, each, answer)
        else:
            expected = cached_logprobs({0: before, 1: now}, each, answer)
        np.testing.assert_allclose(answer.logprobs[flip:], expected[flip:], atol=SAME)
    assert (later.versions == 1).all()
    np.testing.assert_allclose(later.logprobs, plain_logprobs(now, asked[0], later), atol=SAME)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_that_was_half_computed_starts_again_with_the_new_weights(kind: str) -> None:
    """A step computes 64 tokens: when the first request has a token, the others have none."""
    policy, plain = policy_and_plain("llama")
    asked = [request(50, index, max_tokens=8, temperature=1.0) for index in range(5)]
    async with opened_core(kind, policy, copy.deepcopy(plain)) as made:
        version = await made.lane.run(lambda: change_weights(policy), name="train")

        async def move() -> None:
            while made.engine.statistics()["tokens"] < 1:
                await anyio.lowlevel.checkpoint()
            await made.move(policy.weights.working.clone(), version)

        answers = await generate_all(made.engine, asked, move)
    late = [index for index, answer in enumerate(answers) if answer.versions[0] == 1]
    assert kind == "plain" or 0 < len(late) < len(asked)
    assert_plain(plain_copy(policy, plain), [asked[index] for index in late], [answers[index] for index in late], SAME)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_shared_prompt_is_never_that_of_an_earlier_version(kind: str) -> None:
    policy, plain = policy_and_plain("llama")
    asked = [request(64, seed, prefix_key="shared", max_tokens=4, temperature=1.0) for seed in range(6)]
    async with opened_core(kind, policy, copy.deepcopy(plain)) as made:
        await generate_all(made.engine, asked)
        spared = made.engine.statistics()["copied_tokens"]
        version = change_weights(policy)
        await made.move(policy.weights.working.clone(), version)
        answers = await generate_all(made.engine, asked)
        assert kind == "plain" or 0 < spared < made.engine.statistics()["copied_tokens"]
    assert_plain(plain_copy(policy, plain), asked, answers, SAME)


@pytest.mark.parametrize("kind", KINDS)
async def test_its_outputs_are_those_of_the_trainer_also_while_it_generates(kind: str) -> None:
    policy, plain = policy_and_plain("qwen3")
    asked = [request(10, seed, max_tokens=20, temperature=1.0) for seed in range(8)]  # no row is free
    async with opened(policy, max_sequences=8) as embedded:
        expected = await generate_all(embedded.engine, asked)
    async with opened_core(kind, policy, plain) as made:

        async def compare_outputs() -> None:
            while made.engine.statistics()["finished"] < 8:
                found = await made.engine.outputs()
                assert made.engine.output_bound.distance(found, fixed_logprobs(policy)) < SAME

        answers = await generate_all(made.engine, asked, compare_outputs)
        change_weights(policy)
        wrong = made.engine.output_bound.distance(await made.engine.outputs(), fixed_logprobs(policy))
        assert wrong > made.engine.output_bound.hard_limit, "it still has the earlier weights, and its outputs show it"
        await made.move(policy.weights.working.clone(), policy.version)
        assert made.engine.output_bound.distance(await made.engine.outputs(), fixed_logprobs(policy)) < SAME
    compare(answers, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
async def test_replayed_tokens_have_the_log_probs_of_their_record(kind: str, architecture: str) -> None:
    """The prompt's log-probs come from a prefill, those of the completion from steps that decode."""
    policy, plain = policy_and_plain(architecture)
    models = [plain_copy(policy, plain)]
    asked = [request(5, 1, temperature=1.0, max_tokens=40), request(50, 2, temperature=1.0, max_tokens=30)]
    async with opened_core(kind, policy, copy.deepcopy(plain)) as made:

        async def replay(each: GenerationRequest, record: Generation) -> list[float]:
            return await made.engine.replay(each.prompt_ids.tolist(), record.token_ids.tolist())

        records = await generate_all(made.engine, asked)
        found = [[await replay(*pair) for pair in zip(asked, records, strict=True)]]
        version = change_weights(policy)
        await made.move(policy.weights.working.clone(), version)
        found.append([await replay(*pair) for pair in zip(asked, records, strict=True)])
    models.append(plain_copy(policy, plain))
    for model, lines in zip(models, found, strict=True):
        for each, record, line in zip(asked, records, lines, strict=True):
            row = np.concatenate([each.prompt_ids, record.token_ids])
            first = replace(each, prompt_ids=row[:1])
            np.testing.assert_allclose(
                line, plain_logprobs(model, first, replace(record, token_ids=row[1:])), atol=SAME
            )
    for each, record, line in zip(asked, records, found[0], strict=True):
        np.testing.assert_allclose(line[each.prompt_ids.size - 1 :], record.logprobs, atol=SAME)


@needs_vllm
async def test_a_cache_that_is_not_what_was_computed_shows_in_the_outputs() -> None:
    policy, plain = policy_and_plain("llama")
    async with opened_core("vllm", policy, plain) as made:
        core = made.cores[0]
        step, runner = core.step, core._core.model_executor.driver_worker.worker.model_runner

        def forget() -> Any:
            found = step()
            for cache in runner.kv_caches:
                cache.zero_()
            return found

        core.step = forget
        wrong = made.engine.output_bound.distance(await made.engine.outputs(), fixed_logprobs(policy))
        assert wrong > made.engine.output_bound.hard_limit


class Letters:
    """A tokenizer: an id, a letter."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(32 + each) for each in token_ids)


@pytest.mark.parametrize("kind", KINDS)
async def test_stop_strings_and_requests_that_are_given_up(kind: str) -> None:
    policy, plain = policy_and_plain("llama")
    free = request(5, 1, max_tokens=60, temperature=1.0)
    async with opened_core(kind, policy, plain, Letters(), max_sequences=2) as made:
        whole = await made.engine.generate(free)
        text = Letters().decode(whole.token_ids.tolist())
        stopped = await made.engine.generate(request(5, 1, max_tokens=60, temperature=1.0, stop=(text[7:9],)))
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids.tolist() == whole.token_ids[: text.index(text[7:9]) + 2].tolist()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.engine.generate, request(5, 2, max_tokens=80))
                tasks.start_soon(made.engine.generate, request(5, 3, max_tokens=80))
                before = made.engine.statistics()["tokens"]
                while made.engine.statistics()["tokens"] < before + 4:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        compare([await made.engine.generate(free)], [whole])
        assert made.engine.statistics()["aborted"] == 2 and made.engine.statistics()["running"] == 0
        await made.lane.run(made.engine._apply_changes, name="engine/changes")
        assert not made.engine._slots and not made.engine._slot_of_name


@needs_vllm
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", *MIXTURES])
async def test_after_an_update_in_place_it_samples_what_a_fresh_vllm_samples(tmp_path: Any, architecture: str) -> None:
    """The fresh one reads a checkpoint of the same weights with vLLM's own loader, and packs them. All parameters stay where they
    are, over many versions."""
    policy, plain = policy_and_plain(architecture)
    asked = [request(8 + index, index, max_tokens=24, temperature=0.0) for index in range(6)]
    async with opened_core("vllm", policy, plain) as made:
        await generate_all(made.engine, asked)
        places = {name: each.data_ptr() for name, each in made.cores[0].model.named_parameters()}
        for _ in range(50):
            version = change_weights(policy, scale=0.05)
            await made.move(policy.weights.working.clone(), version)
        assert {name: each.data_ptr() for name, each in made.cores[0].model.named_parameters()} == places
        answers = await generate_all(made.engine, asked)
    plain_copy(policy, plain).save_pretrained(tmp_path)
    fresh = await anyio.to_thread.run_sync(greedy, str(tmp_path), [each.prompt_ids.tolist() for each in asked])
    assert [each.token_ids.tolist() for each in answers] == fresh


def greedy(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import EngineArgs, LLMEngine, SamplingParams

    threads = torch.get_num_threads, torch.set_num_threads
    given = EngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=96, enforce_eager=True,
        kv_cache_memory_bytes=1 << 26, generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(given)
    try:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        found: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            found |= {int(each.request_id): list(each.outputs[0].token_ids) for each in engine.step() if each.finished}
    finally:
        torch.get_num_threads, torch.set_num_threads = threads
        engine.engine_core.shutdown()
    return [found[index] for index in range(len(prompts))]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_sampled_while_outputs_are_compared_is_counted(kind: str) -> None:
    """The look's prompt is not."""
    policy, plain = policy_and_plain("llama")
    async with opened_core(kind, policy, plain) as made:
        answers: list[Generation] = []

        async def one() -> None:
            answers.append(await made.engine.generate(request(9, 1, max_tokens=12)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            while not answers:
                await made.engine.outputs()
        found = made.engine.statistics()
    assert (found["tokens"], found["decode_steps"], found["prefill_tokens"]) == (12, 12, 9)


@needs_vllm
async def test_what_is_computed_anew_is_counted() -> None:
    policy, plain = policy_and_plain("llama")
    async with opened_core("vllm", policy, plain, kv_after_update="recompute") as made:
        moved: list[int] = []

        async def move() -> None:
            while made.engine.statistics()["tokens"] < 4:
                await anyio.lowlevel.checkpoint()
            await made.move(policy.weights.working.clone(), policy.version)
            moved.append(int(made.engine.statistics()["tokens"]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move)
            await made.engine.generate(request(9, 1, max_tokens=40))
        prefilled = made.engine.statistics()["prefill_tokens"]
    assert 4 <= moved[0] < 40
    # The prompt twice, and what was sampled before the move but for the token that the next step decodes with.
    assert 9 + 9 + 4 - 1 <= prefilled <= 9 + 9 + moved[0]
