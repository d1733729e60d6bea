"""Makes the text of a completion from its sampled ids. No other module makes this text. Does not import torch.

An engine that finds a stop string in the decoded ids writes the stop string to `Generation.stop`. `CompletionText` makes the text
from the `Generation`, for rewards, rollouts and `Runtime.generate`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, Int32Array

# How many of a prompt's last tokens are searched for the beginning of the assistant's turn.
_TAIL_TOKENS = 512
_THINKING_TAG = r"<(?:think|thinking|thought|reasoning)>"
# Probes: texts that no template writes by itself.
_QUESTION, _ANSWER, _NEXT_QUESTION = "Qk7", "Qk8", "Qk9"


def decode(tokenizer: Any, ids: Sequence[int], *, special_tokens: bool = True) -> str:
    """The text of these ids, without the clean-up of spaces that a tokenizer may do by default."""
    text = tokenizer.decode(list(ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
    return str(text)


def find_stop(text: str, before: str, stop: str) -> int:
    """The index in `text` of a stop string that ends in the newest token, or -1. `before`: the text without the newest token."""
    # U+FFFD at the end of `before` is the beginning of a character that the newest token completes.
    return text.find(stop, max(0, len(before.rstrip("\ufffd")) - len(stop) + 1))


@dataclass(frozen=True, slots=True)
class Turn:
    """What the chat template writes around an answer of the assistant. All texts are empty without a usable template."""

    head: str = ""  # before an answer
    opening: str = ""  # after `head` in a generation prompt, such as <think>
    closing: str = ""  # between an answer and the text of the next message

    @classmethod
    def of(cls, tokenizer: Any, arguments: Mapping[str, Any]) -> Turn:
        """The texts around a probe answer in a rendered conversation. `arguments`: the template's arguments, besides messages."""
        if getattr(tokenizer, "chat_template", None) is None:
            return cls()

        def render(*texts: str, parts: bool, generation_prompt: bool = False) -> str:
            contents: list[Any] = [[{"type": "text", "text": text}] if parts else text for text in texts]
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
            options = {"add_generation_prompt": generation_prompt, **arguments}
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

        # Some templates render only contents that are strings, others only contents that are lists of parts.
        for parts in (False, True):
            try:
                bare = render(_QUESTION, parts=parts)
                ready = render(_QUESTION, parts=parts, generation_prompt=True)
                before, _, after = render(_QUESTION, _ANSWER, _NEXT_QUESTION, parts=parts).partition(_ANSWER)
            except Exception:  # of jinja, or of the template itself
                continue
            if not after or _QUESTION not in bare:
                continue
            generation_prompt = _after_question(ready, bare)
            common_beginning = os.path.commonprefix([generation_prompt, _after_question(before, bare)])  # noqa: RUF071 - no paths
            # A thinking tag is part of the opening, even if the template writes the tag before every answer.
            head = re.split(_THINKING_TAG, common_beginning)[0]
            return cls(head, generation_prompt.removeprefix(head), after.partition(_NEXT_QUESTION)[0])
        return cls()


def _after_question(text: str, bare: str) -> str:
    """The part of `text` after the question. `bare`: the rendered question alone, with which `text` begins in most templates."""
    return text.removeprefix(bare) if text.startswith(bare) else text.partition(_QUESTION)[2]


class CompletionText:
    """Makes the text of a completion for rewards, rollouts and `Runtime.generate`. The options are those of `reward.text`.

    By default the text is decoded from all sampled ids except a special token that ended the completion. The metrics `text/*` count
    what else the text lacks: stops (tokens and strings), special tokens and openings.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: bool = True,
        stop: bool = True,
        opened: bool = False,
        arguments: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`opened`: begin the text with the opening. `arguments`: arguments of the chat template besides the messages."""
        self._tokenizer = tokenizer
        self._keeps_special, self._keeps_stop, self._keeps_opening = special_tokens, stop, opened
        self._recorder = recorder
        self._special = special_ids(tokenizer)
        self.turn = Turn.of(tokenizer, arguments or {})
        self._cached_generation_prompt = lru_cache(maxsize=256)(self._find_generation_prompt)  # a group has one prompt

    def __call__(self, generation: Generation, prompt_ids: Int32Array | None = None) -> str:
        """The text of a completion. `prompt_ids` [P]: the prompt. Without `prompt_ids` the text has no opening."""
        ids, stop = generation.token_ids.tolist(), generation.stop
        if generation.finish_reason is FinishReason.STOP and stop is None and ids:
            is_special = ids[-1] in self._special
            if is_special or not self._keeps_stop:
                ids.pop()
            self._count("stops_left_out", int(not is_special and not self._keeps_stop))
        if not self._keeps_special:
            self._count("special_tokens_left_out", sum(token in self._special for token in ids))
        if stop is not None and not self._keeps_stop:
            self._count("stops_left_out", 1)
            text = self._text_before(stop, ids)
        else:
            text = decode(self._tokenizer, ids, special_tokens=self._keeps_special)
        opening = "" if prompt_ids is None else self.opening(prompt_ids)
        if opening.strip() and not self._keeps_opening:
            self._count("openings_left_out", 1)
        return opening + text if self._keeps_opening else text

    def generation_prompt(self, prompt_ids: Int32Array) -> str:
        """The end of the prompt, from the last `Turn.head` on, with the opening of the answer. Empty if the prompt has no head."""
        return self._cached_generation_prompt(prompt_ids[-_TAIL_TOKENS:].tobytes())

    def opening(self, prompt_ids: Int32Array) -> str:
        """The part of `generation_prompt` after the head: the opening of the answer, such as <think>."""
        return self.generation_prompt(prompt_ids).removeprefix(self.turn.head)

    def _find_generation_prompt(self, ids: bytes) -> str:
        text = decode(self._tokenizer, np.frombuffer(ids, np.int32).tolist()) if self.turn.head else ""
        start = text.rfind(self.turn.head)
        return text[start:] if start >= 0 else ""

    def _text_before(self, stop: str, ids: list[int]) -> str:
        """The text of `ids` before the stop string; all of the text if it does not contain the complete stop string."""
        text = decode(self._tokenizer, ids)
        start = find_stop(text, decode(self._tokenizer, ids[:-1]), stop)
        end = start if start >= 0 else len(text)
        if self._keeps_special:
            return text[:end]
        # Keep the ids before the stop string.
        kept = len(ids)
        while len(before := decode(self._tokenizer, ids[:kept])) > end:
            kept -= 1
        # If the stop string begins within a token, keep the beginning of the token's text, but never a part of a special token.
        is_special = kept < len(ids) and ids[kept] in self._special
        beginning = "" if is_special else text[len(before) : end]
        return decode(self._tokenizer, ids[:kept], special_tokens=False) + beginning

    def _count(self, name: str, number: int) -> None:
        if number and self._recorder is not None:
            self._recorder.count(f"text/{name}", number)


def eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens that end a completion, from the tokenizer and from the model's generation config, ascending."""
    ids: set[int] = set()
    for source in (tokenizer, getattr(module, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update(value if isinstance(value, (list, tuple)) else (value,))
    return tuple(sorted(ids))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that a tokenizer leaves out with `skip_special_tokens=True`."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(getattr(tokenizer, "all_special_ids", ())) | {i for i, token in added if token.special}


def notes(config: Config, tokenizer: Any, ends: Collection[int]) -> tuple[list[str], list[str]]:
    """Two lists of warnings for the start of a run: completions may have no end; the text for rewards lacks something. `ends`: ids
    that end a completion."""
    rollout, turn = config.rollout, Turn.of(tokenizer, config.data.chat_template_kwargs)
    endless, missing = [], []
    fix = "set rollout.stop_token_ids, or eos_token_id in the model's generation_config"
    if rollout.ignore_eos:
        pass
    elif not ends and not rollout.stop:
        endless.append(
            "neither the tokenizer nor the model's generation_config names an end-of-sequence token (EOS): every completion runs "
            f"to rollout.max_tokens = {rollout.max_tokens}; {fix}"
        )
    elif turn.closing and config.data.template != "raw" and not any(stop in turn.closing for stop in rollout.stop):
        closing = tokenizer.encode(turn.closing, add_special_tokens=False)
        if set(ends).isdisjoint(closing):
            special = [decode(tokenizer, [token]) for token in closing if token in special_ids(tokenizer)]
            end_texts = ", ".join(f"{decode(tokenizer, [token])!r}" for token in sorted(ends)) or "none"
            endless.append(
                f"the chat template ends turns with {(special or [turn.closing])[0]!r}, which ends no completion (tokens that "
                f"end a completion: {end_texts}), so the model continues after its turn; {fix}"
            )
    if turn.opening.strip() and not config.reward.text.opened and config.data.template != "raw":
        missing.append(
            f"the chat template writes {turn.opening.strip()!r} into the prompt, so the text for rewards lacks these characters "
            "(reward.text.opened=true adds them)"
        )
    return endless, missing
