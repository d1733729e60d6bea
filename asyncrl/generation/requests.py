"""What a request samples with, and what it must be like, whichever engine serves it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, GenerationError
from asyncrl.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from asyncrl.config.schema_rollouts import RolloutConfig

_LONGEST_STOP = 512  # it comes back in the record of the sequence that it ended


def sampling_params(rollout: RolloutConfig, tokenizer: Any) -> SamplingParams:
    """How the rollouts sample. Errors: ConfigError for a text that the tokenizer cannot write, or that is several tokens in
    `logit_bias` or `stop_token_ids`."""
    biases = {_token("logit_bias", key, tokenizer): bias for key, bias in rollout.logit_bias.items()}
    if len(biases) < len(rollout.logit_bias):
        raise ConfigError(f"rollout.logit_bias names a token twice: {rollout.logit_bias} are the ids {list(biases)}")
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop=rollout.stop,
        stop_token_ids=tuple(_token("stop_token_ids", each, tokenizer) for each in rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        logit_bias=biases,
        bad_words=tuple(ids for word in rollout.bad_words for ids in _spellings(word, tokenizer)),
        min_tokens=rollout.min_tokens,
    )


def _token(name: str, key: int | str, tokenizer: Any) -> int:
    if isinstance(key, int) or (key.isascii() and key.isdigit()):
        return int(key)
    ids = _written(name, key, tokenizer)
    if len(ids) > 1:
        raise ConfigError(
            f"rollout.{name} names {key!r}, which the tokenizer makes {len(ids)} tokens of, {list(ids)}; name the text of one "
            "token, or its id; rollout.bad_words and rollout.stop take texts of several"
        )
    return ids[0]


def _spellings(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """As vLLM has it: at the beginning of a text, and behind a space where that is another word of as many tokens."""
    first = _written("bad_words", word.lstrip(), tokenizer)
    second = tuple(map(int, tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)))
    return [first, second] if len(second) == len(first) and second[0] != first[0] else [first]


def _written(name: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens of a text, where they are what is meant by it, and no token for what is unknown."""
    ids = tuple(map(int, tokenizer.encode(text, add_special_tokens=False)))
    read = tokenizer.decode(list(ids))
    if not ids or "".join(read.split()) != "".join(text.split()):
        raise ConfigError(
            f"rollout.{name} holds {text!r}, which the tokenizer cannot write: its tokens are {list(ids)}, {read!r}; leave it out"
        )
    return ids


def check_request(request: GenerationRequest, max_context: int) -> None:
    """`max_context`: longest prompt + max_tokens that the engine has room for. Errors: GenerationError."""
    sampling, size = request.sampling, int(request.prompt_ids.size)
    problem = None
    if size < 1:
        problem = "the prompt is empty"
    elif sampling.max_tokens < 1:
        problem = f"max_tokens is {sampling.max_tokens}, expected at least 1"
    elif size + sampling.max_tokens > max_context:
        problem = (
            f"{size} prompt tokens and max_tokens={sampling.max_tokens} are {size + sampling.max_tokens} tokens, "
            f"but a sequence has room for max_context={max_context}: shorten the prompt, lower max_tokens, or "
            "open the engine with a larger max_context"
        )
    problem = problem or _problem(sampling)
    if problem is not None:
        raise GenerationError(f"this request cannot be served: {problem}")


def _are_biases(given: Mapping[int, float]) -> bool:
    return all(isinstance(token, Integral) and -100 <= bias <= 100 for token, bias in given.items())


def _problem(sampling: SamplingParams) -> str | None:
    """Of the numbers that say how to draw."""
    low, high = LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE
    expected: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "temperature": (f"{low:g} to {high:g}, or 0: greedy", lambda t: t == 0 or low <= t <= high),
        "top_p": ("0 < top_p <= 1", lambda p: 0 < p <= 1),
        "top_k": ("at least 0", lambda k: k >= 0),
        "stop": (
            f"a tuple of strings, none of them empty or of more than {_LONGEST_STOP} characters",
            lambda stop: not isinstance(stop, str) and all(0 < len(each) <= _LONGEST_STOP for each in stop),
        ),
        "min_p": ("0 to 1", lambda p: 0 <= p <= 1),
        "repetition_penalty": ("a number above 0", lambda x: 0 < x < math.inf),
        "presence_penalty": ("-2 to 2", lambda x: -2 <= x <= 2),
        "frequency_penalty": ("-2 to 2", lambda x: -2 <= x <= 2),
        "logit_bias": ("token ids, each with a number from -100 to 100", _are_biases),
        "bad_words": ("one token or more in each", all),
        "min_tokens": (f"0 to max_tokens = {sampling.max_tokens}", lambda n: 0 <= n <= sampling.max_tokens),
    }
    for name, (words, holds) in expected.items():
        if not holds(value := getattr(sampling, name)):
            return f"{name} is {value!r}, expected {words}"
    return None


def check_tokens(request: GenerationRequest, vocabulary: int, has_tokenizer: bool) -> None:
    """Of an engine with a model. Errors: GenerationError for ids beyond the vocabulary, and stop strings without a tokenizer."""
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocabulary:
        raise GenerationError(
            f"this request cannot be served: its prompt holds token ids from {low} to {high}, but the model's "
            f"vocabulary is [0, {vocabulary}): was it made with another tokenizer?"
        )
    sampling = request.sampling
    named = [*sampling.logit_bias, *itertools.chain(*sampling.bad_words), *sampling.stop_token_ids]
    if beyond := [token for token in named if not 0 <= token < vocabulary]:
        raise GenerationError(
            f"this request cannot be served: logit_bias, bad_words or stop_token_ids name the token ids {beyond[:8]}, but the "
            f"model's vocabulary is [0, {vocabulary})"
        )
    if sampling.stop and not has_tokenizer:
        raise GenerationError("this request cannot be served: it has stop strings, but the engine has no tokenizer")
