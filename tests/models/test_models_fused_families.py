"""The fused decoder against transformers' own eager forward and backward, row by row, family by family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from asyncrl.config.schema import LoraConfig
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.native.norms import replace_norms, rms_norm
from asyncrl.models.paths import FUSED, PACKED
from asyncrl.models.policy import PolicyModel, is_lookup

CONTEXT = 8  # what rotary scaling calls the original one; every row is longer
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=CONTEXT, mscale=1.0)
ROPE = dict(rope_type="default", rope_theta=1e4)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
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
    "llama3": lambda: build("Llama", rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: build("Qwen2"),
    "qwen3": lambda: build("Qwen3", head_dim=16),
    "mistral": lambda: build("Mistral", sliding_window=6),
    "gemma": lambda: build("Gemma", head_dim=16),
    "gemma2": lambda: build("Gemma2", head_dim=16, sliding_window=6, attn_logit_softcapping=3.0),
    "gemma3": lambda: build(
        "Gemma3Text", "Gemma3ForCausalLM", head_dim=16, sliding_window=6, query_pre_attn_scalar=9, layer_types=MIXED,
        rope_parameters={"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_type": "linear", "factor": 2.0}},
    ),
    "granite": lambda: build("Granite", residual_multiplier=0.22, attention_multiplier=0.3, embedding_multiplier=3.0),
    "smollm3": lambda: build("SmolLM3", no_rope_layers=[1, 0, 1]),
    "ministral3": lambda: build(
        "Ministral3", head_dim=16, sliding_window=None, rope_parameters={**YARN, "llama_4_scaling_beta": 0.5}
    ),
    "olmo2": lambda: build("Olmo2"),
    "olmo3": lambda: build("Olmo3", sliding_window=6, layer_types=MIXED),
    "exaone4": lambda: build("Exaone4", sliding_window=6, layer_types=MIXED),
    "phi3": lambda: build("Phi3", head_dim=16, sliding_window=None, partial_rotary_factor=0.5),
    "seed-oss": lambda: build("SeedOss", head_dim=16, residual_dropout=0.0, attention_dropout=0.0),
    "vaultgemma": lambda: build("VaultGemma", head_dim=16, sliding_window=6),
}  # fmt: skip
MOE: dict[str, Any] = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
# Experts are the model's own modules behind our half of the layer.
EXPERTS: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt-oss": lambda **more: build(
        "GptOss", head_dim=16, sliding_window=6, layer_types=MIXED, rope_parameters={**YARN, "truncate": False}, **MOE | more
    ),
    "qwen2-moe": lambda **more: build("Qwen2Moe", shared_expert_intermediate_size=16, **MOE | more),
    "qwen3-moe": lambda **more: build("Qwen3Moe", head_dim=16, mlp_only_layers=[1], **MOE | more),
    "mixtral": lambda **more: build("Mixtral", sliding_window=6, **MOE | more),
    "olmoe": lambda **more: build("Olmoe", **MOE | more),
    "flex-olmo": lambda **more: build("FlexOlmo", **MOE | more),
    "granite-moe": lambda **more: build("GraniteMoe", residual_multiplier=0.22, attention_multiplier=0.3, **MOE | more),
}  # fmt: skip
FAMILIES |= EXPERTS


def wide(family: str) -> PreTrainedModel:
    module = FAMILIES[family]().double()
    if family in EXPERTS:
        module.set_experts_implementation("eager")  # torch's grouped products know no float64
    return module


# Two trees: of three levels and of two.
PLAN = TreePlan([9, 5, 3, 2, 3, 4, 11], [-1, 0, 0, 2, 2, -1, 5])
POSITIONS = torch.tensor([*range(14), *range(9, 14), *range(12, 15), *range(15)])
ROWS = [[*range(14)], [*range(9), *range(14, 19)], [*range(9), *range(14, 17), *range(19, 22)], [*range(22, 37)]]
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
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' eager attention, whose softmax is a float32 one, written once more in float64."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask[..., : key.shape[2]]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    seen = torch.softmax(scores, -1)[..., : key.shape[2]]
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_transformers_own_untouched(family: str) -> None:
    module = FAMILIES[family]()
    expected = expected_of(copy.deepcopy(module))
    policy = PolicyModel(module)
    assert policy.fused is not None
    check(hidden_of(policy), expected, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_is_exact(family: str, float64_attention: str) -> None:
    """Against transformers with what it computes in float32 even then written in float64: norms and softmax. (That of most
    routers is left.) With activations that are kept, and then with checkpointing."""
    module = wide(family)
    reference = copy.deepcopy(module)
    replace_norms(reference)
    expected = expected_of(reference, float64_attention)
    policy = PolicyModel(module, "float64")
    assert policy.fused is not None
    for prepare in (lambda: None, policy.enable_checkpointing):
        prepare()
        check(hidden_of(policy), expected, 1e-6 if family in EXPERTS.keys() - {"gpt-oss"} else 1e-10)


# The families differ in their formulas, which the tests above hold against transformers. The other families run nightly.
NARROW = ("llama", "gemma3", "phi3", "gpt-oss", "qwen3-moe")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in NARROW else pytest.mark.slow) for each in FAMILIES]
)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(family: str) -> None:
    module = EXPERTS[family](num_experts_per_tok=4) if family in EXPERTS else FAMILIES[family]()  # no choice flips
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


class _WithSinks(LlamaAttention):
    """As in gpt-oss: one more score for each head, which has no value."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return super().forward(*arguments, **named, s_aux=self.sinks)


def test_sinks_have_gradients(float64_attention: str) -> None:
    module = build("Llama").double()
    for layer in module.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.randn(6, dtype=torch.float64))
        layer.self_attn.__class__ = _WithSinks
    reference = copy.deepcopy(module)
    replace_norms(reference)
    policy = PolicyModel(module, "float64")
    assert policy.fused is not None
    assert all(layer.sinks_gradient is not None for layer in policy.fused.layers)
    check(hidden_of(policy), expected_of(reference, float64_attention), 1e-10)


# What looks like a family that is known: rotary of neighbouring pairs (Ernie, Helium, GLM), other norms and halves side by side
# (Cohere), an MLP without a gate (Arcee), norms behind rotary (HunYuan), a gate of what attention gives (AFMoE), attention less
# attention (DiffLlama)
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "ernie": lambda: build("Ernie4_5"),
    "helium": lambda: build("Helium", head_dim=8),
    "glm": lambda: build("Glm", head_dim=16),
    "glm4": lambda: build("Glm4", head_dim=16),
    "cohere": lambda: build("Cohere"),
    "cohere2": lambda: build("Cohere2", sliding_window=6),
    "arcee": lambda: build("Arcee"),
    "hunyuan": lambda: build("HunYuanDenseV1", head_dim=16),
    "afmoe": lambda: build("Afmoe", head_dim=16, num_dense_layers=1, **MOE),
    "diffllama": lambda: build("DiffLlama"),
}


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_family_is_not_taken(family: str, dtype: str) -> None:
    """Nor with weights so small that next to nothing of a layer shows, in bfloat16."""
    module = OTHERS[family]()
    if dtype == "bfloat16":
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1e-3)
    assert PolicyModel(module, dtype).fused is None


def scaled_by_number(module: PreTrainedModel) -> None:
    """A layer that computes by its number, without a setting that says so."""
    layer = module.model.layers[2]
    layer.register_forward_hook(lambda _, arguments, out: out * 1.5)


def skipping(module: PreTrainedModel) -> None:
    """A decoder that hands the third layer what the first one had."""
    kept: list[Any] = []
    module.model.layers[0].register_forward_pre_hook(lambda _, arguments: kept.append(arguments[0]))
    module.model.layers[2].register_forward_pre_hook(lambda _, arguments: (arguments[0] + kept[-1], *arguments[1:]))


def unknown_setting(module: PreTrainedModel) -> None:
    module.model.layers[1].self_attn.clip_qkv = 8.0


def unknown_buffer(module: PreTrainedModel) -> None:
    module.model.layers[1].mlp.register_buffer("scale", torch.ones(1))


def dropping_out(module: PreTrainedModel) -> None:
    module.model.layers[1].mlp.add_module("dropout", nn.Dropout(0.1))


def unknown_part(module: PreTrainedModel) -> None:
    module.model.layers[1].extra = nn.Linear(4, 4)


class _OtherRotary(nn.Module):
    """Of the family's name, and turning the two numbers of a pair by different angles."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        (cos, sin), (_, more) = self.inner(x, position_ids), self.inner(x, 2 * position_ids)
        half = sin.shape[-1] // 2
        return cos, torch.cat([sin[..., :half], more[..., half:]], -1)


def other_rotary(module: PreTrainedModel) -> None:
    module.model.rotary_emb = _OtherRotary(module.model.rotary_emb)


CHANGES = [scaled_by_number, skipping, unknown_setting, unknown_buffer, dropping_out, unknown_part, other_rotary]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_not_taken_and_keeps_its_own_forward(change: Callable[[PreTrainedModel], None]) -> None:
    module = build("Llama")
    assert PolicyModel(copy.deepcopy(module)).fused is not None
    plain = copy.deepcopy(module)
    change(module)
    change(plain)
    policy = PolicyModel(module)
    assert policy.fused is None
    with torch.no_grad():
        hidden = policy.hidden(TOKENS[:7], torch.arange(7), TreePlan([7]))
        expected = plain.eval().model(input_ids=TOKENS[None, :7]).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_never_outlive_the_weights(dtype: str) -> None:
    """A new version, a swapped buffer and a hand in a parameter all show in the next product."""
    policy = PolicyModel(build("Llama"), dtype)

    def logits(of: PolicyModel) -> Tensor:
        with torch.no_grad():
            return of.logits(of.hidden(TOKENS, POSITIONS, PLAN)).double()

    def fresh() -> Tensor:
        """The same weights in a policy that has packed nothing yet."""
        model = build("Llama")
        model.load_state_dict(policy.host_state())
        return logits(PolicyModel(model.float(), dtype))

    before = logits(policy)
    policy.flat.master.mul_(1.5)
    policy.advance()
    assert torch.equal(logits(policy), fresh()) and not torch.equal(logits(policy), before)
    policy.flat.bind(policy.flat.working.clone().mul_(0.5))
    swapped = logits(policy)
    policy.flat.bind(policy.flat.working)
    assert not torch.equal(swapped, fresh()) and torch.equal(logits(policy), fresh())
    with torch.no_grad():
        policy.module.lm_head.weight.add_(0.25)
        policy.module.model.layers[2].mlp.down_proj.weight.add_(0.25)
    assert torch.equal(logits(policy), fresh())


@pytest.mark.parametrize("family", ["gemma3", "phi3", "granite", "gpt-oss", "qwen2-moe"])
def test_adapters_train_in_it(family: str) -> None:
    """Their gradients are those of the packed path."""
    found = []
    for path in (FUSED, PACKED):
        policy = PolicyModel(wide(family), "float64", lora=LoraConfig(rank=2, alpha=4.0), path=path)
        generator = torch.Generator().manual_seed(3)
        for name, master in policy.flat.named_masters():
            if "lora_B" in name:
                master.copy_(torch.randn(master.shape, generator=generator, dtype=torch.float64))
        policy.advance()
        found.append(hidden_of(policy))
    check(found[0], found[1], 1e-6 if family == "qwen2-moe" else 1e-10)  # its router's softmax is a float32 one


def test_only_plain_norms_are_replaced() -> None:
    """Not where the module takes a gate, norms in groups, or scales otherwise; and nothing is called that may not be."""
    module = nn.ModuleDict(
        {
            "plain": LlamaRMSNorm(48),
            "offset": Gemma3RMSNorm(48),
            "gated": Qwen3NextRMSNormGated(48),
            "bamba": BambaRMSNormGated(48, 12),
            "groups": Zamba2RMSNormGated(48, 4),
            "mamba": MambaRMSNormGated(48, 12),
            "raising": _RaisingRMSNorm(48),
            "twice": _TwiceRMSNorm(48),
        }
    )
    before = {name: type(part) for name, part in module.items()}
    assert replace_norms(module) == 2
    assert [module[name].offset for name in ("plain", "offset")] == [0.0, 1.0]
    assert all(type(module[name]) is before[name] for name in ("gated", "bamba", "groups", "mamba", "raising", "twice"))


def test_a_scaled_embedding_is_looked_up_like_any_other() -> None:
    """Its gradient goes straight into the buffer, without a dense one of the whole vocabulary."""
    module = FAMILIES["gemma"]()
    policy = PolicyModel(module, "bfloat16")
    dense: list[Tensor] = []
    module.get_input_embeddings().register_forward_hook(lambda _, arguments, out: dense.append(out))
    hidden_of(policy)
    assert not dense
    embedding = module.get_input_embeddings()
    assert is_lookup(embedding)
    embedding.forward = lambda tokens: torch.nn.functional.embedding(tokens, embedding.weight) ** 2
    assert not is_lookup(embedding)


class _RaisingRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise LookupError("outside of its model")


class _TwiceRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        # With weights of one it gives what an offset of one does.
        return 2 * super().forward(hidden_states)


@pytest.mark.parametrize(("norm", "constant"), [(Gemma3RMSNorm, 0.0), (LlamaRMSNorm, 1.0)])
def test_a_replaced_norm_computes_what_it_did(norm: type[nn.Module], constant: float) -> None:
    """In bfloat16 within one rounding of transformers' own; in float64 exactly, with a weight that bfloat16 would lose."""
    own = norm(48)
    with torch.no_grad():
        own.weight.copy_(constant + torch.randn(48) * 1e-3)
    x = torch.randn(7, 48)
    replaced = nn.ModuleList([copy.deepcopy(own)])
    assert replace_norms(replaced) == 1
    with torch.no_grad():
        narrow, expected = (part.to(torch.bfloat16)(x.bfloat16()).float() for part in (replaced[0], own))
    assert float(((narrow - expected).abs() / expected.abs()).max()) <= 2**-7
    weight = (1 - constant) + own.weight.double()
    wide = copy.deepcopy(replaced[0]).double()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + wide.eps).rsqrt() * weight
    torch.testing.assert_close(wide(x.double()), exact, rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(
        lambda x, w: rms_norm(x, w, 1e-5, 1 - constant),
        (x[:2].double().requires_grad_(), weight.detach().requires_grad_()),
    )
