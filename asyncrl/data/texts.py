"""The text of a completion: made here and nowhere else, of exactly the ids that were sampled. No torch.

    engine: `decode` of the last ids holds a stop string --> Generation.stop --> CompletionText --> rewards, rollouts, Runtime

What a chat template writes around an assistant's text (`Turn`) is read off a conversation that it renders.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, Int32Array

# Tokens at the end of a prompt in which the assistant's turn begins.
_TAIL = 512
_THINKS = r"<(?:think|thinking|thought|reasoning)>"
_ASKED, _SAID, _AGAIN = "Qk7", "Qk8", "Qk9"  # texts that no template writes


def decode(tokenizer: Any, ids: Sequence[int], *, special_tokens: bool = True) -> str:
    """The text of these ids and nothing else: no clean-up of spaces."""
    text = tokenizer.decode(list(ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
    return str(text)


def completed_at(text: str, before: str, stop: str) -> int:
    """Where the stop string begins that the newest token completes; -1: none. `before`: the text without that token, whose last
    character may still have been incomplete."""
    return text.find(stop, max(0, len(before.rstrip("\ufffd")) - len(stop) + 1))


@dataclass(frozen=True, slots=True)
class Turn:
    """What the chat template writes before an assistant's text (`head`), what a generation prompt has behind that (`opening`, as
    <think>), and what stands between the assistant's text and the next message (`closing`). Empty where there is no template."""

    head: str = ""
    opening: str = ""
    closing: str = ""

    @classmethod
    def of(cls, tokenizer: Any, arguments: Mapping[str, Any]) -> Turn:
        """`arguments`: those of the template, beside the messages."""
        if getattr(tokenizer, "chat_template", None) is None:
            return cls()

        def render(*texts: str, parts: bool, ready: bool = False) -> str:
            contents: list[Any] = [[{"type": "text", "text": text}] if parts else text for text in texts]
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
            given = {"add_generation_prompt": ready, **arguments}
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))

        for parts in (False, True):
            try:
                bare, ready = render(_ASKED, parts=parts), render(_ASKED, parts=parts, ready=True)
                before, _, behind = render(_ASKED, _SAID, _AGAIN, parts=parts).partition(_SAID)
            except Exception:
                # jinja's errors, and whatever a template raises: nothing is known of such a one.
                continue
            if not behind or _ASKED not in bare:
                continue
            prompt, answer = (
                text.removeprefix(bare) if text.startswith(bare) else text.partition(_ASKED)[2]
                for text in (ready, before)
            )
            alike = [a == b for a, b in zip(prompt, answer, strict=False)]
            # Some templates write the tag before every answer, also before those that have none.
            head = re.split(_THINKS, prompt[: [*alike, False].index(False)])[0]
            return cls(head, prompt.removeprefix(head), behind.partition(_AGAIN)[0])
        return cls()


class CompletionText:
    """Makes the text that rewards, rollouts and `Runtime.generate` get. The settings are those of `reward.text`.

    The text is that of all sampled ids but one: the special token that ended the completion. What else is left out is counted in
    the recorder, under `text/`.
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
        """`arguments`: of the chat template, beside the messages."""
        self._tokenizer = tokenizer
        self._keeps_special, self._keeps_stop, self._keeps_opening = special_tokens, stop, opened
        self._recorder = recorder
        self._special = special_ids(tokenizer)
        self._known = _known_ids(tokenizer)
        self.turn = Turn.of(tokenizer, arguments or {})
        self._prompt_of = lru_cache(maxsize=256)(self._read_prompt)  # the members of a group have the same one

    def __call__(self, generation: Generation, prompt_ids: Int32Array | None = None) -> str:
        """`prompt_ids`: of the request; without them nothing is known of what the template opened."""
        ids, stop = generation.token_ids.tolist(), generation.stop
        if self._known is not None:
            known = self._known[np.minimum(generation.token_ids, self._known.size - 1)]
            self._count("ids_without_text", int((~known).sum()))
        if generation.finish_reason is FinishReason.STOP and stop is None and ids:
            special = ids[-1] in self._special
            if special or not self._keeps_stop:
                ids.pop()
            self._count("stops_left_out", int(not special and not self._keeps_stop))
        if not self._keeps_special:
            self._count("special_tokens_left_out", sum(each in self._special for each in ids))
        if stop is not None and not self._keeps_stop:
            self._count("stops_left_out", 1)
            text = self._before(stop, ids)
        else:
            text = decode(self._tokenizer, ids, special_tokens=self._keeps_special)
        opening = "" if prompt_ids is None else self.opening(prompt_ids)
        if opening.strip() and not self._keeps_opening:
            self._count("openings_left_out", 1)
        return opening + text if self._keeps_opening else text

    def generation_prompt(self, prompt_ids: Int32Array) -> str:
        """The end of the prompt: what the template writes before an assistant's text, and what was already opened or written of it.
        Empty where the template writes nothing there."""
        return self._prompt_of(prompt_ids[-_TAIL:].tobytes())

    def opening(self, prompt_ids: Int32Array) -> str:
        """The part of `generation_prompt` that belongs to the answer, as <think>."""
        return self.generation_prompt(prompt_ids).removeprefix(self.turn.head)

    def _read_prompt(self, ids: bytes) -> str:
        text = decode(self._tokenizer, np.frombuffer(ids, np.int32).tolist()) if self.turn.head else ""
        at = text.rfind(self.turn.head)
        return text[at:] if at >= 0 else ""

    def _before(self, stop: str, ids: list[int]) -> str:
        """The text up to the stop string."""
        whole = decode(self._tokenizer, ids)
        place = completed_at(whole, decode(self._tokenizer, ids[:-1]), stop)
        end = place if place >= 0 else len(whole)
        if self._keeps_special:
            return whole[:end]
        kept = len(ids)
        while len(before := decode(self._tokenizer, ids[:kept])) > end:
            kept -= 1
        cut = "" if kept == len(ids) or ids[kept] in self._special else whole[len(before) : end]
        return decode(self._tokenizer, ids[:kept], special_tokens=False) + cut

    def _count(self, name: str, number: int) -> None:
        if number and self._recorder is not None:
            self._recorder.count(f"text/{name}", number)


def eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, and those of the model's generation config."""
    ids: set[int] = set()
    for source in (tokenizer, getattr(module, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return tuple(sorted(ids))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(getattr(tokenizer, "all_special_ids", ())) | {i for i, token in added if token.special}


def _known_ids(tokenizer: Any) -> Any:
    """Bools by id, the last one False for whatever is beyond; None where the tokenizer does not list its tokens."""
    ids = list(tokenizer.get_vocab().values()) if hasattr(tokenizer, "get_vocab") else []
    if not ids:
        return None
    known = np.zeros(max(ids) + 2, np.bool_)
    known[ids] = True
    return known


def notes(config: Config, tokenizer: Any, ends: Collection[int], vocabulary: int) -> tuple[list[str], list[str]]:
    """(why completions do not end, what else their texts lack): sentences for the start. `ends`: ids that end a completion, by the
    tokenizer, the model or `rollout.stop_token_ids`; `vocabulary`: rows of the model's embedding."""
    rollout, turn = config.rollout, Turn.of(tokenizer, config.data.chat_template_kwargs)
    endless, lacking = [], []
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
            special = [decode(tokenizer, [each]) for each in closing if each in special_ids(tokenizer)]
            known = ", ".join(f"{decode(tokenizer, [each])!r}" for each in sorted(ends)) or "none"
            endless.append(
                f"the chat template ends turns with {(special or [turn.closing])[0]!r}, which ends no completion (what does: "
                f"{known}): the model goes on behind its turn; {fix}"
            )
    found = _known_ids(tokenizer)
    unknown = [] if found is None else [i for i in range(vocabulary) if i >= found.size or not found[i]]
    if unknown:
        lacking.append(
            f"the model's vocabulary has {len(unknown)} rows more than the tokenizer has tokens: ids "
            f"{'from ' if unknown[-1] - unknown[0] >= len(unknown) else ''}{unknown[0]} to {unknown[-1]} have no text"
        )
    if turn.opening.strip() and not config.reward.text.opened and config.data.template != "raw":
        lacking.append(
            f"the chat template opens {turn.opening.strip()!r} in the prompt, so that it is not in the text that rewards read "
            "(reward.text.opened=true puts it in front)"
        )
    return endless, lacking
