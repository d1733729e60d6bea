"""The quickstart's model, tokenizer, task and reward. Nothing is downloaded.

The prompt `c7=` asks for the letter `c` seven times, then the end of the sequence. The model is Qwen3-shaped and has half
a million parameters. A few supervised batches (a second or two) teach the model a part of the task. The model learns the
rest from rewards alone.
"""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcd"
DIGITS = "123456789"
SPECIAL = ["<pad>", "<eos>"]
VOCABULARY = [*SPECIAL, *LETTERS, *DIGITS, "="]
WARM_UP_BATCHES = 20
MOST = 9


def build(seed: int, most: int = MOST, **shape: int) -> tuple[Any, Any]:
    """Returns (model, tokenizer): a Qwen3-shaped causal language model after its warm-up, and a tokenizer of characters.

    `most`: the largest number in a prompt. `shape`: other values of the `Qwen3Config`.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()  # characters join without spaces
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **(sizes | heads | shape),
    )
    model = Qwen3ForCausalLM(config)
    # A dry run builds the model on the meta device, only to count parameters.
    if model.device.type != "meta":
        warm_up(model, tokenizer, seed, most)
    return model, tokenizer


def warm_up(model: Any, tokenizer: Any, seed: int, most: int, batches: int = WARM_UP_BATCHES, size: int = 64) -> None:
    """Train on a few supervised batches. Afterwards the model writes letters and stops near the right length."""
    import torch

    draw = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(batches):
        texts = [f"{row['prompt']}{row['answer']}" for row in rows(size, draw.randrange(1 << 30), most)]
        ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
        width = max(map(len, ids))
        batch = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        labels = torch.tensor([[-100] * 3 + row[3:] + [-100] * (width - len(row)) for row in ids])
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(count: int = 512, seed: int = 0, most: int = MOST) -> list[dict[str, str]]:
    """`count` random rows with the columns prompt and answer. `most`: the largest number in a prompt."""
    draw = random.Random(seed)
    picked = [(draw.choice(LETTERS), draw.randint(1, most)) for _ in range(count)]
    return [{"prompt": f"{letter}{times}=", "answer": letter * times} for letter, times in picked]


def reward(prompts: list[str], completions: list[str], completion_ids: Any, answer: list[str]) -> list[float]:
    """1 for the exact answer, else less: the more right letters, the larger; the further from the right length, the smaller."""
    scores = []
    for text, target in zip(completions, answer, strict=True):
        right = sum(character == target[0] for character in text)
        purity = right / max(len(text), 1)
        nearness = 1 / (1 + abs(len(text) - len(target)))
        scores.append(1.0 if text == target else purity * (0.3 + 0.5 * nearness))
    return scores
