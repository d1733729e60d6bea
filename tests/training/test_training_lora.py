"""The split step with adapters: peft's gradient under any loss, a frozen base, state that comes back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import (
    LOSS,
    MAX_LENGTH,
    STREAMED,
    VOCABULARY,
    make_group,
    microbatches,
    oracle_gradient,
    tiny_module,
    train_step,
)
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import LoraConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import ConfigError
from asyncrl.models.parameters.lora import describe_adapted
from asyncrl.models.parameters.merge import Merge
from asyncrl.models.policy import PolicyModel
from asyncrl.training.snapshot import take_snapshot
from asyncrl.training.trainer import TorchTrainer

LORA = LoraConfig(rank=3, alpha=5)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def trainer_of(dtype: str = "float64", rank: int = 3, reference: bool = False, kind: str = "llama") -> TorchTrainer:
    """With adapters that are not zero."""
    settings = LORA.model_copy(update={"rank": rank})
    policy = PolicyModel(tiny_module(kind), dtype, lora=settings, seed=2)
    generator = torch.Generator().manual_seed(7)
    for _, master in policy.flat.named_masters():
        master.add_(torch.randn(master.shape, generator=generator, dtype=torch.float64).to(master), alpha=0.2)
    policy.flat.refresh()
    config = TrainConfig(lr=0.05, grad_clip=None)
    return TorchTrainer(policy, config, max_completion_length=MAX_LENGTH, needs_reference=reference)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", STREAMED)
def test_split_step_gives_the_adapters_the_gradient_of_pefts_own_forward(
    name: str, kind: str, exact_norms: None
) -> None:
    peft = pytest.importorskip("peft")
    rng = np.random.default_rng(4)
    groups = [make_group(rng, i, masked=(1,) if i == 2 else (), holes=i == 1) for i in range(4)]
    loss = build_loss(name, entropy_coef=0.05)
    core = trainer_of(kind=kind)
    module = tiny_module(kind).double().requires_grad_(False)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM")
    oracle = peft.get_peft_model(module, config)
    masters = dict(core.policy.flat.named_masters())
    for own, parameter in oracle.named_parameters():
        if parameter.requires_grad:
            parameter.data = masters[own.replace(".default.", ".")].clone()
    expected, gradients = oracle_gradient(oracle, groups, loss)
    pieces = [m for i in (2, 0, 3, 1) for m in pack_groups([groups[i]], 25)]
    assert len(pieces) > 4
    result = train_step(core, pieces, loss)
    assert result.loss == pytest.approx(expected, rel=1e-10, abs=1e-10)
    found = dict(core.policy.flat.named_grads())
    compared = {own.replace(".default.", "."): g for own, g in gradients.items() if "lora_" in own}
    assert compared.keys() == found.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, compared[key], rtol=1e-9, atol=1e-10, msg=key)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_the_adapters_and_the_merged_layers_and_nothing_else(dtype: str) -> None:
    core = trainer_of(dtype, reference=True)
    policy = core.policy
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    start = core.compute_logprobs(microbatches()[0])
    assert train_step(core).version == 1
    moved = {name for name, p in policy.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "_proj" in name}
    assert {p.dtype for p in policy.module.parameters()} == {policy.dtype}
    # the reference is the model as it was at the start, adapters included
    assert not np.array_equal(core.compute_logprobs(microbatches()[0]), start)
    assert np.array_equal(core.compute_logprobs(microbatches()[0], "reference"), start)


def test_state_comes_back_and_another_rank_is_refused(tmp_path: Path) -> None:
    first, second, other = trainer_of("float32"), trainer_of("float32"), trainer_of("float32", rank=1)
    second.policy.flat.master.zero_()
    second.policy.flat.refresh()
    train_step(first)
    snapshot = take_snapshot(first)
    assert snapshot.adapter is not None and snapshot.adapter.keys() == snapshot.state["masters"].keys()
    second.load_state_dict(snapshot.state)
    assert second.version == 1 and torch.equal(second.policy.weights.working, first.policy.weights.working)
    batch = microbatches()[1]
    assert np.array_equal(second.compute_logprobs(batch), first.compute_logprobs(batch))
    with pytest.raises(ConfigError, match=r"set model\.lora\.rank to the rank of the saved adapter"):
        other.load_state_dict(snapshot.state)


def experts_of(family: str) -> PreTrainedModel:
    """Stacks [E, O, I] of Qwen, [E, I, O] of gpt-oss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2,
            "initializer_range": 0.3,
        }  # fmt: skip
        if family == "qwen":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, moe_intermediate_size=8, num_experts=4))
        return GptOssForCausalLM(GptOssConfig(**shape, num_local_experts=4, layer_types=["full_attention"] * 2))


@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
)  # peft's own, of its own making
@pytest.mark.parametrize(
    ("family", "modules", "parameters"),
    [
        ("qwen", ("all-linear",), ("experts.gate_up_proj", "experts.down_proj")),
        ("qwen", ("q_proj",), ("down_proj", "mlp.gate.weight")),
        ("gpt_oss", (), ("experts.down_proj", "experts.gate_up_proj")),
    ],
)
def test_experts_have_the_adapters_the_gradient_and_the_files_of_peft(
    family: str, modules: tuple[str, ...], parameters: tuple[str, ...], tmp_path: Path, exact_norms: None
) -> None:
    peft = pytest.importorskip("peft")
    groups = [make_group(np.random.default_rng(4), i) for i in range(3)]
    settings = LoraConfig(rank=3, alpha=5, target_modules=modules, target_parameters=parameters)
    policy = PolicyModel(experts_of(family), "float64", lora=settings, seed=2)
    merged = policy.weights.working.clone()
    generator = torch.Generator().manual_seed(7)
    for _, master in policy.flat.named_masters():
        master.add_(torch.randn(master.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    policy.flat.refresh()
    core = TorchTrainer(policy, TrainConfig(lr=0.05, grad_clip=None), max_completion_length=MAX_LENGTH)
    masters = dict(policy.flat.named_masters())

    # All that is linear there; peft itself takes all-linear for the experts, too, with twice the rank.
    names = ["q_proj", "k_proj", "v_proj", "o_proj"] if modules == ("all-linear",) else list(modules)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=names, target_parameters=list(parameters), task_type="CAUSAL_LM"
    )
    base = experts_of(family).double()
    base.set_experts_implementation("eager")
    if family == "gpt_oss":  # whose sinks torch's own attention does not know
        base.set_attn_implementation = lambda name: None  # type: ignore[method-assign]
    oracle = peft.get_peft_model(base, config)
    trained = {own.replace(".default.", "."): p for own, p in oracle.named_parameters() if p.requires_grad}
    assert {name: p.shape for name, p in trained.items()} == {name: m.shape for name, m in masters.items()}
    for name, parameter in trained.items():
        parameter.data = masters[name].clone()
    expected, gradients = oracle_gradient(oracle, groups, LOSS)
    wanted = {own.replace(".default.", "."): value for own, value in gradients.items()}

    core.begin_train_step(LOSS)
    for group in groups:
        for piece in pack_groups([group], 25):
            core.train_microbatch(piece)
    found = {name: grad.clone() for name, grad in policy.flat.named_grads()}
    result = core.finish_train_step()
    assert result.loss == pytest.approx(expected, rel=1e-5)  # routers compute their softmax in float32
    scale = result.grad_norm / float(torch.cat([g.flatten() for g in found.values()]).norm())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient * scale, wanted[name], rtol=1e-4, atol=1e-5)

    # Another process merges to the same bits.
    assert policy.lora is not None
    base = policy.lora.merge.unmerged(policy.weights.working, 5, merged.numel() - 1)
    assert torch.equal(base, merged[5:-1])
    Merge.of(json.loads(json.dumps(policy.lora.describe())), merged).merge(policy.flat.master, merged)
    assert torch.equal(merged, policy.weights.working)

    take_snapshot(core).write_pretrained(tmp_path, None, None)
    loaded = peft.PeftModel.from_pretrained(experts_of(family), tmp_path / "adapter").eval()
    ids = torch.arange(12)[None] % VOCABULARY
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, merged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"target_parameters": ("experts.up",)},
            "'experts.up' names no parameter; stacks of experts here are: model.layers.*.mlp",
        ),
        ({"target_parameters": ("q_proj.weight",)}, "has adapters already, by model.lora.target_modules"),
        ({"target_parameters": ("input_layernorm.weight",)}, "has 1 dimensions, and adapters need 2 or 3"),
    ],
)
def test_parameters_that_cannot_have_adapters_are_named(given: dict[str, tuple[str, ...]], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicyModel(experts_of("qwen"), "float32", lora=LoraConfig(rank=2, **given))
    assert words in str(caught.value)


def test_the_share_of_the_weights_with_adapters_is_told() -> None:
    module = experts_of("qwen")
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.ndim >= 2 and "embed" not in name}
    linear = sum(size for name, size in sizes.items() if "_proj.weight" in name)
    [line] = describe_adapted(module, LoraConfig(rank=2))
    assert f"adapters on {linear / sum(sizes.values()):.0%} of the weights that text goes through; without: " in line
    assert "model.layers.*.mlp.experts.gate_up_proj" in line and "lm_head.weight" in line
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    [line] = describe_adapted(module, LoraConfig(rank=2, target_parameters=stacks))
    assert "experts" not in line
