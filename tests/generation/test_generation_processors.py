"""Penalties, biases, bans, min-p and a minimum of tokens: tokens and both log-prob columns against transformers' processors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from generation_models import VOCABULARY, answered, generate_all, opened, policy_and_plain, request
from test_generation_embedded import Characters
from test_generation_plain import EAGER
from test_generation_plain import policy_and_plain as plain_path
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from asyncrl.config.resolve import resolve, warnings
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.generation.embedded.sampling import keyed_uniform, seed_array
from asyncrl.generation.requests import sampling_params
from asyncrl.types import FinishReason, GenerationRequest, SamplingParams

EVEN = tuple(range(0, VOCABULARY, 2))
WAYS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6, "temperature": 0.8},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -0.8, "presence_penalty": 0.4},
    {"min_p": 0.15},
    {"min_p": 0.05, "top_p": 0.9, "top_k": 40, "temperature": 1.3},
    {"logit_bias": {3: 6.0, 5: -100.0}},
    {"logit_bias": {11: 100.0}, "temperature": 0.02},  # a token whose probability underflows in the model alone
    {"bad_words": tuple((token,) for token in EVEN)},
    {"bad_words": tuple((one, other) for one in EVEN for other in range(VOCABULARY) if other % 5)},
    {"min_tokens": 7, "stop_token_ids": EVEN},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {2: 1.5}},
    {
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {1: 3.0, 9: 4.0},
        "bad_words": ((9,), (1, 1)), "min_tokens": 5, "stop_token_ids": EVEN, "temperature": 0.9, "top_p": 0.95, "min_p": 0.01,
    },
]  # fmt: skip


@cache
def banned(words: tuple[tuple[int, ...], ...]) -> NoBadWordsLogitsProcessor:
    return NoBadWordsLogitsProcessor([list(word) for word in words])


def scores(sampling: SamplingParams, tokens: torch.Tensor, prompt: int, logits: torch.Tensor) -> torch.Tensor:
    """As transformers' `generate` puts its processors together. It has no presence and frequency penalty: OpenAI's formula. Its bad
    words look into the prompt, too: they are given the completion, as in vLLM."""
    first, rest = LogitsProcessorList(), LogitsProcessorList()
    if sampling.logit_bias:
        first.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        first.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_tokens:
        stops = list(sampling.stop_token_ids)
        rest.append(MinNewTokensLengthLogitsProcessor(prompt, sampling.min_tokens, stops, device="cpu"))
    if sampling.temperature not in (0.0, 1.0):
        rest.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        rest.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        rest.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        rest.append(MinPLogitsWarper(sampling.min_p))
    found = first(tokens, logits.clone())
    count = torch.bincount(tokens[0, prompt:], minlength=VOCABULARY)
    found = found - count * sampling.frequency_penalty - (count > 0) * sampling.presence_penalty
    if sampling.bad_words:
        found = banned(sampling.bad_words)(tokens[:, prompt:], found)
    return rest(tokens, found)[0]


@torch.no_grad()
def expected(model: PreTrainedModel, asked: GenerationRequest) -> tuple[list[int], list[float], list[float]]:
    """Tokens, log-probs of the model at the temperature, log-probs of what was drawn from; drawn with the engine's numbers."""
    sampling, prompt = asked.sampling, asked.prompt_ids.size
    tokens, columns = torch.tensor(asked.prompt_ids[None].astype(np.int64)), ([], [])
    for place in range(sampling.max_tokens):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
        drawn = scores(sampling, tokens, prompt, logits).double().log_softmax(-1)
        if sampling.temperature == 0:
            token, of_drawn = int(drawn.argmax()), 0.0
        else:
            order = (
                torch.argsort(-drawn, stable=True) if sampling.top_k or sampling.top_p < 1 else torch.arange(VOCABULARY)
            )
            uniform = keyed_uniform(seed_array(asked.seed), np.array([place]))[0]
            token = int(order[int((drawn[order].exp().cumsum(0) <= uniform).sum())])
            of_drawn = float(drawn[token])
        columns[0].append(float((logits[0].double() / (sampling.temperature or 1.0)).log_softmax(-1)[token]))
        columns[1].append(of_drawn)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        if token in sampling.stop_token_ids:
            break
    return tokens[0, prompt:].tolist(), *columns


@pytest.mark.parametrize("path", ["packed", "plain"])
async def test_tokens_and_both_columns_are_those_of_transformers_processors(path: str) -> None:
    """All ways in one batch, alone and as members that share a prompt."""
    policy, plain = policy_and_plain("llama") if path == "packed" else plain_path("lfm2", EAGER)
    asked = [request(6, seed, max_tokens=12, **way) for seed, way in enumerate(WAYS)]
    asked += [request(9, seed, prefix_key="shared", max_tokens=6, **way) for seed, way in enumerate(WAYS[::2], 100)]
    answers = await answered(policy, asked, max_sequences=16, prefill_tokens=64)
    for wanted, answer in zip(asked, answers, strict=True):
        tokens, whole, drawn = expected(plain, wanted)
        assert answer.token_ids.tolist() == tokens, wanted.sampling
        tolerance = 1e-4 / (wanted.sampling.temperature or 1.0)
        np.testing.assert_allclose(answer.logprobs, whole, atol=tolerance)
        np.testing.assert_allclose(answer.sampled_logprobs, drawn, atol=tolerance)
    assert min(answers[8].logprobs) < -105  # below what a float32 softmax can say
    assert answers[11].token_ids.size > 7 and answers[11].finish_reason is FinishReason.STOP


async def test_a_stop_string_ends_nothing_before_the_minimum() -> None:
    policy, _ = policy_and_plain("qwen3")
    cases = {("7", 0): 8, ("7", 7): 8, ("7", 8): 10, ("7", 10): 24, ("727", 9): 10, ("727", 10): 24}
    asked = [request(5, 1, max_tokens=24, stop=(stop,), min_tokens=least) for stop, least in cases]
    async with opened(policy, Characters()) as run:
        (free,) = await generate_all(run.engine, [request(5, 1, max_tokens=24)])
        answers = await generate_all(run.engine, asked)
    text = Characters().decode(free.token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert text.startswith("Gy$j;k[727Y") and "7" not in text[10:]
    assert [answer.token_ids.size for answer in answers] == list(cases.values())


async def test_what_cannot_be_drawn_is_refused() -> None:
    policy, _ = policy_and_plain("qwen3")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"min_p": 1.5}, "min_p is 1.5, expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected a finite number above 0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0, expected -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {1: float("-inf")}}, "logit_bias is .* from -100 to 100"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is .* token ids"),
        ({"logit_bias": {VOCABULARY: 1.0}}, rf"token ids \[{VOCABULARY}\], .* \[0, {VOCABULARY}\)"),
        ({"bad_words": ((3,), ())}, "bad_words is .* at least one token"),
        ({"bad_words": ((-1,),)}, r"token ids \[-1\]"),
        ({"min_tokens": 13}, "min_tokens is 13, expected an integer from 0 to max_tokens = 12"),
    ]
    async with opened(policy) as run:
        for sampling, text in cases:
            with pytest.raises(GenerationError, match=text):
                await run.engine.generate(request(4, 0, **sampling))


class Words:
    """A tokenizer whose words have ids: " b" another than "b", "c d" two."""

    ids: ClassVar = {"a": 1, "b": 2, " b": 3, "c": 4, " c": 9, " ": 5, "d": 6}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found = []
        while text:
            piece = next((each for each in sorted(self.ids, key=len, reverse=True) if text.startswith(each)), text)
            found.append(self.ids.get(piece, 0))
            text = text[len(piece) :]
        return found

    def decode(self, token_ids: list[int]) -> str:
        return "".join(next((text for text, each in self.ids.items() if each == token), "<unk>") for token in token_ids)


def config(**rollout: Any) -> Config:
    return Config.model_validate({"rollout": rollout, "engine": {"kind": "dry_run"}, "train": {"kind": "dry_run"}})


def test_texts_become_tokens_as_vllm_has_them() -> None:
    rollout = config(
        logit_bias={7: 1, "8": 2, "d": -100}, bad_words=["b", "c d", "d"], min_p=0.1, max_tokens=9, min_tokens=3
    ).rollout
    found = sampling_params(rollout, Words())
    assert found.logit_bias == {7: 1.0, 8: 2.0, 6: -100.0}
    assert found.bad_words == ((2,), (3,), (4, 5, 6), (9, 5, 6), (6,))  # " d" is two tokens, not another word of one
    assert (found.min_p, found.min_tokens, found.repetition_penalty) == (0.1, 3, 1.0)
    for wrong, text in (
        ({"logit_bias": {"c d": 1}}, "'c d'.* 3 tokens"),
        ({"logit_bias": {6: 1, "d": 1}}, r"two keys for one token: the keys \[6, 'd'\] are the tokens \[6\]"),
        ({"logit_bias": {"é": 1}}, "'é', which .* cannot encode: .*<unk>"),
        ({"bad_words": [""]}, "'', which .* cannot encode"),
    ):
        with pytest.raises(ConfigError, match=text):
            sampling_params(config(**wrong).rollout, Words())


@pytest.mark.parametrize(
    "rollout",
    [
        {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1},
        {"logit_bias": {3: 1.0}}, {"bad_words": ["x"]}, {"min_tokens": 2},
    ],
)  # fmt: skip
def test_a_run_says_that_it_draws_from_another_distribution(rollout: dict[str, Any]) -> None:
    (name,) = rollout
    (said,) = [line for line in warnings(resolve(config(**rollout), embedding=True)) if name in line]
    assert "own distribution" in said and "algorithm.importance" in said
    assert not any("own distribution" in line for line in warnings(resolve(config(), embedding=True)))


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_tokens is 9; expected at most rollout\.max_tokens = 8"):
        resolve(config(min_tokens=9, max_tokens=8), embedding=True)
    with pytest.raises(ConfigError, match=r"logit_bias is .*5: 101.0.*; expected numbers from -100 to 100"):
        resolve(config(logit_bias={5: 101}), embedding=True)
    assert (
        replace(SamplingParams(), min_tokens=3).changes_logits and not SamplingParams(min_p=0.1, top_k=3).changes_logits
    )
