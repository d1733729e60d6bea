"""Sampling parameters of the rollouts, and the checks of requests that all engines share."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, GenerationError
from asyncrl.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from asyncrl.config.schema_rollouts import RolloutConfig

# In characters. The record of a sequence contains the stop string that ended the sequence, so stop strings have a limit.
_LONGEST_STOP = 512
_SURROGATES = re.compile("[\ud800-\udfff]")


def sampling_params(rollout: RolloutConfig, tokenizer: Any) -> SamplingParams:
    """The sampling parameters of the section `rollout`. Errors: ConfigError for a text that the tokenizer cannot encode, for a text
    of several tokens in `logit_bias` or `stop_token_ids`, and for a token that `logit_bias` has twice."""
    biases = {_token_id("logit_bias", key, tokenizer): bias for key, bias in rollout.logit_bias.items()}
    if len(biases) < len(rollout.logit_bias):
        text = f"rollout.logit_bias has two keys for one token: the keys {[*rollout.logit_bias]} are the tokens {[*biases]}"
        raise ConfigError(f"{text}; remove one of the two keys")
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop=rollout.stop,
        stop_token_ids=tuple(_token_id("stop_token_ids", key, tokenizer) for key in rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        logit_bias=biases,
        bad_words=tuple(ids for word in rollout.bad_words for ids in _encodings(word, tokenizer)),
        min_tokens=rollout.min_tokens,
    )


def _token_id(name: str, key: int | str, tokenizer: Any) -> int:
    if isinstance(key, int) or (key.isascii() and key.isdigit()):
        return int(key)
    ids = _encode(name, key, tokenizer)
    if len(ids) > 1:
        raise ConfigError(
            f"rollout.{name} has {key!r}, which the tokenizer encodes as {len(ids)} tokens, {list(ids)}; expected the text or the "
            "id of one token; rollout.bad_words and rollout.stop take texts of several tokens"
        )
    return ids[0]


def _encodings(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of the word without a leading space and, as in vLLM, with a leading space. The form with a space is omitted if it
    has another number of tokens or the same first token."""
    plain = _encode("bad_words", word.lstrip(), tokenizer)
    after_space = tuple(map(int, tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)))
    return [plain, after_space] if len(after_space) == len(plain) and after_space[0] != plain[0] else [plain]


def _encode(name: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    # Only decoding shows whether the tokenizer has replaced the text by a token for unknown text.
    ids = tuple(map(int, tokenizer.encode(text, add_special_tokens=False)))
    decoded = tokenizer.decode(list(ids))
    if not ids or "".join(decoded.split()) != "".join(text.split()):
        raise ConfigError(
            f"rollout.{name} has {text!r}, which the tokenizer cannot encode: its tokens {list(ids)} mean {decoded!r}; remove it"
        )
    return ids


def check_request(request: GenerationRequest, max_context: int) -> None:
    """Errors: GenerationError for an invalid request. `max_context`: the engine's limit of prompt tokens + max_tokens."""
    sampling, size = request.sampling, int(request.prompt_ids.size)
    problem = None
    if size < 1:
        problem = "the prompt is empty"
    elif not isinstance(sampling.max_tokens, Integral) or sampling.max_tokens < 1:
        problem = f"max_tokens is {sampling.max_tokens}, expected an integer of at least 1"
    elif size + sampling.max_tokens > max_context:
        problem = (
            f"{size} prompt tokens and max_tokens={sampling.max_tokens} are {size + sampling.max_tokens} tokens, "
            f"but a sequence has room for max_context={max_context}: shorten the prompt, lower max_tokens, or "
            "open the engine with a larger max_context"
        )
    problem = problem or _sampling_problem(sampling)
    if problem is not None:
        raise GenerationError(f"this request cannot be served: {problem}")


def _are_stops(stop: Any) -> bool:
    return isinstance(stop, tuple | list) and all(
        0 < len(s) <= _LONGEST_STOP and not _SURROGATES.search(s) for s in stop
    )


def _are_biases(biases: Any) -> bool:
    # Only a dict: a request for a worker is pickled, and some other mappings cannot be pickled.
    is_dict = isinstance(biases, dict)
    return is_dict and all(isinstance(token, Integral) and -100 <= bias <= 100 for token, bias in biases.items())


def _sampling_problem(sampling: SamplingParams) -> str | None:
    low, high = LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE
    # Field -> (the allowed values in words, whether a value is allowed).
    expected: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "temperature": (f"{low:g} to {high:g}, or 0: greedy", lambda t: t == 0 or low <= t <= high),
        "top_p": ("0 < top_p <= 1", lambda p: 0 < p <= 1),
        "top_k": ("an integer from 0 to 2**31 - 1", lambda k: isinstance(k, Integral) and 0 <= int(k) < 2**31),
        "stop": (f"a tuple of strings of 1 to {_LONGEST_STOP} characters, without a lone surrogate", _are_stops),
        "min_p": ("0 to 1", lambda p: 0 <= p <= 1),
        "repetition_penalty": ("a finite number above 0", lambda x: 0 < x < math.inf),
        "presence_penalty": ("-2 to 2", lambda x: -2 <= x <= 2),
        "frequency_penalty": ("-2 to 2", lambda x: -2 <= x <= 2),
        "logit_bias": ("a dict of token ids, each with a number from -100 to 100", _are_biases),
        "bad_words": ("words of at least one token", all),
        "stop_token_ids": ("a tuple of token ids", lambda ids: all(isinstance(token, Integral) for token in ids)),
        "min_tokens": (
            f"an integer from 0 to max_tokens = {sampling.max_tokens}",
            lambda n: isinstance(n, Integral) and 0 <= int(n) <= sampling.max_tokens,
        ),
    }
    for name, (allowed, is_allowed) in expected.items():
        value, fits = getattr(sampling, name), False
        with contextlib.suppress(TypeError):
            fits = is_allowed(value)
        if not fits:
            return f"{name} is {value!r}, expected {allowed}"
    return None


def check_tokens(request: GenerationRequest, vocabulary: int, has_tokenizer: bool) -> None:
    """Errors: GenerationError for token ids outside of [0, vocabulary), and for stop strings if the engine has no tokenizer."""
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocabulary:
        raise GenerationError(
            f"this request cannot be served: its prompt has token ids from {low} to {high}, but the model's "
            f"vocabulary is [0, {vocabulary}); encode the prompt with the model's own tokenizer"
        )
    sampling = request.sampling
    token_ids = [*sampling.logit_bias, *itertools.chain(*sampling.bad_words), *sampling.stop_token_ids]
    if unknown := [token for token in token_ids if not 0 <= token < vocabulary]:
        raise GenerationError(
            f"this request cannot be served: logit_bias, bad_words or stop_token_ids have the token ids {unknown[:8]}, but the "
            f"model's vocabulary is [0, {vocabulary}); remove these ids"
        )
    if sampling.stop and not has_tokenizer:
        raise GenerationError("this request cannot be served: it has stop strings, but the engine has no tokenizer")
