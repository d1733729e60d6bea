"""The fused decoder against transformers' own eager forward and backward, row by row, family by family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from asyncrl.models.norms import replace_norms
from asyncrl.models.policy import PolicyModel
from asyncrl.models.tree_attention import TreePlan

CONTEXT = 8  # what rotary scaling calls the original one; every row is longer
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=CONTEXT, mscale=1.0)
ROPE = dict(rope_type="default", rope_theta=1e4)
LAYERS = ["full_attention"] * 3
SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def build(family: str, model: str | None = None, **more: Any) -> PreTrainedModel:
    """Small, with parameters of which none is constant: a lost one would not show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    module: PreTrainedModel = getattr(transformers, model or f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: build("Llama"),
    "qwen2": lambda: build("Qwen2"),
    "qwen3": lambda: build("Qwen3", head_dim=16),
    "mistral": lambda: build("Mistral", sliding_window=None),
    "gemma": lambda: build("Gemma", head_dim=16),
    "gemma2": lambda: build(
        "Gemma2", head_dim=16, layer_types=LAYERS, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": lambda: build("Gemma3Text", "Gemma3ForCausalLM", head_dim=16, layer_types=LAYERS, query_pre_attn_scalar=9),
    "granite": lambda: build("Granite", residual_multiplier=0.22, attention_multiplier=0.3, embedding_multiplier=3.0),
    "smollm3": lambda: build("SmolLM3", no_rope_layers=[1, 0, 1]),
    "ministral3": lambda: build(
        "Ministral3", head_dim=16, sliding_window=None, rope_parameters={**YARN, "llama_4_scaling_beta": 0.5}
    ),
    "olmo2": lambda: build("Olmo2"),
    "phi3": lambda: build("Phi3", head_dim=16, sliding_window=None, partial_rotary_factor=0.5),
    "vaultgemma": lambda: build(
        "VaultGemma", head_dim=16, layer_types=LAYERS, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
}  # fmt: skip

# Two trees: prompts of 9 and 4 tokens, with suffixes of 5, 8 and 11.
PLAN = TreePlan([0, 22], [9, 4], [9, 14, 26], [5, 8, 11], [0, 0, 1])
POSITIONS = torch.tensor([*range(9), *range(9, 14), *range(9, 17), *range(4), *range(4, 15)])
ROWS = [[*range(14)], [*range(9), *range(14, 22)], [*range(22, 37)]]
TOKENS = torch.randint(1, 61, (37,), generator=torch.Generator().manual_seed(7))


def hidden_of(policy: PolicyModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states [T, E], and the gradients of all parameters for random weights of these."""
    policy.flat.zero_grad()
    hidden = policy.hidden(TOKENS, POSITIONS, PLAN)
    (hidden * weights_of(hidden)).sum().backward()
    return hidden.detach(), {name: grad.clone() for name, grad in policy.flat.named_grads()}


def weights_of(hidden: Tensor) -> Tensor:
    return torch.randn(37, 48, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(hidden.dtype)


def expected_of(module: PreTrainedModel, attention: str = "eager") -> tuple[Tensor, dict[str, Tensor]]:
    """The same by transformers, one row at a time; a shared prefix counts in the first of its rows."""
    module.set_attn_implementation(attention)
    hidden = torch.zeros(37, 48, dtype=module.dtype)
    seen: set[int] = set()
    for row in ROWS:
        out = module.eval().model(input_ids=TOKENS[row][None], position_ids=POSITIONS[row][None]).last_hidden_state[0]
        fresh = [place for place, token in enumerate(row) if token not in seen]
        own = [row[place] for place in fresh]
        (out[fresh] * weights_of(out)[own]).sum().backward()
        hidden[own] = out[fresh].detach()
        seen.update(row)
    return hidden, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _float64_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' eager attention, whose softmax is a float32 one, written once more in float64."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.softmax(scores + mask[..., : key.shape[2]], -1)
    return (seen @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


@pytest.fixture(scope="module")
def float64_attention() -> str:
    transformers.AttentionInterface.register("float64", _float64_attention)
    AttentionMaskInterface.register("float64", eager_mask)
    return "float64"


def check(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], tolerance: float
) -> None:
    """Of the norm of each tensor; of the largest, where one has next to no gradient."""
    assert (found[0].double() - expected[0].double()).norm() <= tolerance * expected[0].double().norm()
    largest = max(float(grad.double().norm()) for grad in expected[1].values())
    names = [name for name in found[1] if not name.startswith("lm_head")]
    assert len(names) > 10 and set(names) <= expected[1].keys()
    for name in names:
        own, other = found[1][name].double(), expected[1][name].double()
        assert other.abs().max() > 0, name
        assert float((own - other).norm()) <= tolerance * max(float(other.norm()), 1e-2 * largest), name


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_transformers_own_untouched(family: str) -> None:
    module = FAMILIES[family]()
    expected = expected_of(copy.deepcopy(module))
    policy = PolicyModel(module)
    assert policy.fused is not None
    check(hidden_of(policy), expected, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_float64_is_exact(family: str, checkpointing: bool, float64_attention: str) -> None:
    """Against transformers with what it computes in float32 even then written in float64: norms and softmax."""
    module = FAMILIES[family]().double()
    reference = copy.deepcopy(module)
    replace_norms(reference)
    expected = expected_of(reference, float64_attention)
    policy = PolicyModel(module, "float64")
    assert policy.fused is not None
    if checkpointing:
        policy.enable_checkpointing()
    check(hidden_of(policy), expected, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(family: str) -> None:
    module = FAMILIES[family]()
    exact = expected_of(copy.deepcopy(module).to(torch.bfloat16).float())
    own = expected_of(copy.deepcopy(module).to(torch.bfloat16))
    policy = PolicyModel(module, "bfloat16")
    assert policy.fused is not None
    found = hidden_of(policy)

    def error(values: tuple[Tensor, dict[str, Tensor]]) -> list[float]:
        pairs = [(values[0], exact[0])]
        pairs.append(
            tuple(torch.cat([part[1][name].double().flatten() for name in exact[1]]) for part in (values, exact))
        )
        return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]

    for ours, theirs in zip(error(found), error(own), strict=True):
        assert ours <= 1.25 * theirs < 0.2
