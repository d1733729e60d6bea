"""Makes answers in the form of OpenAI's chat completions and completions, and of vLLM's generate route.

Every answer has `policy_versions`, the run-length encoded versions of the tokens: `[[version, number of tokens], ...]`. Answers of
the generate route always have `prompt_token_ids`, `token_ids` and log-probs. Other answers have them if the request asks for them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from asyncrl.types import ChatAnswer, FinishReason, Generation, Int32Array

from .parameters import SampleRequest

_ENTRY = '{"token":"token_id:%d","token_id":%d,"logprob":%.9g,"bytes":null,"top_logprobs":[]}'  # of one token


def finish_reason(answer: ChatAnswer) -> str:
    """Why the answer ended, in OpenAI's words."""
    if answer.generation.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def dumps(value: Any) -> bytes:
    """The value as JSON. Numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event. `name`: the type of the event; empty: none."""
    return b"%sdata: %s\n\n" % (f"event: {name}\n".encode() if name else b"", dumps(value))


def version_runs(generation: Generation) -> list[list[int]]:
    """`policy_versions`, see the module docstring."""
    versions = generation.versions
    starts = np.flatnonzero(np.diff(versions, prepend=-2))
    return np.stack([versions[starts], np.diff(starts, append=versions.size)], axis=1).tolist()  # type: ignore[no-any-return]  # lists


def logprob_content(choice: ChatAnswer, top: Sequence[tuple[int, float]] = ()) -> dict[str, Any]:
    """`choices[i].logprobs`, as JSON text: a dictionary per token costs the event loop milliseconds. `top`: see `SampleRequest`."""
    generation = choice.generation
    ids = generation.token_ids.tolist()
    parts = list(map(_ENTRY.__mod__, zip(ids, ids, generation.logprobs.tolist(), strict=True)))
    if parts and top:
        tops = ",".join(_ENTRY.replace(',"top_logprobs":[]', "") % (token, token, value) for token, value in top)
        parts[0] = parts[0].replace('"top_logprobs":[]', f'"top_logprobs":[{tops}]')
    return {"content": orjson.Fragment(f"[{','.join(parts)}]"), "refusal": None}


def usage_of(choices: Sequence[ChatAnswer], prompts: Iterable[Int32Array]) -> dict[str, int]:
    """The value of `usage`, as in chat completions. `prompts`: each prompt once."""
    prompt = sum(int(ids.size) for ids in prompts)
    completion = sum(int(choice.generation.token_ids.size) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def identifier(kind: str) -> str:
    """A random id that begins with `kind`."""
    return f"{kind}-{uuid.uuid4().hex}"


def _shared(ask: SampleRequest, choice: ChatAnswer) -> dict[str, Any]:
    fields: dict[str, Any] = {"policy_versions": version_runs(choice.generation)}
    return fields | ({"token_ids": choice.generation.token_ids} if ask.ids else {})


def chat_reply(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    """The answer as the object `chat.completion`."""
    return {
        "id": identifier("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": number,
                "message": {"refusal": None, **choice.message},
                "logprobs": logprob_content(choice, ask.top_tokens) if ask.logprobs else None,
                "finish_reason": finish_reason(choice),
                **_shared(ask, choice),
            }
            for number, choice in enumerate(choices)
        ],
        "usage": usage_of(choices, [choices[0].prompt_ids]),
        **({"prompt_token_ids": choices[0].prompt_ids} if ask.ids else {}),
    }


def chat_events(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> Iterator[bytes]:
    """The answer as a stream of `chat.completion.chunk`, a chunk for each choice."""
    reply = chat_reply(ask, choices, model)
    for choice in reply["choices"]:
        choice["delta"] = {key: value for key, value in choice.pop("message").items() if value is not None}
        if calls := choice["delta"].get("tool_calls"):
            choice["delta"]["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    return _chunks(ask, reply | {"object": "chat.completion.chunk"})


def _chunks(ask: SampleRequest, reply: Mapping[str, Any]) -> Iterator[bytes]:
    head = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
    for choice in reply["choices"]:
        yield event(head | {"choices": [choice]})
    if ask.usage:
        yield event(head | {"choices": [], "usage": reply["usage"]})
    yield b"data: [DONE]\n\n"


def text_reply(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    """The answer as the object `text_completion`. With several prompts, prompt ids (if asked for) are in each choice."""
    several, found = len(ask.prompts) > 1, []
    for number, choice in enumerate(choices):
        text = choice.message["content"]
        fields = {"index": number, "text": text, "finish_reason": finish_reason(choice), "logprobs": None}
        if ask.logprobs:
            tokens = [f"token_id:{token}" for token in choice.generation.token_ids.tolist()]
            given = {"tokens": tokens, "token_logprobs": choice.generation.logprobs}
            fields["logprobs"] = given | {"top_logprobs": None, "text_offset": []}
        if ask.ids and several:
            fields["prompt_token_ids"] = choice.prompt_ids
        found.append(fields | _shared(ask, choice))
    return {
        "id": identifier("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": found,
        "usage": usage_of(choices, [choice.prompt_ids for choice in choices[:: ask.n]]),
        **({"prompt_token_ids": choices[0].prompt_ids} if ask.ids and not several else {}),
    }


def text_events(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> Iterator[bytes]:
    """The answer as a stream of `text_completion`, a chunk for each choice."""
    return _chunks(ask, text_reply(ask, choices, model))


def generate_reply(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    """The answer of vLLM's generate route."""
    return {
        "request_id": identifier("generate"),
        "model": model,
        "choices": [
            {
                "index": number,
                "token_ids": choice.generation.token_ids,
                "logprobs": logprob_content(choice),
                "finish_reason": finish_reason(choice),
                "policy_versions": version_runs(choice.generation),
            }
            for number, choice in enumerate(choices)
        ],
        "prompt_token_ids": choices[0].prompt_ids,
        "usage": usage_of(choices, [choices[0].prompt_ids]),
    }


def tokens_of(ask: SampleRequest, choice: ChatAnswer) -> dict[str, Any]:
    """The fields about tokens of an answer that has exactly one choice."""
    fields: dict[str, Any] = {"prompt_token_ids": choice.prompt_ids, "token_logprobs": choice.generation.logprobs}
    return _shared(ask, choice) | (fields if ask.ids else {})
