"""What small tools train on: letters as tokens, vowels as the reward. Needs no torch to be loaded, as reward workers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("<pad>", "<eos>", *LETTERS, "=")


def tokenizer() -> Any:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def share(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of vowels."""
    return [sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1) for text in completions]
