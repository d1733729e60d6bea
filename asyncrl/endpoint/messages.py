"""Anthropic's Messages API: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from asyncrl.types import ChatAnswer, Messages, SamplingParams

from .parameters import (
    TOOL_CHOICE,
    Body,
    Closed,
    Loose,
    OnlyFalse,
    SampleRequest,
    Stop,
    Text,
    TextPart,
    ToolName,
    as_tools,
    joined,
    refused,
)
from .replies import event, finish_reason, identifier, tokens_of


class _ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: str


class _UseBlock(Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ResultBlock(Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[Text | None]


Block = Annotated[TextPart | _ThinkingBlock | _UseBlock | _ResultBlock, Field(discriminator="type")]


class _AnthropicMessage(Loose):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class _AnthropicTool(Loose):
    type: NotRequired[Literal["custom"] | None]
    name: ToolName
    description: NotRequired[str | None]
    input_schema: dict[str, Any]


class _AnthropicChoice(Closed):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: NotRequired[OnlyFalse | None]


class _NoThinking(Closed):
    type: Literal["disabled"]


class MessagesBody(Body):
    """Parameters of `POST /v1/messages`."""

    messages: Annotated[list[_AnthropicMessage], Field(min_length=1)]
    max_tokens: int = Field(
        ge=1, le=1 << 30, description="At most this many tokens, and never more than rollout.max_tokens."
    )
    system: Text | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _AnthropicChoice | None = TOOL_CHOICE
    thinking: _NoThinking | None = Field(
        None, description="Not supported: set data.chat_template_kwargs of the run, as its template needs."
    )
    context_management: None = refused("Not supported: the context is never edited.")
    container: None = refused("Not supported. Leave it out.")
    mcp_servers: None = refused("Not supported: pass the tools in `tools`.")
    output_config: None = refused("Not supported: no grammar constrains the tokens. Leave it out.")

    def ask(self, defaults: SamplingParams) -> SampleRequest:
        system = joined(self.system or "")
        start: Messages = [{"role": "system", "content": system}] if system else []
        tools: Any = [] if self.tool_choice and self.tool_choice["type"] == "none" else self.tools
        functions = tools and [
            {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
            for tool in tools
        ]
        given = {"max_tokens": self.max_tokens, "stop": self.stop_sequences and tuple(self.stop_sequences)}
        messages = start + [each for message in self.messages for each in _messages(message)]
        return self._ask(defaults, given, messages=messages, tools=as_tools(functions))


def _messages(message: _AnthropicMessage) -> Iterator[dict[str, Any]]:
    """One message of Anthropic's form as messages of OpenAI's form. Each result of a tool becomes a message of its own."""
    content: Any = message["content"]
    if isinstance(content, str):
        yield {"role": message["role"], "content": content}
        return
    text = joined([block for block in content if block["type"] == "text"])
    results = [block for block in content if block["type"] == "tool_result"]
    for block in results:
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": joined(block.get("content") or "")}
    used = [block for block in content if block["type"] == "tool_use"]
    functions = [{"name": block["name"], "arguments": json.dumps(block["input"])} for block in used]
    calls = [
        {"id": block["id"], "type": "function", "function": function}
        for block, function in zip(used, functions, strict=True)
    ]
    thinking = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    if text or calls or thinking or not results:
        rest: dict[str, Any] = {"role": message["role"], "content": text}
        yield rest | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thinking} if thinking else {})


def messages_reply(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    """The answer as the object `message`."""
    [choice] = choices
    message = choice.message
    content: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thinking, "signature": ""})
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        content.append({"type": "text", "text": message.get("content") or "", "citations": None})
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    stop = choice.generation.stop
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish_reason(choice), "end_turn")
    return {
        "id": identifier("msg"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "stop_sequence" if stop is not None and reason == "end_turn" else reason,
        "stop_sequence": stop if reason == "end_turn" else None,
        "usage": {"input_tokens": choice.prompt_ids.size, "output_tokens": choice.generation.token_ids.size},
        **tokens_of(ask, choice),
    }


def messages_events(ask: SampleRequest, choices: Sequence[ChatAnswer], model: str) -> Iterator[bytes]:
    """The answer as a stream of events, with one delta event for each block."""
    reply = messages_reply(ask, choices, model)
    begun = reply | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(reply["content"]):
        kind = block["type"]
        key, delta = "text", {"type": "text_delta", "text": block.get("text")}
        if kind == "thinking":
            key, delta = "thinking", {"type": "thinking_delta", "thinking": block["thinking"]}
        elif kind == "tool_use":
            key, delta = "input", {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        empty: Any = {} if kind == "tool_use" else ""
        start = {"type": "content_block_start", "index": index, "content_block": block | {key: empty}}
        yield event(start, "content_block_start")
        yield event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
    end = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
    yield event({"type": "message_delta", "delta": end, "usage": reply["usage"]}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")
