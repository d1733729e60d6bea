"""Small sequence classifiers with random weights and a tokenizer of their own, as a user would have them on disk or in code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

LETTERS = "zyxwvutsrqponmlkjihgfedcba0123456789=?[] "
TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<e>{% endfor %}"


def make_tokenizer(template: str | None = TEMPLATE, pad: str | None = "<pad>", length: int | None = None) -> Any:
    """A token a character, ids unlike those of any policy in these tests. `<e>` ends a message."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<e>", "<u>", "<a>", "<s>", "<?>"]
    words = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*special, *LETTERS])}, unk_token="<?>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    limit = {} if length is None else {"model_max_length": length}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<e>", pad_token=pad, additional_special_tokens=special[2:], **limit
    )
    tokenizer.chat_template = template
    return tokenizer


def make_classifier(
    kind: str = "llama",
    labels: int = 1,
    pad: int | None = 0,
    seed: int = 1,
    context: int = 64,
    rope: dict[str, Any] | None = None,
) -> Any:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForSequenceClassification,
        Qwen2Config,
        Qwen2ForSequenceClassification,
    )

    made: Any = {
        "llama": (LlamaConfig, LlamaForSequenceClassification),
        "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
        "bert": (BertConfig, BertForSequenceClassification),
    }[kind]
    settings = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    settings |= {"vocab_size": 47, "num_labels": labels, "pad_token_id": pad, "max_position_embeddings": context}
    if kind != "bert":
        settings |= {"num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": 1}
    if rope is not None:
        settings |= {"rope_parameters": rope}
    torch.manual_seed(seed)
    model = made[1](made[0](**settings, initializer_range=0.3))
    return model.eval()


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Mean(nn.Module):
    """A score from the mean of embeddings. `masked`: over the text alone, as it should."""

    def __init__(self, masked: bool = True, outputs: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(47, 8)
        self.head = nn.Linear(8, max(outputs, 1))
        self.masked, self.outputs = masked, outputs

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weight_BL1 = (attention_mask if self.masked else torch.ones_like(attention_mask))[..., None].to(
            self.head.weight.dtype
        )
        mean_BE = (self.embedding(input_ids) * weight_BL1).sum(1) / weight_BL1.sum(1)
        scores = self.head(mean_BE)
        return scores if self.outputs else scores[:, 0]


def mean(seed: int) -> tuple[Any, Any]:
    return Mean(), make_tokenizer()


def wide(seed: int) -> tuple[Any, Any]:
    return Mean(outputs=3), make_tokenizer()


def careless(seed: int) -> tuple[Any, Any]:
    return Mean(masked=False), make_tokenizer()


class NanIfPadded(Mean):
    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        is_padded = (attention_mask == 0).any(-1)
        return super().forward(input_ids, attention_mask).masked_fill(is_padded, float("nan"))


def nan_if_padded(seed: int) -> tuple[Any, Any]:
    return NanIfPadded(), make_tokenizer()


class IdsAlone(nn.Module):
    def forward(self, input_ids: Any) -> Any:
        return input_ids.float().mean(-1, keepdim=True)


def without_mask(seed: int) -> tuple[Any, Any]:
    return IdsAlone(), make_tokenizer()


def nothing(seed: int) -> str:
    return "no module"
