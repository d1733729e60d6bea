"""Prompts as token ids: the chat template, raw text, and nothing of transformers at import time.

The tokenizer is any object of the Hugging Face form; two of its methods are used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.config.schema import DataConfig
from asyncrl.errors import DataError
from asyncrl.types import Int32Array, Messages

_OURS = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")


def _has_chat_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def as_messages(prompt: str | Messages, config: DataConfig, tokenizer: Any) -> Messages | None:
    """The conversation that the chat template renders, or None where the prompt is tokenized as it stands.

    A system prompt goes before every conversation that does not begin with a system message of its own.
    Errors: `DataError` for a message list without a template, a raw message list, or a system prompt before raw text.
    """
    template, system_prompt = config.template, config.system_prompt
    renders = _has_chat_template(tokenizer)
    if template == "chat" and not renders:
        raise DataError("data.template is chat but the tokenizer has no chat template; use data.template=raw")
    if isinstance(prompt, str):
        if template == "raw" or not renders:
            if system_prompt is not None:
                raise DataError(
                    "data.system_prompt is set but the prompt is plain text without a chat template; "
                    "put the text into the prompt, or use a tokenizer with a template and data.template=chat"
                )
            if config.chat_template_kwargs:
                raise DataError(
                    "data.chat_template_kwargs is set but the prompt is plain text without a chat template; "
                    "leave it out, or use a tokenizer with a template and data.template=chat"
                )
            return None
        messages: Messages = [{"role": "user", "content": prompt}]
    else:
        if template == "raw":
            raise DataError("the prompt is a list of messages but data.template is raw; use data.template=chat or auto")
        if not renders:
            raise DataError("the prompt is a list of messages but the tokenizer has no chat template to render it")
        # Arrow gives every message every key of the column, None where it was absent; templates test `is defined`.
        messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in prompt]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render(messages: Messages, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> str:
    """The text before the first sampled token. A last message of the assistant is continued, not closed.

    `arguments` are the template's, beside the messages. Errors: `DataError` with the template's own complaint, and for an
    argument that the template never reads: it would be ignored without a word.
    """
    arguments = arguments or {}
    for name in arguments:
        _check_argument(name, arguments, tokenizer)
    ending = (
        {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {"add_generation_prompt": True}
    )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **ending, **arguments))
    except Exception as error:  # jinja's errors, and whatever a template raises by raise_exception()
        raise DataError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from error


def _check_argument(name: str, arguments: Mapping[str, Any], tokenizer: Any) -> None:
    if name in _OURS:
        raise DataError(f"data.chat_template_kwargs has {name!r}, which is set for every prompt; leave it out")
    template = tokenizer.chat_template
    if isinstance(template, Mapping):  # several templates by name: that for tools is used where tools are given
        template = " ".join(map(str, template.values()))
    words = set(re.findall(r"\w+", str(template)))
    if name not in words:
        near = difflib.get_close_matches(name, sorted(words), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"data.chat_template_kwargs has {name!r}, which the chat template never reads{hint}")


def encode_prompt(prompt: str | Messages, config: DataConfig, tokenizer: Any) -> Int32Array:
    """Token ids [P]. Rendered text gets no more special tokens (the template wrote them); raw text gets the usual ones.

    Errors: `DataError` for an empty or malformed prompt, and as `as_messages` and `render`.
    """
    check_prompt(prompt)
    messages = as_messages(prompt, config, tokenizer)
    if messages is None:
        assert isinstance(prompt, str)
        ids = tokenizer.encode(prompt)
    else:
        ids = tokenizer.encode(render(messages, tokenizer, config.chat_template_kwargs), add_special_tokens=False)
    if len(ids) == 0:
        raise DataError("the prompt has no tokens")
    return np.asarray(ids, dtype=np.int32)


def check_prompt(prompt: Any) -> None:
    """Errors: `DataError` unless it is a non-empty string or a non-empty list of {"role": ..., "content": ...}."""
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is an empty string")
        return
    if not isinstance(prompt, Sequence):
        raise DataError(f"the prompt is {type(prompt).__name__}; expected a string or a list of messages")
    if not prompt:
        raise DataError("the prompt is an empty list of messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f'message {number} of the prompt is {message!r:.80}; expected {{"role": ..., "content": ...}}'
            )
