"""Stop strings, looked for on incrementally decoded text. Only requests that have some pay for it."""

from __future__ import annotations

from typing import Any

from asyncrl.data.texts import decode, find_stop
from asyncrl.types import Int64Array

# Tokens of context before the window: decoders that look back (spaces, bytes) settle within.
MARGIN = 8


class StopStrings:
    """Which of the stop strings does the newest token complete?

    Only the last tokens are decoded: a token is at least one byte and a character at most four, so a stop string of n
    characters lies within the last 4 n tokens.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """`min_tokens`: what they alone complete ends nothing."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._window = 4 * max((len(string) for string in self._stop), default=0) + MARGIN

    def hit(self, completion: Int64Array) -> str | None:
        """The one that begins first, if any. `completion` [C]: all sampled tokens of the sequence so far."""
        if completion.size <= self._min_tokens:
            return None
        ids = completion[-self._window :].tolist()
        text, before = decode(self._tokenizer, ids), decode(self._tokenizer, ids[:-1])
        found = {string: at for string in self._stop if (at := find_stop(text, before, string)) >= 0}
        return min(found, key=found.__getitem__, default=None)
