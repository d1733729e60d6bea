"""What a model does around its head: found by its own forward, and computed alike for sampling and training. The oracle is
transformers' untouched eager forward, and autograd in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTJConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    PhiConfig,
    PreTrainedModel,
    RobertaConfig,
)
from transformers.modeling_outputs import CausalLMOutput

from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.head.logprobs import SpareMemory, token_logprobs
from asyncrl.models.head.output import HeadTransform, decoder_of, head_transform
from asyncrl.models.paths import PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.3, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
EAGER = PLAIN[1]
SOFTCAP = dict(attn_logit_softcapping=None, layer_types=["full_attention"] * 2, head_dim=8, query_pre_attn_scalar=8)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
)
GPTJ = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, bos_token_id=0, eos_token_id=0)
FAMILIES: dict[str, tuple[Any, HeadTransform, ModelPath | None]] = {
    "gemma2": (Gemma2Config(**SIZES, **SOFTCAP, final_logit_softcapping=2.0), HeadTransform(1, 2.0), None),
    "gemma2, no cap": (Gemma2Config(**SIZES, **SOFTCAP, final_logit_softcapping=None), HeadTransform(), None),
    "granite": (GraniteConfig(**SIZES, logits_scaling=8.0), HeadTransform(0.125), None),
    "hyperclovax": (HyperCLOVAXConfig(**SIZES, logits_scaling=8.0), HeadTransform(8.0), None),
    "minicpm3": (MiniCPM3Config(**SIZES | LATENT, dim_model_base=4), HeadTransform(0.125), EAGER),
    "cohere": (CohereConfig(**SIZES, logit_scale=0.0625), HeadTransform(0.0625), None),
    "phi": (PhiConfig(**SIZES), HeadTransform(), None),
    "phi, tied": (PhiConfig(**SIZES, tie_word_embeddings=True), HeadTransform(), None),
    "gptj": (GPTJConfig(**GPTJ, initializer_range=0.3), HeadTransform(), EAGER),
}  # fmt: skip


def module_of(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    module: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[family][0]), attn_implementation="eager"
    )
    head = module.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return module.eval()


def policy_of(family: str, dtype: str = "float32", **more: Any) -> PolicyModel:
    return PolicyModel(module_of(family), dtype, path=FAMILIES[family][2], **more)


def hidden_of(policy: PolicyModel, tokens: Tensor) -> Tensor:
    return policy.hidden(tokens, torch.arange(len(tokens)), TreePlan([len(tokens)]))


TOKENS = torch.randint(1, 61, (17,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_untouched_model(family: str, dtype: str) -> None:
    plain = module_of(family).to(getattr(torch, dtype))
    policy = policy_of(family, dtype)
    assert policy.transform == FAMILIES[family][1]
    with torch.no_grad():
        theirs = plain(input_ids=TOKENS[None]).logits[0]
        hidden = hidden_of(policy, TOKENS)
        ours, bare = policy.logits(hidden), F.linear(hidden, policy.head.weight)
    changed = policy.transform != HeadTransform() or policy.head.bias is not None
    assert changed == (family != "gemma2, no cap") and ((ours - bare).abs().max() > 0.1) == changed
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("family", ["gemma2", "granite", "phi"])
def test_sampling_and_training_have_the_same_logits(family: str, dtype: str) -> None:
    policy, temperature = policy_of(family, dtype), torch.linspace(0.5, 1.5, 16)
    with torch.no_grad():
        hidden = hidden_of(policy, TOKENS)[:-1]
        logits = policy.logits(hidden)
        expected = (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1).gather(1, TOKENS[1:, None])[:, 0]
        arguments: dict[str, Any] = dict(bias_V=policy.head.bias, transform=policy.transform, chunk=5)
        for project in (policy.project, None):
            found, _ = token_logprobs(hidden, policy.head.weight, TOKENS[1:], temperature, **arguments, project=project)
            bound = {"float32": 2e-5, "bfloat16": 2e-5 if project else 0.05, "float64": 1e-12}[dtype]
            torch.testing.assert_close(found, expected, rtol=0, atol=bound)


S, E, V = 37, 6, 29


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """hidden, weight, bias, target, temperature: logits of up to 20."""
    generator = torch.Generator().manual_seed(0)
    shapes = (S, E), (V, E), (V,)
    parts = [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    target = torch.randint(0, V, (S,), generator=generator)
    return *(part.to(dtype).requires_grad_() for part in parts), target, torch.rand(S, generator=generator) + 0.5


def naive(inputs: tuple[Tensor, ...], transform: HeadTransform) -> tuple[Tensor, Tensor]:
    hidden, weight, bias, target, temperature = inputs
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(weight.dtype, torch.float32)) * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    logp = (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def total(logp: Tensor, entropy: Tensor, entropy_grad: bool) -> Tensor:
    weights = torch.linspace(-1, 2, S, dtype=logp.dtype)
    return (weights * logp).sum() + ((weights.square() * entropy).sum() if entropy_grad else 0)


TRANSFORMS = [HeadTransform(), HeadTransform(0.25), HeadTransform(1.0, 5.0), HeadTransform(0.5, 3.0)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("transform", "biased"), [(HeadTransform(), False), *((transform, True) for transform in TRANSFORMS)]
)
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize(("chunk", "keep_logits"), [(1, 0), (8, 0), (8, 1 << 30), (512, 0)])
def test_values_and_gradients_are_those_of_autograd(
    chunk: int, keep_logits: int, entropy_grad: bool, transform: HeadTransform, biased: bool
) -> None:
    """With gradients in buffers, and reported; in float64, and in float32 by the native kernels where they were built."""
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        hidden, weight, bias, target, temperature = case(dtype)
        leaves = [hidden, weight, bias] if biased else [hidden, weight]
        exact = [part.detach().double().requires_grad_() for part in leaves]
        expected = naive((*exact[:2], exact[2] if biased else None, target, temperature), transform)
        wanted = torch.autograd.grad(total(*expected, entropy_grad), exact)
        options: dict[str, Any] = dict(
            bias_V=bias if biased else None, transform=transform, chunk=chunk, keep_logits=keep_logits,
            entropy_grad=entropy_grad,
        )  # fmt: skip
        found = token_logprobs(hidden, weight, target, temperature, **options)
        assert found[1].requires_grad == entropy_grad
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=10 * bound)
        reported = torch.autograd.grad(total(*found, entropy_grad), leaves)
        buffers = [torch.ones(part.shape, dtype=dtype) for part in leaves[1:]]
        found = token_logprobs(
            hidden, weight, target, temperature, **options, grad_buffer=buffers[0],
            bias_grad=buffers[1] if biased else None,
        )  # fmt: skip
        total(*found, entropy_grad).backward()
        assert weight.grad is None and bias.grad is None and hidden.grad is not None
        for mine in (reported, (hidden.grad, *(buffer - 1 for buffer in buffers))):
            for ours, theirs in zip(mine, wanted, strict=True):
                assert ((ours - theirs).abs().max() <= bound * theirs.abs().max() * 10).item()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("transform", [HeadTransform(), HeadTransform(0.5, 3.0)])
def test_bfloat16_is_transformed_and_summed_in_float32(transform: HeadTransform) -> None:
    inputs = case(torch.bfloat16)
    hidden, weight, bias, target, temperature = inputs
    buffer, total_bias = torch.zeros(V, E), torch.zeros(V)
    options: dict[str, Any] = dict(bias_V=bias, transform=transform, grad_buffer=buffer, bias_grad=total_bias, chunk=8)
    for _ in range(300):  # a bfloat16 sum would have stopped growing long before
        logp, _ = token_logprobs(hidden, weight, target, temperature, **options)
        logp.sum().backward()
    expected, _ = naive(inputs, transform)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    wide = tuple(part.detach().double().requires_grad_() for part in inputs[:3])
    wanted = torch.autograd.grad(naive((*wide, target, temperature), transform)[0].sum(), wide[1:])
    for found, exact in zip((buffer, total_bias), wanted, strict=True):
        assert (found / 300 - exact).norm() < 0.02 * exact.norm()


def test_a_frozen_bias_has_no_gradient() -> None:
    hidden, weight, bias, target, temperature = case()
    bias = bias.detach()
    logp, _ = token_logprobs(hidden, weight, target, temperature, bias_V=bias)
    assert len(torch.autograd.grad(logp.sum(), (hidden, weight))) == 2 and bias.grad is None


def test_adapters_leave_the_bias_of_the_head_as_it_is(tmp_path: Path) -> None:
    policy = policy_of("phi", lora=LoraConfig(rank=2, alpha=4))
    before = policy.head.bias.detach().clone()
    assert policy.head_bias_gradient is None and before.any()
    for _, master in policy.flat.named_masters():
        master.add_(0.05)
    policy.advance()
    hidden = hidden_of(policy, TOKENS)
    token_logprobs(
        hidden[:-1], policy.head.weight, TOKENS[1:], torch.ones(16), bias_V=policy.head.bias,
        grad_buffer=policy.head_gradient, bias_grad=policy.head_bias_gradient,
    )[0].sum().backward()  # fmt: skip
    assert policy.flat.grad.any() and policy.head.bias.grad is None and torch.equal(policy.head.bias, before)
    policy.save_pretrained(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            merged(input_ids=TOKENS[None]).logits[0], policy.logits(hidden_of(policy, TOKENS)), rtol=1e-4, atol=1e-4
        )


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def test_a_name_in_a_configuration_proves_nothing() -> None:
    module = llama()
    module.config.logit_scale, module.config.final_logit_softcapping = 0.5, 30.0  # what Llama's forward does not read
    assert head_transform(module) == HeadTransform()
    module.config.logit_scale = float("nan")
    assert head_transform(module) == HeadTransform()


def test_no_candidate_changes_the_values_of_the_next_one() -> None:
    """In float64 all candidates read one tensor."""
    assert head_transform(module_of("granite").double()) == head_transform(module_of("granite")) != HeadTransform()


def after(change: Any) -> PreTrainedModel:
    """A model that does `change` to its logits."""

    class Changed(LlamaForCausalLM):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            output = super().forward(*arguments, **named)
            output.logits = change(output.logits)
            return output

    torch.manual_seed(0)
    return Changed(LlamaConfig(**SIZES))


def before(change: Any) -> PreTrainedModel:
    """A model that does `change` to what its head takes."""
    module = llama()
    module.lm_head.register_forward_pre_hook(lambda part, arguments: (change(arguments[0]),))
    return module


class Squashed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def squashed() -> PreTrainedModel:
    module = llama()
    module.lm_head.__class__ = Squashed
    return module


class Bypassed(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **named: Any) -> CausalLMOutput:
        hidden = self.model(input_ids, **named).last_hidden_state
        return CausalLMOutput(logits=F.linear(hidden, self.lm_head.weight))


def broken() -> PreTrainedModel:
    module = llama()
    module.model.norm.weight.data[0] = float("nan")
    return module


def configured(module: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    for name, value in settings.items():
        setattr(module.config, name, value)
    return module


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: after(lambda logits: logits * 0.5), "transforms its logits after the head.*which names none"),
        (lambda: after(lambda logits: logits + 0.1), "transforms its logits after the head"),
        (lambda: after(lambda logits: logits[..., :50]), "transforms its logits after the head"),
        (
            lambda: configured(after(lambda z: 31 * torch.tanh(z / 31)), final_logit_softcapping=30.0),
            r"transforms its logits after the head.*\{'final_logit_softcapping': 30.0\}",
        ),
        (
            lambda: configured(after(lambda z: (30 * torch.tanh(z / 30)) * 0.5), final_logit_softcapping=30.0, logit_scale=0.5),
            "transforms its logits after the head",  # capped first, scaled then
        ),
        (lambda: before(lambda hidden: hidden * 0.5), "transforms its last hidden states before the head"),
        (squashed, r"the head of LlamaForCausalLM \(Squashed\) is not a plain linear layer"),
        (lambda: Bypassed(LlamaConfig(**SIZES)), "the forward of Bypassed calls its head 0 times and its decoder 1 times"),
        (broken, "gives logits that are not finite"),
        (lambda: configured(AutoModelForCausalLM.from_config(roberta())), "before the head"),  # a layer and a norm
    ],
)  # fmt: skip
def test_what_is_not_a_product_and_a_known_transform_is_refused(build: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"model.path: .*{said}"):
        head_transform(build())


def roberta() -> RobertaConfig:
    sizes = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}
    return RobertaConfig(**sizes, is_decoder=True)


def test_a_factor_before_a_head_with_a_bias_is_refused() -> None:
    module = module_of("phi")
    module.config.logit_scale = 0.5
    module.lm_head.register_forward_pre_hook(lambda part, arguments: (arguments[0] * 0.5,))
    with pytest.raises(ConfigError, match="the head must have no bias"):
        head_transform(module)


def test_asking_leaves_the_model_as_it_was() -> None:
    module = module_of("gemma2")
    with torch.no_grad():
        expected = module(input_ids=TOKENS[None]).logits
        head_transform(module)
        assert torch.equal(module(input_ids=TOKENS[None]).logits, expected)
    assert not module.lm_head._forward_hooks and not module.model._forward_hooks
    policy = PolicyModel(module)
    assert head_transform(policy.module) == policy.transform  # with our attention in it


def test_the_decoder_of_llama_4_is_found() -> None:
    """transformers' `get_decoder` gives the model itself."""
    torch.manual_seed(0)
    module = Llama4ForCausalLM(
        Llama4TextConfig(
            **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, interleave_moe_layer_step=2
        )
    )
    assert module.get_decoder() is module and decoder_of(module) is module.model
    assert head_transform(module) == HeadTransform()


# -- memory, and other inputs -----------------------------------------------------------------------------------------------


def test_temperature_is_per_row_and_large_logits_stay_finite() -> None:
    hidden, weight, _, target, temperature = case()
    logp, _ = token_logprobs(hidden * 1e4, weight, target, temperature)
    assert torch.isfinite(logp).all()
    half = token_logprobs(hidden, weight, target, temperature * 0.5)[0]
    torch.testing.assert_close(half, token_logprobs(hidden * 2, weight, target, temperature)[0], rtol=0, atol=1e-12)


def test_no_rows() -> None:
    hidden, weight, _, target, temperature = case()
    logp, entropy = token_logprobs(hidden[:0], weight, target[:0], temperature[:0])
    (grad,) = torch.autograd.grad(logp.sum(), weight)
    assert logp.shape == entropy.shape == (0,) and not grad.any()


def test_never_more_logits_than_one_chunk_unless_all_of_them_fit() -> None:
    hidden, weight, _, target, temperature = case()
    for keep_logits, passes in ((0, 2), (S * V - 1, 2), (S * V, 1)):
        rows: list[int] = []

        def project(x: torch.Tensor, rows: list[int] = rows) -> torch.Tensor:
            rows.append(x.shape[0])
            return x @ weight.detach().t()

        logp, _ = token_logprobs(hidden, weight, target, temperature, chunk=8, keep_logits=keep_logits, project=project)
        logp.sum().backward()
        assert max(rows) == 8 and sum(rows) == passes * S


def test_logits_that_wait_never_share_memory() -> None:
    """Two forwards before the first backward: the second finds the spare memory lent out. Afterwards it is used again."""
    hidden, weight, _, target, temperature = (tensor.detach() for tensor in case())
    spare = SpareMemory()
    inputs = [(hidden * scale).requires_grad_() for scale in (1.0, 2.0)]
    losses = [token_logprobs(h, weight, target, temperature, spare=spare)[0].sum() for h in inputs]
    for loss in losses:
        loss.backward()
    for h in inputs:
        fresh = h.detach().requires_grad_()
        token_logprobs(fresh, weight, target, temperature)[0].sum().backward()
        assert torch.equal(h.grad, fresh.grad)
    first = spare.take(S, V, weight)
    spare.put_back(first)
    assert spare.take(S, V, weight).data_ptr() == first.data_ptr()
    assert spare.take(S, V, weight).data_ptr() != first.data_ptr()  # lent out


@pytest.mark.parametrize("keep_logits", [0, 1 << 30])
def test_backward_gives_the_memory_back(keep_logits: int) -> None:
    """Chunks that are computed again use what once waited: the two never lie beside each other."""
    hidden, weight, _, target, temperature = case()
    spare = SpareMemory()
    memory = spare.take(S, V, weight)
    place = memory.data_ptr()
    spare.put_back(memory)
    for _ in range(2):
        logp, _ = token_logprobs(hidden, weight, target, temperature, chunk=8, keep_logits=keep_logits, spare=spare)
        logp.sum().backward()
        again = spare.take(S, V, weight)
        assert again.data_ptr() == place
        spare.put_back(again)


def test_targets_may_be_strided_and_narrow() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16), torch.randn(41, 16)
    wide = torch.arange(0, 40, 5)
    expected = token_logprobs(hidden, weight, wide[::2].clone(), torch.ones(4))[0]
    assert torch.equal(token_logprobs(hidden, weight, wide[::2], torch.ones(4))[0], expected)
    assert torch.equal(token_logprobs(hidden, weight, wide[::2].int(), torch.ones(4))[0], expected)
