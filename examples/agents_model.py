"""A small chat model for the examples of agents. Nothing is downloaded.

The model is Qwen3-shaped and has half a million parameters. Its tokens are characters, the marks of the chat template, and the
pieces of a tool call, such as `<tool_call>{"name": "multiply", "arguments": {"a": `. Supervised batches of conversations (a minute
or less) teach the model the form of a conversation. The model learns from rewards alone what to say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

ROLES = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>"]
# The template names `tools` without printing them. Without this word asyncrl would put the tools' schemas into a system message.
TEMPLATE = """{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.content %}{{ m.content }}{% endif %}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}\
{% if tools is defined and add_generation_prompt or add_generation_prompt %}<assistant>{% endif %}"""
# A conversation: (text, whether the model learns to write this text), in order.
Conversation = Sequence[tuple[str, bool]]


def build(
    seed: int, characters: str, pieces: Sequence[str], example: Callable[[random.Random], Conversation], batches: int
) -> tuple[Any, Any]:
    """Returns (model, tokenizer). `pieces`: texts of several characters that are one token. `example`: draws a conversation."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: number for number, token in enumerate([*ROLES, *pieces, *characters])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    split = "|".join([*map(re.escape, [*ROLES, *pieces]), "."])
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", additional_special_tokens=ROLES[2:]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    # A dry run builds the model on the meta device, only to count parameters.
    if model.device.type != "meta":
        warm_up(model, tokenizer, random.Random(seed + 1), example, batches)
    return model, tokenizer


def warm_up(
    model: Any, tokenizer: Any, draw: random.Random, example: Callable[..., Conversation], batches: int
) -> None:
    """Train on `batches` supervised batches of 64 conversations."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(batches):
        rows = []
        for _ in range(64):
            parts = [(tokenizer.encode(text), learned) for text, learned in example(draw)]
            ids = [token for part, _ in parts for token in part]
            labels = [token if learned else -100 for part, learned in parts for token in part]
            rows.append((ids, labels))
        width = max(len(ids) for ids, _ in rows)
        batch = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        targets = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
        model(input_ids=batch, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
