"""Each path in bfloat16 against transformers' own eager forward of that dtype: what is sampled, and what is trained."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from generation_models import ATTENTION, SIZES, generate_all, opened, plain_logprobs, request
from support.trajectories import trajectory
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3MoeConfig,
)

from asyncrl.data.packing import pack_groups
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.training.passes import PolicyForward
from asyncrl.types import Group, Prompt, Ticket

MEAN, WORST = 0.04, 0.36  # nats by which transformers and vLLM differ in bfloat16
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# All experts of a layer, so that none is chosen by rounding.
ALL: dict[str, Any] = {"num_experts_per_tok": 4, "head_dim": 16, "max_position_embeddings": 4096}
FAMILIES: dict[str, tuple[Any, ModelPath]] = {
    "llama": (LlamaConfig(**ATTENTION), FUSED),
    "gemma-3": (Gemma3TextConfig(**ATTENTION, head_dim=16, sliding_window=6, layer_types=MIXED), FUSED),
    "gpt-oss": (GptOssConfig(**ATTENTION, **ALL, num_local_experts=4, sliding_window=6, layer_types=MIXED), FUSED),
    "qwen3-moe": (Qwen3MoeConfig(**ATTENTION, **ALL, num_experts=4, moe_intermediate_size=32), FUSED),
    "llama through its own layers": (LlamaConfig(**ATTENTION), PACKED),
    "cohere-2": (Cohere2Config(**ATTENTION, sliding_window=6, layer_types=MIXED), PACKED),
    "gpt-2": (GPT2Config(**SIZES | {"n_head": 6, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}), PACKED),
    "qwen3-moe through its own layers": (
        Qwen3MoeConfig(**ATTENTION, **ALL, num_experts=4, moe_intermediate_size=32),
        PACKED,
    ),
    "lfm2": (
        Lfm2Config(**ATTENTION, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
        PLAIN[1],
    ),
    "bloom": (BloomConfig(**(SIZES | {"n_layer": 3, "n_head": 6})), PLAIN[1]),
    "mamba": (MambaConfig(**SIZES, state_size=8), PLAIN[1]),
}  # fmt: skip


def microbatch(asked: list[Any], answers: list[Any]) -> Any:
    """Pairs of completions behind one prompt."""
    groups = []
    for number in range(len(asked) // 2):
        rows = []
        for member in range(2):
            wanted, answer = asked[2 * number + member], answers[2 * number + member]
            tokens, before = np.concatenate([wanted.prompt_ids, answer.token_ids]), wanted.prompt_ids.size
            logprobs = np.concatenate([np.zeros(before), answer.logprobs])
            rows.append(trajectory(number, member, 2, tokens, prompt_length=before, logprob=logprobs))
        prompt = Prompt(number, asked[2 * number].prompt_ids, "", {})
        groups.append((Group(Ticket(number, 0, 0), prompt, tuple(rows)), np.zeros(2)))
    (batch,) = pack_groups(groups, 4096)
    return batch


@pytest.mark.parametrize("family", FAMILIES)
async def test_bfloat16_is_close_to_the_eager_forward_of_the_same_dtype(family: str) -> None:
    config, path = FAMILIES[family]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    plain = copy.deepcopy(module).to(torch.bfloat16)
    policy = PolicyModel(module, "bfloat16", path=path)
    asked = [
        request(8 + 3 * group, 2 * group + member, prefix_key=str(group), max_tokens=16 - 5 * member)
        for group in range(4)
        for member in range(2)
    ]
    async with opened(policy, max_sequences=6, max_context=40, prefill_tokens=16) as run:
        answers = await generate_all(run.engine, asked)
    expected = [plain_logprobs(plain, wanted, answer) for wanted, answer in zip(asked, answers, strict=True)]
    sampled = np.concatenate([np.abs(answer.logprobs - own) for answer, own in zip(answers, expected, strict=True)])
    assert sampled.mean() < MEAN and sampled.max() < WORST

    batch = microbatch(asked, answers)
    with torch.no_grad():
        found = PolicyForward(policy)(batch)[0].float().numpy()
    rows = [2 * int(group) + int(member) for group, member in zip(batch.group_ids, batch.members, strict=True)]
    trained = np.abs(found - np.concatenate([expected[row] for row in rows]))
    assert trained.mean() < MEAN and trained.max() < WORST
