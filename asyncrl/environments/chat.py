"""`Chat` converts conversations to token ids, and sampled ids to messages, with the tokenizer and the chat template of a run.

    first request   messages ── template ──▶ text ──▶ ids
    next request    ids of the last request ‖ its sampled ids ‖ ids of the template's text for the new messages alone
    reply           sampled ids ──▶ text ──▶ content, reasoning_content, tool_calls

A reply is not tokenized again. To find the ids of new messages, the template renders the whole conversation with a mark in place of
the last reply. Only the text after the mark is tokenized, and its ids are appended to the sampled ids. If the template now writes
the earlier messages differently, `Chat.extend` returns None, and the session renders and tokenizes the whole conversation.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config.schema import DataConfig
from asyncrl.data.texts import CompletionText, decode, special_ids
from asyncrl.data.tokenizing import (
    NOTES,
    PromptEncoder,
    check_prompt,
    check_unicode,
    decode_mapping,
    encode_text,
    without_nulls,
)
from asyncrl.errors import DataError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, Int32Array, Messages

from .calls import name_of, read_calls

# Limit of `Chat._of_rows`. A new chat takes about 0.1 s with a large vocabulary.
_MOST_ROW_CHATS = 64
# The marks in place of a reply's content and reasoning: private-use characters of Unicode, which no template writes.
_CONTENT, _REASONING = "\ue002", "\ue003"
# How many characters at the end of a text are searched for an empty thinking block.
_TAIL = 100
# An empty thinking block, closed or not. A template may write it before a reply in one request and omit it in the next request.
_EMPTY_THINKING = re.compile(r"\s*(<(think|thinking)>\s*(</\2>\s*)?)?\Z")
_THINKING = re.compile(r"\s*<(think|thinking)>(.*?)(?:</\1>|\Z)(.*)", re.DOTALL)
# A thinking tag that is not closed: the prompt ends within the thinking block.
_OPEN_THINKING = re.compile(r"<(think|thinking)>(?!.*</\1>)", re.DOTALL)
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
logger = logging.getLogger("asyncrl.environments")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One request of a conversation and its reply."""

    messages: Messages  # of the request, as `normalise` returns them
    tools: list[Any]
    prompt_ids: Int32Array  # [P] before the first token of the reply
    # The whole reply. If this request continued an earlier reply, `generation.token_ids` begins with the ids of that reply.
    generation: Generation
    reply: dict[str, Any]


class Chat:
    """The chat template of a run. Its methods are synchronous. A call takes milliseconds; `of_row` takes 0.1 s for new columns."""

    def __init__(self, tokenizer: Any, config: DataConfig | None = None, *, recorder: Recorder | None = None) -> None:
        self.tokenizer = tokenizer
        self._config = config or DataConfig()
        self._encoder = PromptEncoder(tokenizer, self._config)
        self._arguments = dict(self._config.chat_template_kwargs)
        # Schemas of tools for requests without tools of their own.
        self.tools: list[Any] = list(self._arguments.pop("tools", None) or ())
        # Makes the text of a reply, without the stop token or stop string that ended it.
        self.text = CompletionText(tokenizer, stop=False, arguments=self._arguments)
        self._special = special_ids(tokenizer)
        self.has_template = getattr(tokenizer, "chat_template", None) is not None and self._config.template != "raw"
        self._recorder = recorder
        self._logged: set[str] = set()
        self._of_rows: dict[str, Chat] = {}  # copies, by the columns that `of_row` reads
        words = set(re.findall(r"\w+", str(getattr(tokenizer, "chat_template", None) or "")))
        self._template_has_tools, self._template_has_calls = "tools" in words, "tool_calls" in words
        self._reasoning_key = next((key for key in ("reasoning_content", "thinking") if key in words), None)

    def of_row(self, columns: Mapping[str, Any]) -> Chat:
        """The chat for the episodes of one row. A column `chat_template_kwargs` or `tools` of the row overrides
        `data.chat_template_kwargs`. Returns `self` for a row without these columns. Errors: `DataError`."""
        given = {name: columns[name] for name in ("chat_template_kwargs", "tools") if columns.get(name) is not None}
        if not given:
            return self
        if (key := repr(given)) not in self._of_rows:
            arguments = self._encoder.arguments(given)
            tools = arguments.pop("tools", None)
            if given.get("tools") and not tools and "column" not in self._logged:
                self._logged.add("column")
                logger.warning("a row has a column `tools` that %s", NOTES["tools"].partition("`tools` that ")[2])
            chat = self._of_rows[key] = copy.copy(self)
            chat._arguments, chat.tools = arguments, list(tools or ())
            if arguments != self._arguments:
                chat.text = CompletionText(self.tokenizer, stop=False, arguments=arguments)
            if len(self._of_rows) > _MOST_ROW_CHATS:
                del self._of_rows[next(iter(self._of_rows))]
        return self._of_rows[key]

    def encode(self, text: str) -> Int32Array:
        """Token ids [P] of a text. Control tokens in the text are encoded as plain text."""
        return np.array(encode_text(self.tokenizer, text), np.int32)

    def decode(self, ids: Int32Array) -> str:
        """The text of token ids, with control tokens."""
        return decode(self.tokenizer, ids.tolist())

    def render(self, messages: Messages, tools: Sequence[Any] = ()) -> Int32Array:
        """The prompt [P] for a conversation that `normalise` returned.

        If the last message is the assistant's, the reply continues this message. Errors: `DataError`."""
        return np.array(self._encoder.tokenize(self._render(messages, tools)), np.int32)

    def extend(self, last: RecordedTurn, messages: Messages, tools: Sequence[Any] = ()) -> Int32Array | None:
        """The prompt [P] for a conversation that begins with `last`: the tokens of `last`, then those of the new messages.

        `messages`: the whole conversation. Returns None if the template refuses `last` or alters its text. Errors: `DataError`."""
        ids, recorded = last.generation.token_ids, len(last.messages) + 1
        ended = self.has_ended(last.generation)
        if recorded == len(messages):
            # The new reply continues the reply of `last`, whose end token is left out.
            return np.concatenate([last.prompt_ids, ids[: ids.size - ended]]).astype(np.int32)
        before = self._render(last.messages, last.tools)
        for marked in self._marked(last.reply, ended):
            try:
                text = self._render([*messages[: recorded - 1], marked, *messages[recorded:]], tools, strict=True)
            except DataError:
                # The template refuses this form of the reply. For example, results of tools follow, but the form has no calls.
                continue
            marks = sorted((mark for mark in (_CONTENT, _REASONING) if mark in text), key=text.index)
            if (
                not marks
                or any(text.count(mark) > 1 for mark in marks)
                or (marked["content"] and _CONTENT not in marks)
            ):
                continue
            # The template leaves out the reasoning of earlier replies, but the sampled tokens contain it.
            if "reasoning_content" in marked and _REASONING not in marks:
                return None
            # The text before the marks must begin with `before`. If the reply has no reasoning, empty thinking blocks may differ.
            start = text.index(marks[0])
            is_bare = "reasoning_content" not in marked
            equal = is_bare and _without_thinking(text[:start]) == _without_thinking(before)
            if not equal and not text[:start].startswith(before):
                return None
            # A reply that was cut off within its reasoning also gets the text that the template writes after the reasoning.
            cut = (
                not ended and marks[0] == _REASONING and not last.reply["content"] and not last.reply.get("tool_calls")
            )
            after = text.partition(marks[0] if cut else marks[-1])[2].replace(_CONTENT, "")
            if ended:
                after = self._after_end(after, int(ids[-1]))
            tail = self._encoder.tokenize(after, inside=True)
            return np.concatenate([last.prompt_ids, ids, np.array(tail, np.int32)]).astype(np.int32)
        return None

    def parse(
        self, prompt_ids: Int32Array, generation: Generation, tools: Sequence[Any] = (), *, call_id: str = "c000000"
    ) -> dict[str, Any]:
        """The reply as a message of OpenAI's form. Arguments of tool calls are JSON texts.

        An unreadable call stays in `content` and is counted. Without `tools` no calls are read. `call_id`: prefix of call ids."""
        text = self.text(generation)
        opening = self.text.opening(prompt_ids) if self._reasoning_key or "<think" in self.text.turn.opening else ""
        message: dict[str, Any] = {"role": "assistant"}
        if thought := _THINKING.fullmatch(f"<think>{text}" if _OPEN_THINKING.search(opening) else text):
            message["reasoning_content"], text = thought[2].strip(), thought[3]
        calls: list[tuple[str, str]] = []
        if tools:
            self._check_calls(tools)
            thinking, text, calls, unread = read_calls(text, tools)
            if thinking:
                message["reasoning_content"] = thinking
            if unread and self._recorder is not None:
                self._recorder.count("rollout/unreadable_calls", unread)
        message["content"] = text.strip() if calls or thought else text
        if calls:
            message["tool_calls"] = [
                {"id": f"{call_id}{number:02d}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(calls)
            ]
        return message

    def count_fork(self, cause: str) -> None:
        """Count a conversation that is rendered again from its beginning. Log the first conversation of each cause (`_FORKS`)."""
        if self._recorder is not None:
            self._recorder.count(f"rollout/forks/{cause}")
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning("a conversation is rendered again from its beginning: %s", _FORKS[cause])

    def _check_calls(self, tools: Sequence[Any]) -> None:
        """Warn, once for a run, if `read_calls` cannot read the form in which the template writes tool calls."""
        if "calls" in self._logged:
            return
        self._logged.add("calls")
        call = {"id": "c00000000", "type": "function", "function": {"name": name_of(tools[0]), "arguments": {"a": "b"}}}
        talk: Messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "content": _CONTENT, "tool_call_id": call["id"], "name": name_of(tools[0])}
        try:
            before, whole = self._render(talk[:1], tools), self._render([*talk, result], tools)
        except DataError:
            return
        text = whole[len(os.path.commonprefix([before, whole])) :].partition(_CONTENT)[0]  # noqa: RUF071 - no paths
        texts = [self.tokenizer.convert_ids_to_tokens(each) for each in self._special]
        ends = [match.start() for match in re.finditer("|".join(map(re.escape, texts)) or "(?!)", text)]
        if not any(read_calls(text[:end], tools)[2] for end in [*ends, len(text)]):
            logger.warning(
                "the chat template writes calls of tools as %r, which asyncrl cannot read: calls stay in the text of the reply",
                text[:200],
            )

    def has_ended(self, generation: Generation) -> bool:
        """Whether a special token ended the reply. It is then the last token of the reply."""
        ids = generation.token_ids
        stopped = generation.finish_reason is FinishReason.STOP and generation.stop is None
        return bool(stopped and ids.size and int(ids[-1]) in self._special)

    def _after_end(self, text: str, end: int) -> str:
        """The text after the token `end`. If `text` lacks `end`: after its first control token. If it has none: `text`."""
        for token in (self.tokenizer.convert_ids_to_tokens(end), None):
            texts = [token] if token else [self.tokenizer.convert_ids_to_tokens(each) for each in self._special]
            found = re.search("|".join(re.escape(each) for each in sorted(texts, key=len, reverse=True)), text)
            if found is not None:
                return text[found.end() :]
        return text

    def _marked(self, reply: Mapping[str, Any], ended: bool) -> list[dict[str, Any]]:
        """Forms of the reply with marks, to be tried in this order. If the reply has not `ended`, its calls are left out:
        `extend` drops the text of calls, up to the end token, which such a reply lacks."""
        marked: dict[str, Any] = {"role": "assistant", "content": _CONTENT}
        if reply.get("reasoning_content"):
            marked["reasoning_content"] = _REASONING
        calls = {"tool_calls": reply.get("tool_calls")}
        if not calls["tool_calls"] or not ended:
            return [marked]
        # Some templates refuse calls with both content and reasoning, or leave out the content of a reply with calls.
        thought = [{**marked, "content": "", **calls}] if "reasoning_content" in marked else []
        return [{**marked, **calls}, *thought, marked]

    def _render(self, messages: Messages, tools: Sequence[Any], *, strict: bool = False) -> str:
        """The text of a conversation. If the template refuses the calls (some templates refuse two calls in one reply), the calls
        are written as text. `strict`: raise DataError instead."""
        try:
            return self._text_of(messages, tools, self._template_has_calls)
        except DataError as error:
            if strict or not self._template_has_calls or not any("tool_calls" in message for message in messages):
                raise
            refusal = error
        try:
            return self._text_of(messages, tools, False)
        except DataError:
            raise refusal from None

    def _text_of(self, messages: Messages, tools: Sequence[Any], native_calls: bool) -> str:
        written: Messages = []
        for message in messages:
            message = self._for_template(message, native_calls)
            # Some templates require that user and assistant alternate, so consecutive results become one message of the user.
            if message["role"] == "tool" and not native_calls:
                message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
                if (
                    written
                    and written[-1].get("content", "").endswith("</tool_response>")
                    and written[-1]["role"] == "user"
                ):
                    message["content"] = written.pop()["content"] + "\n" + message["content"]
            written.append(message)
        arguments = dict(self._arguments)
        if tools and self._template_has_tools:
            arguments["tools"] = list(tools)
        elif tools:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = written.pop(0)["content"] if written[0]["role"] == "system" else self._config.system_prompt
            written.insert(0, {"role": "system", "content": (f"{system}\n\n" if system else "") + _TOOLS.format(lines)})
        return self._encoder.render(self._encoder.messages(written), arguments)

    def _for_template(self, message: dict[str, Any], native_calls: bool) -> dict[str, Any]:
        """The message with the keys that the template reads. If `native_calls` is False, calls become text in Hermes' format."""
        message = dict(message)
        reasoning = message.pop("reasoning_content", None)
        if reasoning is not None and self._reasoning_key is not None:
            message[self._reasoning_key] = reasoning
        elif reasoning:
            message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
        if not native_calls:
            calls = message.pop("tool_calls", ())
            texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
            message["content"] = "\n".join(filter(None, [message["content"], *texts]))
        return message


_FORKS = {
    "messages": "an earlier message was changed or left out; replies to the unchanged messages are trained in their own branch",
    "tools": "the tools of the conversation were changed",
    "template": (
        "the chat template writes earlier messages differently after new ones (such as without their thinking); "
        "earlier replies are trained in their own branch. Some templates have an argument that keeps the thinking, such as "
        "preserve_thinking: set it in data.chat_template_kwargs"
    ),
}
_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def normalise(messages: Any) -> Messages:
    """Brings the messages of any client into one form: content is a text, arguments of calls are mappings if they can be read, and
    null keys are left out. Errors: `DataError` for a value that is not a message, and for a part of a content that is not text."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable):
        raise DataError(f"the messages are {messages!r:.80}; expected a list of messages, or a string")
    # Messages that a client library returned are pydantic models.
    plain = [m.model_dump(exclude_none=True) if hasattr(m, "model_dump") else m for m in messages]
    filled = [{**m, "content": ""} if isinstance(m, Mapping) and m.get("content") is None else m for m in plain]
    check_prompt(filled)
    check_unicode(filled, "a message")
    return [_normal(message) for message in filled]


def normalise_tools(tools: Any) -> list[Any]:
    """Schemas of tools without null values. Errors: `DataError` if a tool has no name."""
    found = without_nulls([t.model_dump(exclude_none=True) if hasattr(t, "model_dump") else t for t in tools or ()])
    for tool in found:
        function = (tool.get("function") or tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f'a tool is {tool!r:.80}; expected {{"type": "function", "function": {{"name": ...}}}}')
    return list(found)


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: message[key] for key in _KEYS if message.get(key) is not None}
    if isinstance(reasoning := message.get("reasoning"), str):
        kept.setdefault("reasoning_content", reasoning)
    if kept["role"] == "developer":
        kept["role"] = "system"
    if not isinstance(kept["content"], str):
        kept["content"] = "".join(part if isinstance(part, str) else part["text"] for part in kept["content"])
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
        return kept
    calls = []
    written = kept["tool_calls"] if isinstance(kept["tool_calls"], Sequence) else [kept["tool_calls"]]
    for call in written:
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f'a tool call is {call!r:.80}; expected {{"function": {{"name": ..., "arguments": ...}}}}')
        function = {"name": function["name"], "arguments": decode_mapping(function.get("arguments") or {})}
        calls.append({**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": function})
    return {**kept, "tool_calls": calls}


def _without_thinking(text: str) -> str:
    """The text without trailing white space, and without an empty thinking block at its end."""
    return text[:-_TAIL] + _EMPTY_THINKING.sub("", text[-_TAIL:], count=1)


class ComparableMessages:
    """Messages in a form for comparisons. The ids of calls are ignored, and so is reasoning that a client left out."""

    def __init__(self, messages: Messages) -> None:
        self._keys = [(m["role"], m["content"].strip(), self._calls(m), m.get("name")) for m in messages]
        self._thoughts = [m.get("reasoning_content") for m in messages]

    def __len__(self) -> int:
        return len(self._keys)

    def is_beginning_of(self, other: ComparableMessages) -> bool:
        """Whether the messages of `other`, which a client sent, begin with these messages."""
        pairs = zip(self._thoughts, other._thoughts, strict=False)
        return self._keys == other._keys[: len(self)] and all(
            sent is None or sent.strip() == (kept or "").strip() for kept, sent in pairs
        )

    @staticmethod
    def _calls(message: Mapping[str, Any]) -> list[Any]:
        return [call["function"] for call in message.get("tool_calls", ())]
