"""Stop strings, looked for on incrementally decoded text. Only requests that have some pay for it."""

from __future__ import annotations

from typing import Protocol

from asyncrl.types import Int64Array

MARGIN = 8  # tokens of context before the window: decoders that look back (spaces, bytes) settle within


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of these ids."""
        ...


class StopStrings:
    """Does the newest token complete one of the stop strings?

    Only the last tokens are decoded: a token is at least one byte and a character at most four, so a stop string of n
    characters lies within the last 4 n tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """`min_tokens`: what they alone complete ends nothing."""
        self._tokenizer = tokenizer
        self._stop = tuple(string for string in stop if string)
        self._min_tokens = min_tokens
        self._window = 4 * max((len(string) for string in self._stop), default=0) + MARGIN

    def hit(self, completion: Int64Array) -> bool:
        """`completion` [C]: all sampled tokens of the sequence so far."""
        if completion.size <= self._min_tokens:
            return False
        start = max(completion.size - self._window, 0)
        text, before = self._text(completion[start:]), self._text(completion[start : self._min_tokens])
        return any(text.count(string) > before.count(string) for string in self._stop)

    def _text(self, tokens: Int64Array) -> str:
        if not tokens.size:
            return ""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
