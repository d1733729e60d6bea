"""Our attention stands in transformers' interface, or the model is refused: what keeps its own attention, and what a layer hands to
ours that ours does not act on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTJForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from small_models import small_config, small_model

from asyncrl.errors import ConfigError
from asyncrl.models.attention.interface import IMPLEMENTATION, register
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.paths import PACKED, PLAIN
from asyncrl.models.policy import PolicyModel, set_attention

SIZES: dict[str, Any] = dict(
    vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
# They have attention of their own: packed rows would see each other, and transformers only logs a warning.
OUTSIDE: tuple[str, ...] = ("gpt_neo", "falcon", "bloom", "mpt", "openai-gpt", "xglm", "gpt_neox_japanese", "xlm")
INSIDE: tuple[str, ...] = (
    "llama", "gpt2", "gpt_neox", "opt", "ctrl", "biogpt", "persimmon", "gemma3_text", "starcoder2",
)  # fmt: skip
MOVED = ("codegen", "gptj")  # attend through the interface from transformers 5.24 on
if GPTJForCausalLM._supports_attention_backend:
    INSIDE += MOVED
else:
    OUTSIDE += MOVED


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def packed_logits(policy: PolicyModel, tokens: Tensor, lengths: tuple[int, int]) -> Tensor:
    """[T, V] of two rows, one behind the other."""
    first, second = lengths
    positions = torch.cat([torch.arange(first), torch.arange(second)])
    with torch.no_grad():
        return policy.logits(policy.hidden(tokens, positions, TreePlan([first, second])))


# -- whose attention it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_model_that_keeps_its_own_attention_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"keeps its own attention .*not use transformers' attention interface"):
        PolicyModel(small_model(name, 0), path=PACKED)


@pytest.mark.parametrize("name", OUTSIDE[:4])
def test_such_a_model_is_run_as_it_is_on_the_plain_path(name: str) -> None:
    """Its own attention over rows of their own: nothing of ours is asked for."""
    module = small_model(name, 0)
    tokens = torch.arange(3, 20)
    with torch.no_grad():
        own = torch.cat([module(input_ids=row[None], use_cache=False).logits[0] for row in tokens.split([9, 8])])
    policy = PolicyModel(module, path=PLAIN[1])
    assert policy.config._attn_implementation == "eager"
    torch.testing.assert_close(packed_logits(policy, tokens, (9, 8)), own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", INSIDE)
def test_the_attention_of_every_part_is_ours_and_packed_rows_do_not_see_each_other(name: str) -> None:
    module = small_model(name, 0)
    tokens = torch.arange(3, 20)
    with torch.no_grad():
        own = torch.cat([module(input_ids=row[None], use_cache=False).logits[0] for row in tokens.split([9, 8])])
    policy = PolicyModel(module, path=PACKED)
    parts = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    assert {part.config._attn_implementation for part in parts} == {IMPLEMENTATION}
    torch.testing.assert_close(packed_logits(policy, tokens, (9, 8)), own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "second"])
def test_a_part_that_did_not_take_our_attention_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """transformers says nothing, and the configuration of that part says what it was."""
    module = llama()
    parts = {"LlamaForCausalLM": module, "LlamaModel": module.model}
    if name == "second":  # of two parts of one class, the first
        parts["second"], module.other = module.model, type(module.model)(LlamaConfig(**SIZES))
    for each in (module, *(part for part in module.modules() if part is not parts[name])):
        if isinstance(each, PreTrainedModel):
            each.config = LlamaConfig(**SIZES)
            each.config._attn_implementation = IMPLEMENTATION
    parts[name].config = LlamaConfig(**SIZES)
    parts[name].config._attn_implementation = "sdpa"
    monkeypatch.setattr(module, "set_attn_implementation", lambda implementation: None)
    with pytest.raises(ConfigError, match=rf"{type(parts[name]).__name__} keeps its own attention \(sdpa\)"):
        set_attention(module, IMPLEMENTATION)


def test_an_attention_that_transformers_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = llama()

    def refuse(implementation: str) -> None:
        raise ValueError("LlamaForCausalLM knows no such attention. More words")

    monkeypatch.setattr(module, "set_attn_implementation", refuse)
    with pytest.raises(
        ConfigError, match=r"does not take asyncrl attention: LlamaForCausalLM knows no such attention$"
    ):
        PolicyModel(module, path=PACKED)


# -- what layers hand to it ------------------------------------------------------------------------------------------------


def hand_on(attention: Any, **more: Any) -> None:
    """From now on the layer hands this to its attention as well."""
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **kwargs | more)


@pytest.mark.parametrize(
    "name", ["temperature", "position_bias", "head_mask", "alibi", "block_mask", "logit_scale", "cu_seq_lens_q"]
)
def test_what_attention_does_not_act_on_is_refused_by_name(name: str) -> None:
    policy = PolicyModel(llama(), path=PACKED)
    hand_on(policy.module.model.layers[1].self_attn, **{name: torch.ones(1)})
    with pytest.raises(ConfigError, match=f"LlamaAttention passes {name} to its attention, which asyncrl"):
        packed_logits(policy, torch.arange(3, 20), (9, 8))


@pytest.mark.parametrize("more", [{"head_mask": None}, {"use_cache": False}, {"is_causal": True}, {"labels": None}])
def test_what_changes_nothing_is_taken(more: dict[str, Any]) -> None:
    plain, policy = PolicyModel(llama(), path=PACKED), PolicyModel(llama(), path=PACKED)
    hand_on(policy.module.model.layers[1].self_attn, **more)
    tokens = torch.arange(3, 20)
    assert torch.equal(packed_logits(policy, tokens, (9, 8)), packed_logits(plain, tokens, (9, 8)))


def test_softcap_and_scaling_that_a_layer_hands_on_are_acted_on() -> None:
    plain = packed_logits(PolicyModel(llama(), path=PACKED), torch.arange(3, 20), (9, 8))
    for more in ({"softcap": 0.001}, {"s_aux": torch.full((4,), 9.0)}):
        policy = PolicyModel(llama(), path=PACKED)
        hand_on(policy.module.model.layers[1].self_attn, **more)
        assert float((packed_logits(policy, torch.arange(3, 20), (9, 8)) - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("more", [{"is_causal": False}, {"dropout": 0.1}])
def test_attention_that_is_not_causal_or_drops_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    policy = PolicyModel(llama(), path=PACKED)
    attention = modeling_llama.ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]

    def called(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs | more)

    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._local_mapping, IMPLEMENTATION, called)
    with pytest.raises(ConfigError, match="LlamaAttention has dropout or is not causal"):
        packed_logits(policy, torch.arange(3, 20), (9, 8))


def test_a_mask_of_the_models_own_is_refused() -> None:
    policy = PolicyModel(llama(), path=PACKED)
    hand_on(policy.module.model.layers[0].self_attn, attention_mask=torch.zeros(1, 1, 17, 17))
    with pytest.raises(ConfigError, match="LlamaAttention makes its own attention mask"):
        packed_logits(policy, torch.arange(3, 20), (9, 8))


def test_values_of_another_size_than_queries_are_refused() -> None:
    """Latent attention."""
    config = small_config("deepseek_v3")
    config.v_head_dim = 8
    module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"has queries .* and values"):
        packed_logits(PolicyModel(module, path=PACKED), torch.arange(3, 20), (9, 8))


def test_cudnn_attention_is_off() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
