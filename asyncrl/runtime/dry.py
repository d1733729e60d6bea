"""What a dry run uses where a real one has a model's tokenizer and a file of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ByteTokenizer:
    """Text as UTF-8 bytes: prompts get plausible lengths without any model."""

    chat_template = None
    eos_token_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(int(t) % 256 for t in token_ids).decode(errors="replace")


def rows(count: int = 256) -> list[dict[str, str]]:
    return [{"prompt": f"dry-run prompt number {number}"} for number in range(count)]
