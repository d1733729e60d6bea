"""Prompts as token ids: rendered by the chat template, once and in one place. Nothing of transformers at import time.

    a row's prompt --> messages (`read_prompt`) --> cleaned --> the template's text --> token ids

Only the template writes control tokens (`data.control_tokens`): what a message, a tool's output, a tool's schema or a template
argument says is text, whatever it looks like. What is rendered in a way that its author may not have meant is counted by row, and
said at the start (`PromptEncoder.notes`). The tokenizer is any object of the Hugging Face form.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.config.schema import DataConfig
from asyncrl.errors import DataError
from asyncrl.types import Int32Array, Messages

_OURS = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")
# Around the number of a control token that somebody wrote: private use, in no vocabulary.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PROBE = "Qk7"  # a text that no template writes
_STRFTIME = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

# What is said of rows that have it, behind "12 of 1,000 prompts ".
NOTES = {
    "rendered": (
        "hold the chat template's own control tokens and are tokenized as they stand, not rendered again; "
        "data.template=raw says so for all of them"
    ),
    "control": (
        "hold the text of a control token in a message, a tool or an argument: it is encoded as text "
        "(data.control_tokens=text makes control tokens of it)"
    ),
    "continued": (
        "end with a message of the assistant, which completions continue; where that is the answer, leave it out of the prompt"
    ),
    "tools": (
        "have a column `tools` that the chat template never reads, or that is no list of tool schemas: the model does not see it"
    ),
    "images": "have a column of images, audio or video: the model does not see it",
}
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def read_prompt(prompt: Any, config: DataConfig) -> Any:
    """The prompt of a row: messages that stand in a cell as JSON text are messages, unless `data.template` is raw."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str) or config.template == "raw" or not prompt.lstrip().startswith("["):
        return prompt
    try:
        found = json.loads(prompt)
    except ValueError:
        return prompt
    return found if found and isinstance(found, list) and all(map(_is_message, found)) else prompt


def without_nulls(value: Any) -> Any:
    """Lists of mappings (messages, tool schemas) without the keys whose value is None, at every depth: Arrow gives every mapping
    of a column the keys of all. Anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return _dropped(value)
    return value


def _dropped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _dropped(each) for key, each in value.items() if each is not None}
    return [_dropped(each) for each in value] if isinstance(value, list) else value


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text in which nothing is a control token, whatever it looks like: of a tool's output. No special tokens are
    added."""
    control = _pattern(_control_tokens(tokenizer, _template_of(tokenizer)))
    return _encode_pieces(tokenizer, re.split(f"({control.pattern})", text))


class PromptEncoder:
    """Renders and tokenizes the prompts of a run. `notes` counts rows by the names of `NOTES`."""

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self.notes: Counter[str] = Counter()
        self._renders = getattr(tokenizer, "chat_template", None) is not None
        self._template = _template_of(tokenizer)
        self._words = set(re.findall(r"\w+", self._template))
        self._special: re.Pattern[str] | None = None  # texts of special tokens
        # Of those, and of other added tokens that the template writes.
        self._control: re.Pattern[str] | None = None
        # Whether the template shows content that is a text; a list of parts.
        self._forms: tuple[bool, bool] | None = None
        # What renderings begin with, BOS and the control token behind it.
        self._openings: set[str] | None = None
        self._before: list[int] | None = None  # what the tokenizer puts before a text

    @property
    def warnings(self) -> list[str]:
        """What is known of the template itself."""
        if "strftime_now" not in self._words and not re.search(r"\bnow\(", self._template):
            return []
        return [
            "the chat template writes the date of the day: prompts change from one day to the next; to keep them set data.date "
            f"(here {self._day}; a run that is resumed keeps its own)"
        ]

    @property
    def _day(self) -> datetime.date:
        return datetime.date.fromisoformat(self.config.date) if self.config.date else datetime.date.today()

    def encode(self, prompt: Any, columns: Mapping[str, Any] | None = None) -> Int32Array:
        """Token ids [P]. `columns`: the row, whose `tools` and `chat_template_kwargs` go to the template.

        Errors: `DataError` for an empty or malformed prompt, for what the settings ask for and the tokenizer does not have, and
        with the template's own complaint.
        """
        prompt = read_prompt(prompt, self.config)
        check_prompt(prompt)
        columns = columns or {}
        self.notes["images"] += any(columns.get(name) is not None for name in _MEDIA)
        if isinstance(prompt, str) and self._is_plain(prompt):
            ids = self._encode_raw(prompt)
        else:
            ids = self._encode_messages(self._messages(prompt), self._arguments(columns))
        if len(ids) == 0:
            raise DataError("the prompt has no tokens")
        return np.asarray(ids, dtype=np.int32)

    # -- text as it stands -------------------------------------------------------------------------------------------

    def _is_plain(self, prompt: str) -> bool:
        """Whether the text is tokenized as it stands, and not as a user's message."""
        config = self.config
        if config.template == "chat" and not self._renders:
            raise DataError("data.template is chat but the tokenizer has no chat template; use data.template=raw")
        if config.template != "raw" and self._renders:
            if not self._is_rendered(prompt):
                return False
            self.notes["rendered"] += 1
        for name, value in (
            ("system_prompt", config.system_prompt),
            ("chat_template_kwargs", config.chat_template_kwargs),
        ):
            if value is not None and value != {}:
                raise DataError(
                    f"data.{name} is set but the prompt is plain text without a chat template, or was rendered before; "
                    "leave it out, or give messages to a tokenizer with a template, with data.template=chat"
                )
        return True

    def _is_rendered(self, prompt: str) -> bool:
        """It holds control tokens, and begins as the template's own renderings do. (What ends like one may be a user's text.)"""
        control = self._controls(user=False)
        if not control.search(prompt):
            return False
        if self._openings is None:
            self._openings = set()
            user = {"role": "user", "content": self._content(_PROBE)}
            for messages in ([user], [{**user, "role": "system"}, user]):
                try:
                    text = self._render(messages, self.config.chat_template_kwargs)
                except DataError:  # of a template that wants other messages
                    continue
                if self._bos and text.startswith(self._bos):
                    self._openings.add(self._bos)
                    text = text.removeprefix(self._bos)
                first = control.match(text.lstrip())
                self._openings.add(first[0] if first else (text.partition(_PROBE)[0].split() or [""])[0])
            self._openings.discard("")
        return prompt.lstrip().startswith(tuple(self._openings))

    @property
    def _bos(self) -> str:
        return getattr(self._tokenizer, "bos_token", None) or ""

    def _encode_raw(self, text: str) -> list[int]:
        """With the template's BOS where the text was rendered, else with what the tokenizer puts before a text, once; without
        what it puts behind (EOS)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        if self._openings is not None:
            lacks = self._bos in self._openings and not text.lstrip().startswith(self._bos)
            return [self._tokenizer.bos_token_id, *ids] if lacks else ids
        if self._before is None:
            bare, full = (self._tokenizer.encode(_PROBE, add_special_tokens=added) for added in (False, True))
            fits = [n for n in range(len(full)) if full[n : n + len(bare)] == bare]
            self._before = full[: fits[0]] if fits else []
        return ids if ids[: len(self._before)] == self._before else self._before + ids

    # -- conversations -----------------------------------------------------------------------------------------------

    def _messages(self, prompt: str | Messages) -> Messages:
        """What the template renders. A system prompt goes before every conversation that does not begin with its own."""
        config = self.config
        if isinstance(prompt, str):
            messages: Messages = [{"role": "user", "content": prompt}]
        else:
            if config.template == "raw":
                raise DataError(
                    "the prompt is a list of messages but data.template is raw; use data.template=chat or auto"
                )
            if not self._renders:
                raise DataError("the prompt is a list of messages but the tokenizer has no chat template to render it")
            messages = [_cleaned(message) for message in prompt]
        if config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        self.notes["continued"] += messages[-1]["role"] == "assistant"
        for message in messages:
            if "content" in message:
                message["content"] = self._content(message["content"])
        return messages

    def _content(self, content: str | list[Any]) -> str | list[Any]:
        """In the form that the template shows: a text, or a list of parts."""
        if self._forms is None:
            self._forms = self._shows(_PROBE), self._shows([{"type": "text", "text": _PROBE}])
        texts, parts = self._forms
        if isinstance(content, str):
            return content if texts or not parts else [{"type": "text", "text": content}]
        text = "".join(part["text"] for part in content)
        if parts and self.config.control_tokens == "template" and self._controls(user=True).search(text):
            return [{"type": "text", "text": text}]  # a control token may begin in one part and end in the next
        return content if parts else text

    def _shows(self, content: Any) -> bool:
        try:
            shown = self._render([{"role": "user", "content": content}], {})
        except DataError:
            return False
        # A template that prints a list shows Python's form of it.
        return _PROBE in shown and f"'{_PROBE}'" not in shown and f'"{_PROBE}"' not in shown

    def _arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Of the template, beside the messages: the configuration's, the row's `chat_template_kwargs`, the row's `tools`."""
        arguments = dict(self.config.chat_template_kwargs)
        for name in arguments:
            self._check_argument(name, "data.chat_template_kwargs has")
        own = _parsed(columns.get("chat_template_kwargs"))
        if own and not isinstance(own, Mapping):
            raise DataError(f"the row's chat_template_kwargs are {own!r:.80}; expected a mapping of arguments")
        if own:
            own = {name: value for name, value in own.items() if value is not None}
            for name in own:
                self._check_argument(name, "the row's chat_template_kwargs has")
            arguments |= own
        tools = columns.get("tools")
        if tools is not None and "tools" not in (own or {}):
            schemas = _tool_schemas(tools)
            if schemas is None or "tools" not in self._words:
                self.notes["tools"] += 1
            elif schemas:
                arguments["tools"] = schemas
        return arguments

    def _check_argument(self, name: str, where: str) -> None:
        if name in _OURS:
            raise DataError(f"{where} {name!r}, which is set for every prompt; leave it out")
        if name not in self._words:
            near = difflib.get_close_matches(name, sorted(self._words), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"{where} {name!r}, which the chat template never reads{hint}")

    def _render(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """The text before the first sampled token. A last message of the assistant is continued, not closed."""
        continued = messages[-1]["role"] == "assistant"
        options = {**arguments, "continue_final_message" if continued else "add_generation_prompt": True}
        try:
            if "strftime_now" in self._words:
                template = self._tokenizer.get_chat_template(tools=arguments.get("tools"))
                day = self._day
                options["chat_template"] = _STRFTIME.sub(lambda found: json.dumps(day.strftime(found[2])), template)
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:
            # jinja's errors, and whatever a template raises by raise_exception().
            raise DataError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from error

    def _encode_messages(self, messages: Messages, arguments: Mapping[str, Any]) -> list[int]:
        written: list[str] = []  # texts of control tokens that are no control tokens

        def mark(value: Any, control: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return control.sub(numbered, value)
            if isinstance(value, Mapping):
                return {mark(key, control): mark(each, control) for key, each in value.items()}
            return [mark(each, control) for each in value] if isinstance(value, (list, tuple)) else value

        def numbered(found: re.Match[str]) -> str:
            written.append(found.group(0))
            return f"{_OPEN}{len(written) - 1}{_CLOSE}"

        if self.config.control_tokens == "template":
            # The assistant's own turns may hold what it is trained to write, such as <think> and <tool_call>.
            messages = [mark(message, self._controls(message["role"] != "assistant")) for message in messages]
            arguments = mark(arguments, self._controls(user=True))
        text = self._render_calls(messages, arguments)
        pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", text)
        pieces[1::2] = [written[int(number)] for number in pieces[1::2]]
        self.notes["control"] += bool(written)
        return _encode_pieces(self._tokenizer, pieces)

    def _render_calls(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """Arguments of tool calls as a mapping, as templates expect them; where that fails as JSON text, which others join."""
        try:
            return self._render(messages, arguments)
        except DataError:
            as_text = [
                _with_calls(message, lambda each: each if isinstance(each, str) else json.dumps(each))
                for message in messages
            ]
            if as_text == messages:
                raise
        return self._render(as_text, arguments)

    def _controls(self, user: bool) -> re.Pattern[str]:
        """What finds control tokens in a text; `user`: in one that the model did not write."""
        if self._special is None or self._control is None:
            self._special = _pattern(_control_tokens(self._tokenizer, ""))
            self._control = _pattern(_control_tokens(self._tokenizer, self._template))
        return self._control if user else self._special


def encode_prompt(
    prompt: Any, config: DataConfig, tokenizer: Any, columns: Mapping[str, Any] | None = None
) -> Int32Array:
    """One prompt alone: see `PromptEncoder.encode`."""
    check_unicode([prompt, columns], "the prompt or one of its columns")
    return PromptEncoder(tokenizer, config).encode(prompt, columns)


def check_unicode(value: Any, where: str) -> None:
    """Errors: `DataError` for a text with half of a surrogate pair, at any depth: JSON can write one, UTF-8 cannot."""
    if isinstance(value, str):
        if not value.isascii() and (half := re.search("[\ud800-\udfff]", value)):
            raise DataError(f"{where} holds {half[0]!a}, half of a surrogate pair, which is no text; mend or remove it")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            check_unicode(key, where)
            check_unicode(each, where)
    elif isinstance(value, (list, tuple)):
        for each in value:
            check_unicode(each, where)


def check_prompt(prompt: Any) -> None:
    """Errors: `DataError` unless it is a non-empty string or a non-empty list of {"role": ..., "content": ...} with text."""
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is an empty string")
        return
    if not isinstance(prompt, Sequence):
        raise DataError(f"the prompt is {type(prompt).__name__}; expected a string or a list of messages")
    if not prompt:
        raise DataError("the prompt is an empty list of messages")
    for number, message in enumerate(prompt, start=1):
        if not _is_message(message):
            raise DataError(
                f'message {number} of the prompt is {message!r:.80}; expected {{"role": ..., "content": ...}}'
            )
        _check_content(message, f"message {number} of the prompt")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and ("content" in value or "tool_calls" in value)
    )


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        found = "null, and it has no tool_calls" if content is None else f"{type(content).__name__} {content!r:.60}"
        raise DataError(f"the content of {where} is {found}; expected a text, or a list of text parts")
    for part in content:
        if isinstance(part, str):
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f'the content of {where} has a part of type {kind!r}; expected {{"type": "text", "text": ...}}: models are '
                "trained on text alone"
            )


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that say nothing; parts that are texts as parts; arguments of tool calls as the mappings that they are."""
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "text", "text": part["text"]}
            for part in kept["content"]
        ]
    return _with_calls(kept, _parsed)


def _with_calls(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls changed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": change(function["arguments"])}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    found = _json(arguments)
    return found if isinstance(found, dict) else arguments


def _tool_schemas(tools: Any) -> list[Any] | None:
    """A row's tools as the template takes them; None where they are something else."""
    if isinstance(tools, str):
        tools = _json(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return None
    return list(tools)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _template_of(tokenizer: Any) -> str:
    """The text of its chat template; of several by name (that for tools is used where tools are given) of all."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return " ".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _encode_pieces(tokenizer: Any, pieces: Sequence[str]) -> list[int]:
    """[text, text of a control token, text, ...]: every second piece is encoded as if it were none."""
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if not piece:
            continue
        if number % 2 == 0:
            ids += _encode_inside(tokenizer, piece, bool(ids))
            continue
        found = _encode_inside(tokenizer, piece, bool(ids), split_special_tokens=True)
        if tokenizer.convert_tokens_to_ids(piece) in found:  # an added token that is not special is found all the same
            found = _encode_inside(tokenizer, piece[:1], bool(ids)) + _encode_inside(tokenizer, piece[1:], True)
        ids += found
    return ids


def _encode_inside(tokenizer: Any, text: str, inside: bool, **options: bool) -> list[int]:
    """Inside a text it is encoded behind a line break, which is taken away again: SentencePiece puts a space before what begins."""
    if inside:
        line = tokenizer.encode("\n", add_special_tokens=False)
        ids: list[int] = tokenizer.encode("\n" + text, add_special_tokens=False, **options)
        if ids[: len(line)] == line:
            return ids[len(line) :]
    return list(tokenizer.encode(text, add_special_tokens=False, **options))


def _control_tokens(tokenizer: Any, template: str) -> list[str]:
    """Texts of the special tokens, and of other added tokens that stand in `template`."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = dict.fromkeys(getattr(tokenizer, "all_special_tokens", ()))
    for token in added:
        text = str(getattr(token, "content", token))
        if getattr(token, "special", False) or (text in template and not text.isspace()):
            found[text] = None
    return [text for text in found if text]


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
