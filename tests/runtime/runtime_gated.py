"""Small gated models for the tests of the gate, built by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
GATED = SMALL | {"num_key_value_heads": 1, "intermediate_size": 48}


def built(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def llama(**changes: Any) -> PreTrainedModel:
    return built(LlamaConfig(**(GATED | changes)))
