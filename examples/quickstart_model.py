"""The quickstart's model, tokenizer, task and reward, all made on the spot: nothing is downloaded.

Task: "repeat". The prompt `k7=` asks for the letter `k` seven times, then the end of the sequence. A Qwen3-shaped model of
half a million parameters knows nothing at first; it learns the task from the reward alone.
"""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcdefgh"
DIGITS = "123456789"
SPECIAL = ["<pad>", "<eos>"]
VOCABULARY = [*SPECIAL, *LETTERS, *DIGITS, "="]


def build(seed: int) -> tuple[Any, Any]:
    """(model, tokenizer): a Qwen3-shaped causal language model with random weights and a character-level tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()  # characters join without spaces
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


def rows(count: int = 512, seed: int = 0) -> list[dict[str, str]]:
    """Prompts with their answers."""
    draw = random.Random(seed)
    picked = [(draw.choice(LETTERS), draw.randint(1, 9)) for _ in range(count)]
    return [{"prompt": f"{letter}{times}=", "answer": letter * times} for letter, times in picked]


def reward(prompts: list[str], completions: list[str], completion_ids: Any, answer: list[str]) -> list[float]:
    """1 for the exact answer; else a share of it: the right letter, and a length near the right one."""
    scores = []
    for text, target in zip(completions, answer, strict=True):
        if text == target:
            scores.append(1.0)
            continue
        right = sum(character == target[0] for character in text)
        purity = right / max(len(text), 1)
        length = 1 - min(abs(right - len(target)), len(target)) / len(target)
        scores.append(0.8 * (0.5 * purity + 0.5 * purity * length))
    return scores
