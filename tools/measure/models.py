"""What measured runs train, by paths that a configuration names: letters as tokens and vowels as the reward, or the quickstart.

Needs no torch to be loaded, as reward workers do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import quickstart_model

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


def rows(tail: str = "xy=") -> list[dict[str, str]]:
    """Prompts of a few letters; vowels are wanted."""
    return [{"prompt": f"{LETTERS[i % 26]}{LETTERS[i // 26 % 26]}{tail}"} for i in range(520)]


def long_rows() -> list[dict[str, str]]:
    return rows("qrstuvw=")


def windowed(seed: int) -> tuple[Any, Any]:
    """A Mistral of which every layer sees the last 16 tokens."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=len(WORDS), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, sliding_window=16, initializer_range=0.1, max_position_embeddings=128,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config), tokenizer()


def experts(seed: int) -> tuple[Any, Any]:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        initializer_range=0.15, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config), tokenizer()


def tiny(seed: int) -> tuple[Any, Any]:
    """The quickstart's model with some thousand parameters."""
    return quickstart_model.build(
        seed, 2, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip


def tiny_rows() -> list[dict[str, str]]:
    return quickstart_model.rows(512, 0, 2)


def plain(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    return quickstart_model.reward(prompts, completions, completion_ids, answer)


def sleeping(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    if _seldom(prompts, completions):
        time.sleep(float(os.environ["MEASURE_SLEEP_S"]))
    return plain(prompts, completions, completion_ids, answer)


def crashing(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    if _seldom(prompts, completions):
        os._exit(3)
    return plain(prompts, completions, completion_ids, answer)


def _seldom(prompts: Any, completions: Any) -> bool:
    return hash((str(prompts), str(completions))) % 200 == 0
