"""What a dry run uses where a real one has a model's tokenizer and a file of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.ports import WeightSink


class ByteTokenizer:
    """Text as UTF-8 bytes: prompts get plausible lengths without any model."""

    chat_template = None
    eos_token_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        """A byte, a token."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The inverse; what is no UTF-8 is replaced."""
        return bytes(int(t) % 256 for t in token_ids).decode(errors="replace")


class OwnWeights:
    """A `WeightSink` before a dry-run engine: gives it weights of its own, those it was handed last, not the trainer's."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.engine: WeightSink | None = None  # its `version_source` reads ours, so it is made after us

    async def update_weights(self, version: int) -> None:
        """As `WeightSink.update_weights`."""
        self.version = version
        assert self.engine is not None
        await self.engine.update_weights(version)


def rows(count: int = 256) -> list[dict[str, str]]:
    """The prompts of a dry run."""
    return [{"prompt": f"dry-run prompt number {number}"} for number in range(count)]
