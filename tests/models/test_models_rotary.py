"""Rotary frequencies that follow the length of a row are chosen once: every row is computed as transformers computes a long one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.trajectories import trajectory
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from asyncrl.data.packing import pack_groups
from asyncrl.generation.embedded.engine import open_core
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.rotary import describe, frequencies_differ, hold_frequencies, original_context
from asyncrl.training.passes import PolicyForward
from asyncrl.types import FinishReason, GenerationRequest, Group, Prompt, SamplingParams, Ticket

CONTEXT, LONGEST, PROMPT = 16, 40, 6
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
    "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": CONTEXT,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def longrope() -> PretrainedConfig:
    return Phi3Config(
        **SMALL, max_position_embeddings=64, original_max_position_embeddings=CONTEXT, rope_parameters=dict(LONG)
    )


def dynamic() -> PretrainedConfig:
    return LlamaConfig(**SMALL, max_position_embeddings=CONTEXT, rope_parameters=dict(DYNAMIC))


def by_layer() -> PretrainedConfig:
    rope = {"full_attention": dict(LONG), "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
    return Gemma3TextConfig(**SMALL, **layers, rope_parameters=rope)


CONFIGS = [longrope, dynamic, by_layer]


def built(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5) if parameter.ndim < 2 else torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def policy_of(config: PretrainedConfig, path: ModelPath) -> PolicyModel:
    module = built(config)
    assert hold_frequencies(module, LONGEST)
    return PolicyModel(module, path=path)


@torch.no_grad()
def own(model: PreTrainedModel, tokens: np.ndarray, length: int) -> Tensor:
    """Log-probs of the completion by the class itself, of a row that is continued to `length` tokens."""
    row = torch.zeros(length, dtype=torch.long)
    row[: tokens.size] = torch.from_numpy(tokens)
    logits_LV = model(input_ids=row[None], use_cache=False).logits[0, PROMPT - 1 : tokens.size - 1]
    return logits_LV.log_softmax(-1).gather(1, row[PROMPT : tokens.size, None])[:, 0]


def packed(rows: list[np.ndarray]) -> tuple[Any, list[int]]:
    """One microbatch, and which of its sequences each row is. Rows with the same prompt are a group."""
    prompts = [tuple(row[:PROMPT]) for row in rows]
    groups, places = [], {}
    for number, prompt in enumerate(dict.fromkeys(prompts)):
        members = [place for place, own in enumerate(prompts) if own == prompt]
        places.update({place: (number, member) for member, place in enumerate(members)})
        trajectories = tuple(
            trajectory(*places[place], len(members), rows[place], prompt_length=PROMPT, logprob=0.0)
            for place in members
        )
        group = Group(Ticket(number, 0, 0), Prompt(number, np.array(prompt, np.int32), ""), trajectories)
        groups.append((group, [0.0] * len(members)))
    batch = pack_groups(groups, 10_000)[0]
    order = [(int(group), int(member)) for group, member in zip(batch.group_ids, batch.members, strict=True)]
    return batch, [order.index(places[place]) for place in range(len(rows))]


@torch.no_grad()
def trained(policy: PolicyModel, rows: list[np.ndarray]) -> list[Tensor]:
    """Log-probs of each row's completion by one packed forward."""
    batch, sequences = packed(rows)
    logp_S, _ = PolicyForward(policy)(batch)
    return [logp_S[torch.from_numpy(batch.sequence == sequence)] for sequence in sequences]


def sample_rows() -> list[np.ndarray]:
    """Short, beginning of the longest, as long as a row can be, and in between."""
    random = np.random.default_rng(0)
    short, longest, between = (random.integers(1, 64, length) for length in (CONTEXT - 5, LONGEST, CONTEXT + 8))
    return [short, longest[: CONTEXT - 2], longest, between]


@pytest.mark.parametrize("path", [FUSED, PACKED, PLAIN[0]], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_row_is_turned_as_transformers_turns_the_longest(config: Any, path: ModelPath) -> None:
    rows, model, policy = sample_rows(), built(config()), policy_of(config(), path)
    expected = [own(model, row, LONGEST) for row in rows]
    found = trained(policy, rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    beginning = found[2][: found[1].numel()]
    torch.testing.assert_close(found[1], beginning, atol=1e-5, rtol=0)  # what follows changes nothing
    alone = [trained(policy, [row])[0] for row in rows]  # nor do the rows beside it
    torch.testing.assert_close(alone, found, atol=1e-5, rtol=0)
    other = own(model, rows[0], rows[0].size)  # by the class, where no long row is near
    assert float((other - found[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("path", [FUSED, PACKED, PLAIN[0]], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_sampler_grows_past_the_original_context_with_the_trainer(config: Any, path: ModelPath) -> None:
    policy = policy_of(config(), path)
    core = open_core(
        policy, max_sequences=2, max_context=LONGEST, kv_positions=2 * LONGEST, prefill_tokens=64, recompute=True
    )
    prompt = sample_rows()[0][:PROMPT].astype(np.int32)
    limits = LONGEST - PROMPT, CONTEXT - PROMPT - 2
    slots = [
        core.add(GenerationRequest(prompt, SamplingParams(max_tokens=limit, ignore_eos=True), seed, "same"), ())
        for seed, limit in enumerate(limits)
    ]
    ended = {}
    while len(ended) < len(slots):
        while core.needs_prefill:
            core.prefill()
        for slot in core.decode().ended:
            ended[slot] = core.sequences.generation(slot, FinishReason.LENGTH)
            core.remove(slot)
    rows = [np.concatenate([prompt, ended[slot].token_ids]) for slot in slots]
    sampled = [torch.from_numpy(ended[slot].logprobs) for slot in slots]
    torch.testing.assert_close(sampled, trained(policy, rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_within_the_original_context_keep_its_frequencies(config: Any) -> None:
    rows, model, module = sample_rows()[:2], built(config()), built(config())
    assert hold_frequencies(module, CONTEXT)
    found = trained(PolicyModel(module), rows)
    torch.testing.assert_close(found, [own(model, row, row.size) for row in rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_written_stays_as_it_was(config: Any) -> None:
    module = built(config())
    before = module.config.to_dict(), list(module.state_dict())
    assert hold_frequencies(module, LONGEST)
    assert (module.config.to_dict(), list(module.state_dict())) == before


def test_the_choice_is_said() -> None:
    assert original_context(longrope()) == original_context(dynamic()) == original_context(by_layer()) == CONTEXT
    assert describe(longrope(), CONTEXT).startswith("rotary (longrope): rows of up to 16 tokens stay within")
    assert describe(dynamic(), CONTEXT + 1).startswith(
        "rotary (dynamic): rows may grow to 17 tokens, past the original context"
    )
    assert describe(dynamic(), LONGEST).endswith("serve the model with the frequencies of rows of 40 tokens")
    assert describe(longrope(), LONGEST).endswith("serve the model with the frequencies of rows past 16 tokens")
    assert describe(LlamaConfig(**SMALL), 1 << 20) == ""


def test_runs_with_other_frequencies_are_told_apart() -> None:
    """longrope has two sets of factors; the base of `dynamic` is another for each length past the original context."""
    for config in (longrope(), by_layer(), dynamic()):
        assert not frequencies_differ(config, 4, CONTEXT)
        assert frequencies_differ(config, CONTEXT, CONTEXT + 1) and frequencies_differ(config, LONGEST, CONTEXT)
    assert not frequencies_differ(longrope(), CONTEXT + 1, LONGEST)
    assert frequencies_differ(dynamic(), CONTEXT + 1, LONGEST)
    assert not frequencies_differ(dynamic(), LONGEST, LONGEST)
    assert not frequencies_differ(LlamaConfig(**SMALL), 4, 1 << 20)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_the_model_ran_before_does_not_choose(config: Any) -> None:
    fresh, used = built(config()), built(config())
    with torch.no_grad():
        used(input_ids=torch.ones(1, 60, dtype=torch.int64))
    assert hold_frequencies(fresh, LONGEST) and hold_frequencies(used, LONGEST)
    row = sample_rows()[0]
    torch.testing.assert_close(own(used, row, row.size), own(fresh, row, row.size), atol=0, rtol=0)


def test_what_cannot_be_held_is_not() -> None:
    """Phi-3.5-MoE scales its tables by a number that it chooses in every forward."""
    rope = LONG | {"short_mscale": 1.1, "long_mscale": 1.3}
    module = built(PhimoeConfig(**SMALL, num_local_experts=2, max_position_embeddings=64, rope_parameters=rope))
    assert not hold_frequencies(module, LONGEST)
    assert hold_frequencies(module, CONTEXT)
