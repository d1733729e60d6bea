"""The stop tokens of a request, and the search for its stop strings in the text of the running completion."""

from __future__ import annotations

from typing import Any

from asyncrl.data.texts import decode, find_stop
from asyncrl.types import Int64Array, SamplingParams

# Tokens decoded in front of the searched tokens. The text of a token may depend on a few tokens before it (spaces, bytes).
MARGIN = 8


class StopStrings:
    """Finds the stop string that the newest token completes. Decodes only the last tokens: a character has at most four bytes, and
    a token has at least one byte, so a stop string of n characters lies within the last 4 n tokens."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """`min_tokens`: no stop string is reported within the first `min_tokens` tokens."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._window = 4 * max((len(string) for string in self._stop), default=0) + MARGIN

    def hit(self, completion: Int64Array) -> str | None:
        """The stop string that the last token completes, or None. Of several: the string that begins first. `completion` [C]: all
        sampled tokens so far."""
        if completion.size <= self._min_tokens:
            return None
        ids = completion[-self._window :].tolist()
        text, text_before = decode(self._tokenizer, ids), decode(self._tokenizer, ids[:-1])
        starts = {string: find_stop(text, text_before, string) for string in self._stop}
        completed = {string: start for string, start in starts.items() if start >= 0}
        return min(completed, key=completed.__getitem__, default=None)


def stops_of(
    sampling: SamplingParams, eos: tuple[int, ...], tokenizer: Any
) -> tuple[tuple[int, ...], StopStrings | None]:
    """The distinct tokens that end a completion, and the search for its stop strings (None: no stop strings). `eos`: the
    tokens that end every completion unless the request has `ignore_eos`."""
    ids = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos)
    strings = StopStrings(tokenizer, sampling.stop, sampling.min_tokens) if sampling.stop else None
    return tuple(dict.fromkeys(ids)), strings
