"""Turns prompts into token ids with the tokenizer's chat template. Does not import transformers.

    prompt of a row --> messages (`read_prompt`) --> cleaned messages --> rendered text --> token ids

By default (`data.control_tokens`) only the template may write control tokens. Messages, tool outputs, tool schemas and template
arguments are then encoded as text, even if they contain the text of a control token. `PromptEncoder.notes` counts rows that are
probably not rendered as their author expects. A run prints these counts at its start.
The tokenizer is any object with the interface of a Hugging Face tokenizer.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from asyncrl.config.schema import DataConfig
from asyncrl.errors import DataError
from asyncrl.types import Int32Array, Messages

_RESERVED_ARGUMENTS = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")
# In a rendered text a number between these characters stands for a control token of a message. No vocabulary has these characters.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PROBE = "Qk7"  # a text that no template writes
_STRFTIME = re.compile(r"""strftime_now\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")

# Kind of note -> end of a sentence that begins with "12 of 1,000 prompts of SOURCE ".
NOTES = {
    "rendered": (
        "hold the chat template's own control tokens and are tokenized without the template; "
        "data.template=raw does so with all prompts"
    ),
    "control": (
        "hold the text of a control token in a message, a tool or an argument, which is encoded as text "
        "(with data.control_tokens=text, texts may write control tokens, too)"
    ),
    "continued": (
        "end with a message of the assistant, which completions continue; if this message is the answer, remove it"
    ),
    "tools": (
        "have a column `tools` that is no list of tool schemas or that the chat template never reads: the model does not get it"
    ),
    "images": "have a column of images, audio or video: the model gets the text alone",
}
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def read_prompt(prompt: Any, config: DataConfig) -> Any:
    """The prompt of a row. A JSON text of a list of messages is decoded, unless `data.template` is raw."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str) or config.template == "raw" or not prompt.lstrip().startswith("["):
        return prompt
    try:
        messages = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    return messages if messages and isinstance(messages, list) and all(map(_is_message, messages)) else prompt


def without_nulls(value: Any) -> Any:
    """A list of mappings (messages, tool schemas) without the keys whose value is None, at every depth.

    Arrow adds such keys: all mappings of a column get the same keys. A value of another type is returned unchanged."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return _drop_nulls(value)
    return value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, such as a tool's output. The text of a control token is encoded as plain text, not as the token."""
    control = _pattern(_control_tokens(tokenizer, _template_of(tokenizer)))
    return _encode_pieces(tokenizer, re.split(f"({control.pattern})", text))


class PromptEncoder:
    """Renders and tokenizes the prompts of a run. `notes` has a count of rows for each key of `NOTES`."""

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self.notes: Counter[str] = Counter()
        self._has_template = getattr(tokenizer, "chat_template", None) is not None
        self._template = _template_of(tokenizer)
        self._words = set(re.findall(r"\w+", self._template))
        # A conversation is rendered at each turn of an agent, so the same texts come again.
        self._cached_hide = lru_cache(maxsize=1024)(self._hide)
        self._hidden: dict[str, int] = {}  # text of a control token -> its number in rendered texts

    @property
    def warnings(self) -> list[str]:
        """Warnings about the chat template, for the user."""
        if "strftime_now" not in self._words:
            return []
        if "strftime_now(" in _STRFTIME.sub("", self._template):
            return [
                "the chat template writes the day on which it is rendered, in a form that data.date does not change"
            ]
        return [
            f"the chat template writes a date, so prompts depend on data.date (now {self._day}; without the setting the day on "
            "which a run starts, which a resumed run keeps)"
        ]

    @property
    def _day(self) -> datetime.date:
        return datetime.date.fromisoformat(self.config.date) if self.config.date else datetime.date.today()

    def encode(self, prompt: Any, columns: Mapping[str, Any] | None = None) -> Int32Array:
        """Token ids [P] of a prompt. `columns`: the row; the template gets its `tools` and `chat_template_kwargs`.

        Errors: `DataError` for an empty or malformed prompt, for an error of the template, and for settings that need a
        template if the tokenizer has none.
        """
        prompt = read_prompt(prompt, self.config)
        check_prompt(prompt)
        columns = columns or {}
        self.notes["images"] += any(columns.get(name) is not None for name in _MEDIA)
        if isinstance(prompt, str) and self._is_plain(prompt):
            ids = self._encode_raw(prompt)
        else:
            text = self.render(self.messages(prompt), self.arguments(columns))
            self.notes["control"] += _OPEN in text
            ids = self.tokenize(text)
        if len(ids) == 0:
            raise DataError("the prompt has no tokens; expected at least one")
        return np.asarray(ids, dtype=np.int32)

    def _is_plain(self, prompt: str) -> bool:
        """Whether to tokenize the text without the template. False: the text is a user's message. If the text was rendered
        before, `notes` counts it. Errors: `DataError` for settings that need a template."""
        config = self.config
        if config.template == "chat" and not self._has_template:
            raise DataError("data.template is chat but the tokenizer has no chat template; use data.template=raw")
        if config.template != "raw" and self._has_template:
            if not self._is_rendered(prompt):
                return False
            self.notes["rendered"] += 1
        for name in ("system_prompt", "chat_template_kwargs"):
            if getattr(config, name) not in (None, {}):
                raise DataError(
                    f"data.{name} is set but the prompt is plain text without a chat template, or was rendered before; "
                    f"remove data.{name}, or use prompts of messages, data.template=chat and a tokenizer with a template"
                )
        return True

    def _is_rendered(self, prompt: str) -> bool:
        """Whether the prompt is probably rendered already: it has special tokens and begins like a rendered conversation."""
        return bool(self._special.search(prompt)) and prompt.lstrip().startswith(tuple(self._openings))

    @cached_property
    def _openings(self) -> set[str]:
        """Texts with which rendered conversations begin: BOS, and the first special token or word after BOS."""
        openings = set()
        user = {"role": "user", "content": self._content(_PROBE)}
        for messages in ([user], [{**user, "role": "system"}, user]):
            try:
                text = self._render(messages, self.config.chat_template_kwargs)
            except DataError:  # some templates refuse a system message
                continue
            if self._bos and text.startswith(self._bos):
                openings.add(self._bos)
                text = text.removeprefix(self._bos)
            first_token = self._special.match(text.lstrip())
            words = text.partition(_PROBE)[0].split()
            openings.update([first_token[0]] if first_token else words[:1])
        return openings - {""}

    @property
    def _bos(self) -> str:
        return getattr(self._tokenizer, "bos_token", None) or ""

    def _encode_raw(self, text: str) -> list[int]:
        """Token ids, without EOS, of a text that is rendered already or needs no template. A missing BOS is added: to a rendered
        text if the template writes BOS, to any other text if the tokenizer adds BOS."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        # If there is a template, and data.template is not raw, only rendered texts come here.
        if self.config.template != "raw" and self._has_template:
            lacks_bos = self._bos in self._openings and not text.lstrip().startswith(self._bos)
            return [self._tokenizer.bos_token_id, *ids] if lacks_bos else ids
        return ids if ids[: len(self._leading_ids)] == self._leading_ids else self._leading_ids + ids

    @cached_property
    def _leading_ids(self) -> list[int]:
        """Ids that the tokenizer adds before a text."""
        bare = self._tokenizer.encode(_PROBE, add_special_tokens=False)
        full: list[int] = self._tokenizer.encode(_PROBE, add_special_tokens=True)
        starts = [start for start in range(len(full)) if full[start : start + len(bare)] == bare]
        return full[: starts[0]] if starts else []

    def messages(self, prompt: str | Messages) -> Messages:
        """The messages of the prompt, for the template. If the first is no system message, `data.system_prompt` comes before it."""
        config = self.config
        if isinstance(prompt, str):
            messages: Messages = [{"role": "user", "content": prompt}]
        else:
            if config.template == "raw":
                raise DataError("the prompt is a list of messages but data.template is raw; set it to chat or auto")
            if not self._has_template:
                raise DataError("the prompt is a list of messages but the tokenizer has no chat template; use texts")
            messages = [_clean(message) for message in prompt]
        if config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        self.notes["continued"] += messages[-1]["role"] == "assistant"
        for message in messages:
            if "content" in message:
                message["content"] = self._content(message["content"])
        return messages

    def _content(self, content: str | list[Any]) -> str | list[Any]:
        """The content as a text or as a list of parts: some templates can print only one of these."""
        prints_text, prints_parts = self._printed_content
        if isinstance(content, str):
            return content if prints_text or not prints_parts else [{"type": "text", "text": content}]
        text = "".join(part["text"] for part in content)
        if prints_parts and self.config.control_tokens == "template" and self._control.search(text):
            return [{"type": "text", "text": text}]  # a control token may span two parts
        return content if prints_parts else text

    @cached_property
    def _printed_content(self) -> tuple[bool, bool]:
        """(whether the template prints a text as content, whether it prints a list of parts)."""
        return self._prints(_PROBE), self._prints([{"type": "text", "text": _PROBE}])

    def _prints(self, content: Any) -> bool:
        """Whether the template prints the probe in `content`."""
        try:
            text = self._render([{"role": "user", "content": content}], {})
        except DataError:
            return False
        # With quotes around the probe, the template printed the repr of a list of parts.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the template besides the messages. Those of the row override `data.chat_template_kwargs`. Errors:
        DataError for an argument that the template never reads."""
        arguments = dict(self.config.chat_template_kwargs)
        for name in arguments:
            self._check_argument(name, "data.chat_template_kwargs has")
        row_arguments = decode_mapping(columns.get("chat_template_kwargs")) or {}
        if not isinstance(row_arguments, Mapping):
            raise DataError(f"the row's chat_template_kwargs are {row_arguments!r:.80}; expected a mapping by name")
        row_arguments = {name: value for name, value in row_arguments.items() if value is not None}
        for name in row_arguments:
            self._check_argument(name, "the row's chat_template_kwargs has")
        arguments |= row_arguments
        tools = columns.get("tools")
        if tools is not None and "tools" not in row_arguments:
            schemas = _tool_schemas(tools)
            if schemas is None or "tools" not in self._words:
                self.notes["tools"] += 1
            else:
                # For an empty list some templates write an introduction of tools. Without the argument they do not.
                arguments.pop("tools", None)
                arguments |= {"tools": schemas} if schemas else {}
        return arguments

    def _check_argument(self, name: str, owner_has: str) -> None:
        """`owner_has`: the beginning of a message, such as "data.chat_template_kwargs has"."""
        if name in _RESERVED_ARGUMENTS:
            raise DataError(f"{owner_has} {name!r}, which is set for every prompt; remove {name!r}")
        if name not in self._words:
            similar = difflib.get_close_matches(name, sorted(self._words), n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; remove {name!r}"
            raise DataError(f"{owner_has} {name!r}, which the chat template never reads{hint}")

    def _render(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """The text before the first sampled token. If the last message is the assistant's, completions continue the message."""
        continued = messages[-1]["role"] == "assistant"
        ending = "continue_final_message" if continued else "add_generation_prompt"
        options = {**arguments, ending: True}
        try:
            if "strftime_now" in self._words:
                template = self._tokenizer.get_chat_template(tools=arguments.get("tools"))
                day = self._day
                options["chat_template"] = _STRFTIME.sub(lambda call: json.dumps(day.strftime(call[2])), template)
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:
            # Errors of jinja, and of raise_exception() in the template.
            raise DataError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from error

    def render(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """The text of a conversation up to the first sampled token, for `tokenize`. By default numbers replace control tokens of
        messages and arguments. Errors: `DataError` if the template refuses the conversation."""

        def hide(value: Any, user: bool) -> Any:
            if isinstance(value, str):
                return self._cached_hide(value, user)
            if isinstance(value, Mapping):
                return {hide(key, user): hide(item, user) for key, item in value.items()}
            return [hide(item, user) for item in value] if isinstance(value, (list, tuple)) else value

        if self.config.control_tokens == "template":
            # A message of the assistant may hold tokens such as <think>, which the model is trained to write.
            messages = [hide(message, message["role"] != "assistant") for message in messages]
            arguments = hide(arguments, True)
        return self._render_calls(messages, arguments)

    def _hide(self, text: str, user: bool) -> str:
        """The text with numbers in place of control tokens. `user`: False for text of the assistant, True for other text."""

        def number(match: re.Match[str]) -> str:
            return f"{_OPEN}{self._hidden.setdefault(match[0], len(self._hidden))}{_CLOSE}"

        return (self._control if user else self._special).sub(number, text)

    def tokenize(self, text: str, *, inside: bool = False) -> list[int]:
        """Token ids of a text of `render`, or of a part of it. `inside`: other tokens precede the text."""
        pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", text)
        # With one group in the pattern, every second piece is a number.
        hidden = [*self._hidden]
        texts = [hidden[int(n)] if int(n) < len(hidden) else f"{_OPEN}{n}{_CLOSE}" for n in pieces[1::2]]
        pieces[1::2] = texts
        return _encode_pieces(self._tokenizer, pieces, inside)

    def _render_calls(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """Render with the arguments of tool calls as mappings. If the template fails, retry with arguments as JSON texts."""
        try:
            return self._render(messages, arguments)
        except DataError:
            as_json = [map_call_arguments(message, to_json) for message in messages]
            if as_json == messages:
                raise
        return self._render(as_json, arguments)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches the control tokens of a model's text: special tokens only."""
        return _pattern(_control_tokens(self._tokenizer, ""))

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Matches the control tokens of a user's text."""
        return _pattern(_control_tokens(self._tokenizer, self._template))


def encode_prompt(
    prompt: Any, config: DataConfig, tokenizer: Any, columns: Mapping[str, Any] | None = None
) -> Int32Array:
    """Token ids [P] of a single prompt: `PromptEncoder.encode` after `check_unicode`."""
    check_unicode([prompt, columns], "the prompt or one of its columns")
    return PromptEncoder(tokenizer, config).encode(prompt, columns)


def check_unicode(value: Any, source: str) -> None:
    """Errors: `DataError` for half of a surrogate pair in a text, at any depth: JSON can contain it, UTF-8 cannot."""
    if isinstance(value, str):
        if not value.isascii() and (half := re.search("[\ud800-\udfff]", value)):
            raise DataError(f"{source} holds {half[0]!a}, half of a surrogate pair, which is no text; correct the row")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_unicode(key, source)
            check_unicode(item, source)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_unicode(item, source)


def check_prompt(prompt: Any) -> None:
    """Errors: `DataError` if `prompt` is empty, or is neither a string nor a list of {"role": ..., "content": ...}."""
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is an empty string; expected a text")
        return
    if not isinstance(prompt, Sequence):
        raise DataError(f"the prompt is {type(prompt).__name__}; expected a string or a list of messages")
    if not prompt:
        raise DataError("the prompt is an empty list of messages; expected at least one message")
    for number, message in enumerate(prompt, start=1):
        if not _is_message(message):
            raise DataError(
                f'message {number} of the prompt is {message!r:.80}; expected {{"role": ..., "content": ...}}'
            )
        _check_content(message, f"message {number} of the prompt")


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return "content" in value or "tool_calls" in value


def _check_content(message: Mapping[str, Any], source: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        shown = "null, and it has no tool_calls" if content is None else f"{type(content).__name__} {content!r:.60}"
        raise DataError(f"the content of {source} is {shown}; expected a text, or a list of text parts")
    for part in content:
        if isinstance(part, str):
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f'the content of {source} has a part of type {kind!r}; expected {{"type": "text", "text": ...}}: models are '
                "trained on text alone"
            )


def _clean(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without null values, with text parts as mappings, and with JSON arguments of tool calls decoded."""
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list):
        texts = [part if isinstance(part, str) else part["text"] for part in kept["content"]]
        kept["content"] = [{"type": "text", "text": text} for text in texts]
    return map_call_arguments(kept, decode_mapping)


def map_call_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of the message with `change` applied to the arguments of each tool call."""
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


def decode_mapping(value: Any) -> Any:
    """Decode a JSON text of a mapping. Any other value is returned unchanged."""
    mapping = _json_or_none(value) if isinstance(value, str) else None
    return mapping if isinstance(mapping, dict) else value


def to_json(arguments: Any) -> str:
    """The arguments of a call as JSON; a text is returned unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _tool_schemas(tools: Any) -> list[Any] | None:
    """A row's tools (JSON text, or a list) as a list of mappings; None for any other value."""
    if isinstance(tools, str):
        tools = _json_or_none(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return None
    return list(tools)


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _template_of(tokenizer: Any) -> str:
    """The chat template of a tokenizer. A tokenizer may have several templates by name: their texts are joined."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return " ".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _encode_pieces(tokenizer: Any, pieces: Sequence[str], inside: bool = False) -> list[int]:
    """Token ids of [text, control token, text, ...]. The text of a control token is encoded as plain text."""
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if not piece:
            continue
        is_inside = inside or bool(ids)
        if number % 2 == 0:
            ids += _encode_inside(tokenizer, piece, is_inside)
            continue
        piece_ids = _encode_inside(tokenizer, piece, is_inside, split_special_tokens=True)
        # `split_special_tokens` does not split an added token that is not special, so its first character is encoded alone.
        if tokenizer.convert_tokens_to_ids(piece) in piece_ids:
            piece_ids = _encode_inside(tokenizer, piece[:1], is_inside) + _encode_inside(tokenizer, piece[1:], True)
        ids += piece_ids
    return ids


def _encode_inside(tokenizer: Any, text: str, inside: bool, **options: bool) -> list[int]:
    """Token ids of a text. `inside`: other tokens precede the text.

    SentencePiece adds a space before a text, but not after a line break. So a line break is encoded, too, and its ids removed."""
    if inside:
        line = tokenizer.encode("\n", add_special_tokens=False)
        ids: list[int] = tokenizer.encode("\n" + text, add_special_tokens=False, **options)
        if ids[: len(line)] == line:
            return ids[len(line) :]
    return list(tokenizer.encode(text, add_special_tokens=False, **options))


def _control_tokens(tokenizer: Any, template: str) -> list[str]:
    """Texts of the special tokens, and of other added tokens that are in `template`."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = dict.fromkeys(getattr(tokenizer, "all_special_tokens", ()))
    for token in added:
        text = str(getattr(token, "content", token))
        if getattr(token, "special", False) or (text in template and not text.isspace()):
            texts[text] = None
    return [text for text in texts if text]


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    # The first alternative that matches wins, so longer texts must come first. `(?!)` matches nothing.
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
