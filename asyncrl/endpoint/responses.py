"""OpenAI's Responses API: `POST /v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from asyncrl.types import ChatAnswer, Messages, SamplingParams

from .parameters import (
    GRAMMAR,
    SAMPLED_ALONE,
    TOKENS,
    TOOL_CHOICE,
    Closed,
    Loose,
    OnlyFalse,
    OnlyTrue,
    OpenAiBody,
    PlainFormat,
    SampleRequest,
    ToolFunction,
    as_tools,
    joined,
    refused,
)
from .replies import event, finish_reason, identifier, logprob_content, tokens_of


class _ItemPart(Loose):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _MessageItem(Loose):
    type: NotRequired[Literal["message"]]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_ItemPart]


class _CallItem(Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _ResultItem(Loose):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_ItemPart]


class _ReasoningText(Loose):
    text: str


class _ReasoningItem(Loose):
    type: Literal["reasoning"]
    content: NotRequired[list[_ReasoningText] | None]


class _ResponsesTool(ToolFunction):
    type: Literal["function"]


class _TextOptions(Closed):
    format: NotRequired[PlainFormat | None]


class _EmptyReasoning(Closed):
    effort: NotRequired[None]
    summary: NotRequired[None]


class ResponsesBody(OpenAiBody):
    """Parameters of `POST /v1/responses`."""

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[_MessageItem | _CallItem | _ResultItem | _ReasoningItem], Field(min_length=1)]
    )
    instructions: str | None = None
    max_output_tokens: int | None = TOKENS
    tools: list[_ResponsesTool] | None = None
    tool_choice: Literal["auto", "none"] | None = TOOL_CHOICE
    parallel_tool_calls: OnlyTrue | None = Field(None, description="The policy may call any number of tools.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="reasoning.encrypted_content is ignored: the reasoning is in the answer."
    )
    text: _TextOptions | None = Field(None, description=GRAMMAR)
    reasoning: _EmptyReasoning | None = Field(
        None, description="Not supported: set data.chat_template_kwargs of the run, as its template needs."
    )
    truncation: Literal["disabled"] | None = Field(
        None, description="Nothing is cut: a conversation that is too long is refused."
    )
    top_logprobs: int | None = Field(None, ge=0, le=0, description=SAMPLED_ALONE)
    background: OnlyFalse | None = None
    max_tool_calls: None = refused("Not supported. Leave it out.")
    seed: None = refused("Not supported. Leave it out.")
    previous_response_id: None = refused("Not supported: nothing is stored. Send the whole conversation as input.")
    conversation: None = refused("Not supported: nothing is stored. Send the whole conversation as input.")
    prompt: None = refused("Not supported: nothing is stored. Send instructions and input.")

    def ask(self, defaults: SamplingParams) -> SampleRequest:
        items: Any = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        start: Messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools: Any = [] if self.tool_choice == "none" else self.tools
        functions = tools and [{k: v for k, v in tool.items() if k != "type"} for tool in tools]
        return self._ask(
            defaults,
            {"max_tokens": self.max_output_tokens},
            messages=start + _messages(items),
            tools=as_tools(functions),
            logprobs="message.output_text.logprobs" in (self.include or ()),
        )


def _messages(items: list[dict[str, Any]]) -> Messages:
    """Items as messages. The reasoning, text and calls of one reply are several items, and become one message again."""
    messages: Messages = []
    reply: dict[str, Any] | None = None

    def current(*taken: str) -> dict[str, Any]:
        """The message of the current reply. A new message if there is no reply, or if the reply has a value for one of `taken`."""
        nonlocal reply
        if reply is None or any(reply.get(key) for key in taken):
            reply = {"role": "assistant", "content": ""}
            messages.append(reply)
        return reply

    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            texts = [part["text"] for part in item.get("content") or ()]
            current("reasoning_content", "content", "tool_calls")["reasoning_content"] = "".join(texts)
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = current().setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "message" and item["role"] == "assistant":
            current("content", "tool_calls")["content"] = joined(item["content"])
        elif kind == "message":
            reply = None
            messages.append({"role": item["role"], "content": joined(item["content"])})
        else:
            reply = None
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": joined(item["output"])})
    return messages


def responses_reply(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    """The answer as the object `response`."""
    [choice] = choices
    message, cut = choice.message, finish_reason(choice) == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        output.append({"id": identifier("rs"), "type": "reasoning", "summary": [], "content": [part]})
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        logprobs = logprob_content(choice)["content"] if ask.logprobs else []
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": logprobs}
        head = {"id": identifier("msg"), "type": "message", "role": "assistant", "status": status}
        output.append(head | {"content": [part]})
    for call in calls:
        head = {"id": identifier("fc"), "type": "function_call", "call_id": call["id"], "status": "completed"}
        output.append(head | call["function"])
    size, sampled = int(choice.prompt_ids.size), int(choice.generation.token_ids.size)
    return {
        "id": identifier("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        # If `ask.tools` is None, the row of the episode's prompt may have tools.
        "tool_choice": "auto" if ask.tools or ask.tools is None else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in ask.tools or ()],
        "temperature": ask.sampling.temperature,
        "top_p": ask.sampling.top_p,
        "instructions": None,
        "metadata": {},
        "usage": {
            "input_tokens": size,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": size + sampled,
        },
        **tokens_of(ask, choice),
    }


def responses_events(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> Iterator[bytes]:
    """The answer as a stream of events, with one delta event for each part."""
    reply = responses_reply(ask, choices, model)
    begun = reply | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    for number, (name, fields) in enumerate(
        [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            *(each for index, item in enumerate(reply["output"]) for each in _item_events(index, item)),
            (f"response.{reply['status']}", {"response": reply}),
        ]
    ):
        yield event({"type": name, "sequence_number": number, **fields}, name)


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield "response.output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", at | {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", at | {"arguments": item["arguments"], "name": item["name"]}
    else:
        [part] = item["content"]
        at |= {"content_index": 0}
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield "response.content_part.added", at | {"part": part | {"text": ""} | {key: [] for key in more}}
        yield f"response.{part['type']}.delta", at | {"delta": part["text"]} | more
        yield f"response.{part['type']}.done", at | {"text": part["text"]} | more
        yield "response.content_part.done", at | {"part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}
