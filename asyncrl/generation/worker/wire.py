"""Requests and finished sequences as messages of the channel between node and worker.

edge 2    {"requests": [[number, about], ...]} + prompts int32    about None: that request is cancelled
edge 2'   {"sequence": number, ...} + [4, C] words: token ids, both log-probs, versions; then the routes, if they are recorded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncrl.concurrency.channel import encode
from asyncrl.errors import GenerationError
from asyncrl.types import FinishReason, Generation, GenerationRequest, SamplingParams

# Random keys are 64 bits wide wherever they are used.
_SEEDS = 0xFFFFFFFFFFFFFFFF
Message = tuple[dict[str, Any], bytes]


def check_sendable(request: GenerationRequest) -> None:
    """Errors: GenerationError for a setting that JSON cannot hold, such as a surrogate in a stop string."""
    try:
        encode(_about(request))
    except TypeError as error:
        raise GenerationError(f"this request cannot be served: {error}") from error


def requests_message(requests: Sequence[tuple[int, GenerationRequest | None]]) -> Message:
    """Requests by number, in order; None cancels one. The worker begins the requests of a message together."""
    about = [[number, None if request is None else _about(request)] for number, request in requests]
    prompts = [np.ascontiguousarray(each.prompt_ids, np.int32).tobytes() for _, each in requests if each is not None]
    return {"requests": about}, b"".join(prompts)


def read_requests(message: Mapping[str, Any]) -> list[tuple[int, GenerationRequest | None]]:
    """The requests of a `requests_message`."""
    prompts, at = np.frombuffer(message.get("data", b""), np.int32), 0
    found: list[tuple[int, GenerationRequest | None]] = []
    for number, about in message["requests"]:
        if about is None:
            found.append((number, None))
            continue
        sampling, size = about["sampling"], about["tokens"]
        for name in ("stop", "stop_token_ids"):
            sampling[name] = tuple(sampling[name])
        sampling["bad_words"] = tuple(map(tuple, sampling["bad_words"]))
        sampling["logit_bias"] = dict(sampling["logit_bias"])
        prompt, at = prompts[at : at + size].copy(), at + size
        request = GenerationRequest(
            prompt, SamplingParams(**sampling), about["seed"], about["prefix_key"], about["priority"]
        )
        found.append((number, request))
    return found


def sequence_message(number: int, generation: Generation) -> Message:
    """The message that carries a finished sequence to the trainer."""
    routes = generation.routed_experts
    message = {
        "sequence": number,
        "tokens": generation.token_ids.size,
        "finish_reason": generation.finish_reason.value,
        "stop": generation.stop,
        "routes": None if routes is None else [routes.dtype.str, *routes.shape],
    }
    columns = (generation.token_ids, generation.logprobs, generation.sampled_logprobs, generation.versions)
    arrays = [*columns, *([] if routes is None else [routes])]
    return message, b"".join(np.ascontiguousarray(array).data for array in arrays)


def read_sequence(message: Mapping[str, Any]) -> Generation:
    """The generation in a `sequence_message`."""
    data, size, routes = message["data"], message["tokens"], message["routes"]
    tokens, logprobs, sampled, versions = np.frombuffer(data, np.int32, 4 * size).reshape(4, size).copy()
    return Generation(
        tokens,
        logprobs.view(np.float32),
        sampled.view(np.float32),
        versions,
        FinishReason(message["finish_reason"]),
        None if routes is None else np.frombuffer(data, routes[0], offset=16 * size).reshape(routes[1:]).copy(),
        message["stop"],
    )


def _about(request: GenerationRequest) -> dict[str, Any]:
    return {
        "tokens": int(request.prompt_ids.size),
        "seed": int(request.seed) & _SEEDS,
        "prefix_key": request.prefix_key,
        "priority": request.priority,
        "sampling": {**asdict(request.sampling), "logit_bias": list(request.sampling.logit_bias.items())},
    }
