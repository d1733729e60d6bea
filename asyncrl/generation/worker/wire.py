"""Requests and finished sequences as messages of the channel between rank and worker.

rank -> worker    {"requests": [[number, fields], ...], "ended": [session, ...]} + prompts int32
                                                    `fields` None: that request is cancelled
worker -> rank    {"sequence": number, ...} + [4, C] of 4 bytes each: ids, both log-probs, versions of C tokens; then the routes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncrl.concurrency.channel import encode
from asyncrl.errors import GenerationError
from asyncrl.types import FinishReason, Generation, GenerationRequest, SamplingParams

# Sampling uses the low 64 bits of a seed, and the channel's JSON encoder refuses larger integers.
_SEED_MASK = 0xFFFFFFFFFFFFFFFF
# Fields that are sent unchanged, except that `_SEED_MASK` cuts the seed.
_PLAIN_FIELDS = ("seed", "prefix_key", "priority", "session")
Message = tuple[dict[str, Any], bytes]


def check_sendable(request: GenerationRequest) -> None:
    """Errors: GenerationError for a setting that JSON cannot hold, such as a surrogate in a stop string."""
    try:
        encode(_request_fields(request))
    except TypeError as error:
        raise GenerationError(f"this request cannot be served: {error}") from error


def requests_message(
    requests: Sequence[tuple[int, GenerationRequest | None]], ended_sessions: Sequence[str] = ()
) -> Message:
    """Requests by number, in order; None cancels a request. The worker begins the requests of a message together, and then
    ends the sessions."""
    fields = [[number, None if request is None else _request_fields(request)] for number, request in requests]
    prompts = [request.prompt_ids for _, request in requests if request is not None]
    return {"requests": fields, "ended": list(ended_sessions)}, b"".join(
        np.ascontiguousarray(ids, np.int32).tobytes() for ids in prompts
    )


def read_requests(message: Mapping[str, Any]) -> list[tuple[int, GenerationRequest | None]]:
    """The requests of a `requests_message`."""
    prompts, start = np.frombuffer(message.get("data", b""), np.int32), 0
    requests: list[tuple[int, GenerationRequest | None]] = []
    for number, fields in message["requests"]:
        if fields is None:
            requests.append((number, None))
            continue
        sampling, size = fields["sampling"], fields["tokens"]
        for name in ("stop", "stop_token_ids"):
            sampling[name] = tuple(sampling[name])
        sampling["bad_words"] = tuple(map(tuple, sampling["bad_words"]))
        sampling["logit_bias"] = dict(sampling["logit_bias"])
        prompt = prompts[start : start + size].copy()
        start += size
        options = {name: fields[name] for name in _PLAIN_FIELDS}
        requests.append((number, GenerationRequest(prompt, SamplingParams(**sampling), **options)))
    return requests


def sequence_message(number: int, generation: Generation) -> Message:
    """The message that carries a finished sequence to the rank."""
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


def _request_fields(request: GenerationRequest) -> dict[str, Any]:
    return {
        **{name: getattr(request, name) for name in _PLAIN_FIELDS},
        "tokens": int(request.prompt_ids.size),
        "seed": int(request.seed) & _SEED_MASK,
        "sampling": {**asdict(request.sampling), "logit_bias": list(request.sampling.logit_bias.items())},
    }
