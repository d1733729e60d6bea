"""The fused decoder: the model's own numbers and gradients, only where the architecture is really this one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.policy import PolicyModel

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def qwen2() -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts biases at zero, where a lost one would not show
            torch.nn.init.normal_(parameter)
    return model


def qwen3() -> PreTrainedModel:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def scaled_rope() -> PreTrainedModel:
    rope = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    return llama(rope_parameters={**rope, "original_max_position_embeddings": 64}, attention_bias=True, mlp_bias=True)


FAMILY = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "llama3": scaled_rope}
# Two trees: prompts of 5 and 3 tokens, with suffixes of 4, 2 and 6.
PLAN = TreePlan([0, 11], [5, 3], [5, 9, 14], [4, 2, 6], [0, 0, 1])
POSITIONS = torch.tensor([*range(5), *range(5, 9), *range(5, 7), *range(3), *range(3, 9)])


def case(name: str, dtype: str = "float64") -> tuple[PolicyModel, torch.Tensor]:
    torch.manual_seed(3)
    model = FAMILY[name]().to(torch.float64 if dtype == "float64" else torch.float32)
    return PolicyModel(model, dtype), torch.randint(1, 61, (20,))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILY)
def test_numbers_and_gradients_are_those_of_the_model_itself(name: str, checkpointing: bool) -> None:
    policy, tokens = case(name)
    assert policy.fused is not None
    own = copy.copy(policy)
    own.fused = None  # through transformers
    weights = torch.randn(20, 48, dtype=torch.float64)
    found = []
    for model in (policy, own):
        policy.flat.zero_grad()
        if checkpointing and model is policy:
            policy.enable_checkpointing()
        hidden = model.hidden(tokens, POSITIONS, PLAN)
        (hidden * weights).sum().backward()
        found.append((hidden.detach(), policy.flat.grad.clone()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-10)
    assert found[0][1].abs().max() > 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 4e-2)])
def test_narrow_dtypes_stay_near_the_model_itself(name: str, dtype: str, tolerance: float) -> None:
    policy, tokens = case(name, dtype)
    assert policy.fused is not None
    own = copy.copy(policy)
    own.fused = None
    weights = torch.randn(20, 48).to(policy.dtype)
    found = []
    for model in (policy, own):
        policy.flat.zero_grad()
        hidden = model.hidden(tokens, POSITIONS, PLAN)
        (hidden * weights).sum().backward()
        found.append((hidden.detach().double(), policy.flat.grad.double().clone()))
    for fused, plain in zip(*found, strict=True):
        assert (fused - plain).norm() <= tolerance * plain.norm()


def partial() -> PreTrainedModel:
    """A layer with a part that the family does not have."""
    model = llama()
    model.model.layers[1].extra = torch.nn.Linear(4, 4)
    return model


class _OtherRotary(torch.nn.Module):
    """Of the family's name, and turning the two numbers of a pair by different angles."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        (cos, sin), (_, more) = self.inner(x, position_ids), self.inner(x, 2 * position_ids)
        half = sin.shape[-1] // 2
        return cos, torch.cat([sin[..., :half], more[..., half:]], -1)


def other_rotary() -> PreTrainedModel:
    model = llama()
    model.model.rotary_emb = _OtherRotary(model.model.rotary_emb)
    return model


@pytest.mark.parametrize("make", [partial, other_rotary])
def test_another_architecture_keeps_its_own_forward(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    policy = PolicyModel(model)
    assert policy.fused is None
    tokens = torch.randint(1, 61, (7,))
    with torch.no_grad():
        hidden = policy.hidden(tokens, torch.arange(7), TreePlan([0], [7]))
        expected = plain.model(input_ids=tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_never_outlive_the_weights(dtype: str) -> None:
    """A new version, a swapped buffer and a hand in a parameter all show in the next product."""
    policy, tokens = case("llama", dtype)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return policy.logits(policy.hidden(tokens, POSITIONS, PLAN)).double()

    def fresh() -> torch.Tensor:
        """The same weights in a policy that has packed nothing yet."""
        model = llama()
        model.load_state_dict(policy.host_state())
        other = PolicyModel(model.float(), dtype)
        with torch.no_grad():
            return other.logits(other.hidden(tokens, POSITIONS, PLAN)).double()

    before = logits()
    policy.flat.master.mul_(1.5)
    policy.advance()
    assert torch.equal(logits(), fresh()) and not torch.equal(logits(), before)
    reference = policy.flat.working.clone().mul_(0.5)
    policy.flat.bind(reference)
    swapped = logits()
    policy.flat.bind(policy.flat.working)
    assert not torch.equal(swapped, fresh()) and torch.equal(logits(), fresh())
    with torch.no_grad():
        policy.module.lm_head.weight.add_(0.25)
        policy.module.model.layers[2].mlp.down_proj.weight.add_(0.25)
    assert torch.equal(logits(), fresh())
