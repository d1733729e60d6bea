"""Adapters against peft itself: the same log-probs and gradients, files that it loads, and a merge that never drifts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config.schema import LoraConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.head.logprobs import token_logprobs
from asyncrl.models.loading import adapter_sizes, load_policy
from asyncrl.models.native.norms import replace_norms
from asyncrl.models.parameters import lora as lora_module
from asyncrl.models.parameters.lora import AdaptedLinear, find_targets
from asyncrl.models.policy import PolicyModel

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
TARGETS = {"all": ("all-linear",), "some": ("q_proj", "v_proj", "down_proj"), "one": ("model.layers.1.mlp.up_proj",)}
COUNT = 17
# peft asks transformers by a name that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def module_of(family: str = "llama") -> Any:
    torch.manual_seed(3)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def case(
    dtype: str = "float64", targets: str = "all", family: str = "llama", move: bool = True
) -> tuple[PolicyModel, Any]:
    """A policy with adapters that are not zero, and a copy of its base."""
    module = module_of(family).to(torch.float64 if dtype == "float64" else torch.float32)
    base = copy.deepcopy(module)
    replace_norms(base)  # transformers computes them in float32
    settings = LoraConfig(rank=4, alpha=6, target_modules=TARGETS[targets])
    policy = PolicyModel(module, dtype, lora=settings, seed=5)
    if move:
        generator = torch.Generator().manual_seed(7)
        for _, master in policy.flat.named_masters():
            master.add_(torch.randn(master.shape, generator=generator, dtype=torch.float64).to(master), alpha=0.1)
        policy.advance()
    return policy, base


def tokens_and_weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(1, 61, (COUNT,), generator=generator), torch.randn(COUNT - 1, generator=generator).double()


def logprobs(policy: PolicyModel, tokens: torch.Tensor, project: bool = True) -> torch.Tensor:
    hidden = policy.hidden(tokens, torch.arange(COUNT), TreePlan([COUNT]))
    found, _ = token_logprobs(
        hidden[:-1], policy.head.weight, tokens[1:], torch.ones(COUNT - 1), grad_buffer=policy.head_gradient,
        project=policy.project if project else None,
    )  # fmt: skip
    return found


def plain_logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)


def with_peft(base: Any, policy: PolicyModel) -> Any:
    """peft's own model of the same adapters."""
    peft = pytest.importorskip("peft")
    assert policy.lora is not None
    found = peft.get_peft_model(base, lora_module._peft_config(policy.lora.config, None))
    own = {name.replace(".default.", "."): p for name, p in found.named_parameters() if "lora_" in name}
    assert own.keys() == set(policy.flat.names)
    with torch.no_grad():
        for name, master in policy.flat.named_masters():
            own[name].data = master.clone()
            own[name].requires_grad_(True)
    return found, own


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("path", ["fused", "transformers"])
def test_log_probs_and_gradients_are_those_of_peft(path: str, family: str, targets: str) -> None:
    policy, base = case(targets=targets, family=family)
    assert policy.fused is not None
    if path == "transformers":
        policy.fused = None
    peft_model, own = with_peft(base, policy)
    tokens, weights = tokens_and_weights()
    expected = plain_logprobs(peft_model, tokens)
    (expected * weights).sum().backward()
    policy.flat.zero_grad()
    for _ in range(2):  # gradients add up over microbatches
        found = logprobs(policy, tokens)
        (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for name, gradient in policy.flat.named_grads():
        assert own[name].grad.abs().max() > 0
        torch.testing.assert_close(gradient, 2 * own[name].grad, rtol=1e-10, atol=1e-10)
    assert all(parameter.grad is None for parameter in policy.weights.parameters)  # the base is frozen


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_adapters_at_zero_are_the_base_model(dtype: str) -> None:
    policy, _ = case(dtype, move=False)
    plain = PolicyModel(module_of().to(torch.float64 if dtype == "float64" else torch.float32), dtype)
    tokens, _ = tokens_and_weights()
    with torch.no_grad():
        assert torch.equal(logprobs(policy, tokens), logprobs(plain, tokens))
    assert {parameter.dtype for parameter in policy.module.parameters()} == {policy.dtype}
    assert policy.flat.master.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert sum(p.numel() for p in policy.flat.parameters) == 2 * 4 * (2 * (48 + 48) + 2 * (48 + 16) + 3 * (48 + 80))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_narrow_dtypes_stay_near_peft_in_float64(dtype: str, tolerance: float) -> None:
    """Both halves: log-probs without a graph (what the sampler reads, packed weights) and with one, and the gradients."""
    policy, base = case(dtype)
    peft_model, own = with_peft(base.double(), policy)
    for parameter in own.values():
        parameter.data = parameter.data.double()
    tokens, weights = tokens_and_weights()
    expected = plain_logprobs(peft_model, tokens)
    (expected * weights).sum().backward()
    policy.flat.zero_grad()
    with torch.no_grad():
        sampled = logprobs(policy, tokens)
    trained = logprobs(policy, tokens)
    (trained * weights.float()).sum().backward()
    assert (sampled - trained.detach()).abs().max() <= 1e-4
    assert (sampled - expected).abs().max() <= tolerance
    found = torch.cat([gradient.flatten().double() for _, gradient in policy.flat.named_grads()])
    oracle = torch.cat([own[name].grad.flatten() for name in policy.flat.names])
    assert (found - oracle).norm() <= tolerance * oracle.norm()


def test_merging_anew_never_drifts() -> None:
    policy, base = case("float32")
    assert policy.lora is not None
    for _ in range(30):
        policy.flat.master.mul_(-1.3)
        policy.advance()
    policy.flat.master.zero_()
    policy.advance()
    for (name, found), (_, expected) in zip(
        policy.module.named_parameters(), base.named_parameters(), strict=True
    ):  # a merge in place would have left rounding errors here
        assert torch.equal(found, expected), name


def test_files_load_in_peft_and_merged_in_transformers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    policy, base = case("float32")
    assert policy.lora is not None
    policy.save_pretrained(tmp_path / "merged")
    policy.lora.write_adapter(tmp_path / "adapter", policy.lora.host_state(), "base/model")
    tokens, _ = tokens_and_weights()
    with torch.no_grad():
        expected = logprobs(policy, tokens)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        for model in (merged, adapted):
            torch.testing.assert_close(plain_logprobs(model, tokens), expected, rtol=0, atol=1e-4)
        assert not torch.allclose(plain_logprobs(module_of(), tokens), expected, atol=1e-2)
    own = {n.replace(".default.", "."): p for n, p in adapted.named_parameters() if "lora_" in n}
    for name, master in policy.flat.named_masters():
        assert torch.equal(own[name], master), name
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == "base/model"


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_porj",), "names no module"),
        (("lm_head",), "lm_head, which is no plain linear layer"),
        (("embed_tokens",), "no plain linear layer"),
        (("q_proj", "mlp"), "no plain linear layer"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_targets(module_of(), LoraConfig(rank=2, target_modules=targets))


def test_the_loader_builds_it_and_counts_it_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    module_of("qwen2").save_pretrained(tmp_path)
    (tmp_path / "built.py").write_text(
        f"from transformers import AutoModelForCausalLM\n"
        f"def build(seed):\n    return AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}), object()\n"
    )
    settings = LoraConfig(rank=3, target_modules="v_proj")
    config = ModelConfig(path=f"{tmp_path}/built.py:build", dtype="float32", lora=settings)
    first, again, other = (load_policy(config, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.flat.master, again.flat.master) and not torch.equal(first.flat.master, other.flat.master)
    assert type(first.module.model.layers[0].self_attn.v_proj) is AdaptedLinear
    plain = ModelConfig(path=str(tmp_path), dtype="float32", lora=settings)
    assert adapter_sizes(plain) == (sum(p.numel() for p in first.flat.parameters), 2 * 48 * 16)
    assert adapter_sizes(ModelConfig(path=str(tmp_path))) == (0, 0)
    monkeypatch.setattr(lora_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '.*\[lora\]'"):
        load_policy(config)
