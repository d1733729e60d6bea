"""Checkpoints in a narrow dtype: mapped and not copied, cast on the device, and equal to a model that was loaded as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from asyncrl.config.schema import LoraConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.models import loading
from asyncrl.models.head.output import head_transform
from asyncrl.models.parameters.flat import FlatParameters, FlatWeights
from asyncrl.models.paths import PLAIN
from asyncrl.models.policy import PolicyModel

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 8},
    "granite": {"logits_scaling": 1.01, "embedding_multiplier": 3.0},
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "mamba": {"state_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}

EAGER = next(path for path in PLAIN if path.attention == "eager")


def save(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changed: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    module = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    module.save_pretrained(folder, **changed)
    return module  # type: ignore[no-any-return]  # transformers: Any


def load(folder: Path) -> PreTrainedModel:
    return loading.load_module(ModelConfig(path=str(folder)))[0]


def in_float32(folder: Path) -> PreTrainedModel:
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return module


def mapped_files(tensor: Tensor) -> list[str]:
    """The file in which the tensor's memory lies, if there is one."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        span, *_, name = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= tensor.data_ptr() < last:
            return [name] if name.endswith(".safetensors") else []
    return []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_narrow_checkpoint_equals_one_that_is_loaded_as_float32(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    save(tmp_path, family, dtype)
    module, wide = load(tmp_path), in_float32(tmp_path)
    assert {p.dtype for p in module.parameters()} <= {dtype, torch.float32}
    buffers, others = dict(module.named_buffers()), dict(wide.named_buffers())
    assert buffers.keys() == others.keys()
    for name, buffer in others.items():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name
    assert module.config.to_dict() == wide.config.to_dict()
    transforms = head_transform(module), head_transform(wide)
    assert transforms[0] == transforms[1]
    policies = [PolicyModel(each, "bfloat16", path=EAGER) for each in (module, wide)]
    assert policies[0].flat.master.dtype == torch.float32
    assert torch.equal(policies[0].flat.master, policies[1].flat.master)
    assert torch.equal(policies[0].flat.working, policies[1].flat.working)


def test_weights_are_mapped_until_the_policy_has_copied_them(tmp_path: Path) -> None:
    save(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    module = load(tmp_path)
    assert all(mapped_files(parameter) for parameter in module.parameters())
    policy = PolicyModel(module, "float32")
    assert not any(mapped_files(tensor) for tensor in [*module.parameters(), *module.buffers(), policy.flat.master])
    assert str(tmp_path) not in Path("/proc/self/maps").read_text("utf-8")


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policies_equal_those_of_float32(tmp_path: Path, dtype: str, lora: int) -> None:
    save(tmp_path)
    config = LoraConfig(rank=lora)
    policy, other = (PolicyModel(each, dtype, lora=config, seed=3) for each in (load(tmp_path), in_float32(tmp_path)))
    assert policy.path == other.path and policy.transform == other.transform
    for name in ("working", "bound"):
        assert torch.equal(getattr(policy.weights, name), getattr(other.weights, name))
    assert torch.equal(policy.flat.master, other.flat.master)


def test_files_of_several_dtypes_are_read_as_float32_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cast to the narrow dtype would round the others."""
    module = save(tmp_path)
    state = module.state_dict()
    exact = torch.full_like(state["model.norm.weight"], 1.0, dtype=torch.float32) + 1e-5
    module.save_pretrained(tmp_path, state_dict={**state, "model.norm.weight": exact})
    with caplog.at_level("INFO"):
        found = load(tmp_path)
    assert "the weights are read in float32: the files hold BF16, F32" in caplog.text
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert torch.equal(dict(found.named_parameters())["model.norm.weight"], exact)


@pytest.mark.parametrize("reason", ["ignored", "attribute"])
def test_what_might_not_equal_float32_is_read_as_float32_and_the_log_says_why(
    tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(save(tmp_path))
    if reason == "ignored":
        monkeypatch.setattr(kind, "_keys_to_ignore_on_load_missing", ["model.norm.weight"])
    else:
        build = kind.__init__

        def with_tensor(self: Any, *given: Any, **named: Any) -> None:
            build(self, *given, **named)
            self.constant = torch.ones(1)

        monkeypatch.setattr(kind, "__init__", with_tensor)
    with caplog.at_level("INFO", "asyncrl.models"):
        module = load(tmp_path)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert "the weights are read in float32: LlamaForCausalLM" in caplog.text


class _Casts(TorchDispatchMode):
    """Records the largest float32 tensor on the host that an operation returns, and the dtypes that move to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.moved = 0, list[torch.dtype]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.device.type == "meta":
            self.moved.append(args[0].dtype)
        if isinstance(result, Tensor) and result.device.type == "cpu" and result.dtype == torch.float32:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("kind", [FlatParameters, FlatWeights])
def test_weights_are_cast_on_the_device_and_not_on_the_host(tmp_path: Path, kind: Any) -> None:
    save(tmp_path)
    module = load(tmp_path)
    # A parameter on the host cannot become a view on the meta device, so the first one ends the call.
    with _Casts() as casts, pytest.raises(RuntimeError, match="incompatible tensor type"):
        kind(module, torch.float32, device=torch.device("meta"))
    assert casts.moved == [torch.bfloat16] and casts.largest == 0


def test_the_trial_has_one_layer_in_float32_at_a_time(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    module = load(tmp_path)
    loaded = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    seen = []

    def look(*_: Any) -> None:
        seen.append([{p.dtype for p in layer.parameters()} for layer in module.model.layers])

    for layer in module.model.layers:
        layer.mlp.register_forward_hook(look)
    head_transform(module)
    narrow, wide = {torch.bfloat16}, {torch.float32}
    assert seen == [[wide, narrow, narrow], [narrow, wide, narrow], [narrow, narrow, wide]]
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == loaded


def test_a_layer_that_others_read_is_in_float32_throughout(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    module = load(tmp_path)
    first, second = module.model.layers[:2]

    def borrow(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0] + 0 * nn.functional.linear(given[0], second.self_attn.q_proj.weight[:, :32])[..., :32],)

    first.register_forward_pre_hook(borrow)
    assert head_transform(module) == head_transform(in_float32(tmp_path))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="not finite"):
        head_transform(module)


def test_a_sharded_run_reads_the_files_once(tmp_path: Path) -> None:
    save(tmp_path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    policy, model, _ = loading.load_served(ModelConfig(path=str(tmp_path), dtype="bfloat16"), "cpu", 0, None, 16)
    wide = in_float32(tmp_path)
    assert all(mapped_files(parameter) for parameter in model.parameters())
    for name, tensor in policy.module.state_dict().items():
        assert not mapped_files(tensor) and torch.equal(tensor, wide.state_dict()[name].bfloat16())
