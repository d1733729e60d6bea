"""Models that vLLM cannot be handed, on the real one: refused by name before anything is generated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from generation_cores import VOCABULARY, needs_vllm, opened_core, small_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.models.policy import PolicyModel

pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore")]
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


class Unheard(LlamaForCausalLM):
    """An architecture that vLLM has never heard of."""


def experts() -> PreTrainedModel:
    more = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **more))


def narrow() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def unheard() -> PreTrainedModel:
    return Unheard(small_model("llama").config)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (experts, r"the model has experts \(model.layers.0.mlp.experts"),
        (narrow, "the model's heads have size 16; vLLM's attention on CPUs takes 32, 64"),
        (unheard, "which knows no Unheard"),
    ],
)
async def test_a_model_that_cannot_be_handed_over_is_refused(build: Any, text: str) -> None:
    torch.manual_seed(0)
    module = build().eval()
    plain = copy.deepcopy(module)
    with pytest.raises(ConfigError, match=f"{text}.*use generation.engine=embedded"):
        async with opened_core("vllm", PolicyModel(module, "float32"), plain):
            pytest.fail("it was opened")
