"""What crosses between node and worker: requests as items of a tensor queue, finished sequences as records.

edge 2    {"prompt": int32 [P], "about": JSON}        a request; or {"about": JSON} alone: one that was given up
edge 2'   a record of one member: `group` is the number of the request, its columns are those of `Generation`; where routes are
          recorded, those of the completion are a column, and those of the prompt a byte string of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from asyncrl.errors import GenerationError
from asyncrl.records.layout import USER_SECTIONS, Section
from asyncrl.records.read import Record
from asyncrl.records.write import Draft, Plan, plan
from asyncrl.types import FinishReason, Generation, GenerationRequest, RoutesArray, SamplingParams

_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)  # by their code in a record, less one
_PROMPT_ROUTES, _STOP = USER_SECTIONS.start, USER_SECTIONS.start + 1
ABOUT_BYTES = 1 << 15  # of a request, beside its prompt
_SEEDS = 0xFFFFFFFFFFFFFFFF  # random keys are 64 bits wide wherever they are used


def item_of(number: int, request: GenerationRequest | None, *, more: bool) -> dict[str, Any]:
    """The item for a request that the node calls `number`. None: nobody waits for it any more; on the same queue, so that it
    cannot come before the request. `more`: the node has more to send, and the worker begins none before it has them all."""
    if request is None:
        return {"about": _json({"number": number, "more": more})}
    return {"prompt": np.ascontiguousarray(request.prompt_ids, np.int32), "about": _about(number, request, more)}


def check_size(request: GenerationRequest) -> None:
    """Errors: GenerationError where what stands beside the prompt is more than the queue has room for, or no JSON."""
    try:
        size = _about(0, request, False).size + 20  # a longer number
    except TypeError as error:  # a surrogate in a stop string, a type of its own
        raise GenerationError(f"this request cannot be served: {error}") from error
    if size > ABOUT_BYTES:
        raise GenerationError(
            f"this request cannot be served: its prefix key, stops, biases and bad words are {size} bytes, at most {ABOUT_BYTES}"
        )


def read_item(item: Mapping[str, Any]) -> tuple[int, GenerationRequest | None, bool]:
    """(number, request, more); no request where it was given up. Copies: the item may be released."""
    about = orjson.loads(item["about"].tobytes())
    if "prompt" not in item:
        return int(about["number"]), None, bool(about["more"])
    sampling = about["sampling"]
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling[name])
    sampling["bad_words"] = tuple(map(tuple, sampling["bad_words"]))
    sampling["logit_bias"] = dict(sampling["logit_bias"])
    request = GenerationRequest(
        item["prompt"].copy(), SamplingParams(**sampling), about["seed"], about["prefix_key"], about["priority"]
    )
    return int(about["number"]), request, bool(about["more"])


def sequence_plan(number: int, generation: Generation, version: int) -> Plan:
    """The record of a finished sequence. `version`: of the weights that the worker holds now."""
    sections: dict[int, Any] = {
        Section.TOKENS: [generation.token_ids],
        Section.LOGPROBS: [generation.logprobs],
        Section.SAMPLED_LOGPROBS: [generation.sampled_logprobs],
        Section.VERSIONS: [generation.versions],
        Section.FINISH_REASONS: [_REASONS.index(generation.finish_reason) + 1],
    }
    routes = generation.routed_experts
    if routes is not None:
        prompt = routes.shape[0] - generation.token_ids.size
        sections |= {Section.ROUTED_EXPERTS: [routes[prompt:]], _PROMPT_ROUTES: routes[:prompt].tobytes()}
    if generation.stop is not None:
        sections[_STOP] = generation.stop.encode()
    return plan(Draft(number, [0], 1, sections, policy_version=version))


def read_sequence(record: Record) -> Generation:
    """The generation in a record of `sequence_plan`. Copies: the record may be released."""
    arrays, stop = record.arrays, record.strings.get(_STOP)
    return Generation(
        arrays[Section.TOKENS].copy(),
        arrays[Section.LOGPROBS].copy(),
        arrays[Section.SAMPLED_LOGPROBS].copy(),
        arrays[Section.VERSIONS].copy(),
        _REASONS[int(arrays[Section.FINISH_REASONS][0]) - 1],
        _routes(record),
        None if stop is None else bytes(stop).decode(),
    )


def _routes(record: Record) -> RoutesArray | None:
    completion = record.arrays.get(Section.ROUTED_EXPERTS)
    if completion is None:
        return None
    prompt = np.frombuffer(record.strings[_PROMPT_ROUTES], completion.dtype).reshape(-1, *completion.shape[1:])
    return np.concatenate([prompt, completion])


def _about(number: int, request: GenerationRequest, more: bool) -> Any:
    return _json(
        {
            "number": number,
            "more": more,
            "seed": int(request.seed) & _SEEDS,
            "prefix_key": request.prefix_key,
            "priority": request.priority,
            "sampling": {**asdict(request.sampling), "logit_bias": list(request.sampling.logit_bias.items())},
        }
    )


def _json(about: dict[str, Any]) -> Any:
    return np.frombuffer(orjson.dumps(about, option=orjson.OPT_SERIALIZE_NUMPY), np.uint8)
