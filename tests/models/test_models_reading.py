"""A reader that is built without its weights computes what the trainer does, whatever the model has beside its parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_served import board_of
from torch import nn

from asyncrl.config.schema import ModelConfig
from asyncrl.models import loading, reading
from asyncrl.models.loading import load_module
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.reading import ModelSkeleton, describe_extras, open_reader
from asyncrl.transport.memory.board import Board

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None, max_position_embeddings=64,
)  # fmt: skip
GPT2 = dict(n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# type of transformers, what differs from SIZES, path
FAMILIES: dict[str, tuple[str, dict[str, Any], ModelPath]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}, FUSED),
    "biases": ("Qwen2", {}, FUSED),
    "scaled embedding": ("Gemma3Text", {"layer_types": ["sliding_attention", "full_attention"]}, FUSED),
    "experts": ("Qwen3Moe", EXPERTS, PACKED),
    "masks": ("GPT2", GPT2, PACKED),
    "longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, FUSED),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, FUSED),
    "corrected": ("Glm4Moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_group": 1}, PACKED),
    "biased scores": ("Bloom", {"n_layer": 2, "n_head": 4}, PLAIN[1]),
}  # fmt: skip
LONGEST = 100  # tokens: past the contexts of those whose frequencies depend on them


def directory_of(family: str, folder: Path) -> Path:
    """A checkpoint whose buffers, where it keeps some, are not those of a new model."""
    kind, changed, _ = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changed)
    torch.manual_seed(5)
    module: Any = transformers.AutoModelForCausalLM.from_config(config)
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict().items():
        if name not in names:
            tensor.add_(torch.rand_like(tensor))
    module.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_what_the_trainer_does_and_reads_no_weights(
    family: str, dtype: Any, tmp_path: Path, boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FAMILIES[family][2]
    config = ModelConfig(path=str(directory_of(family, tmp_path)), dtype=dtype)
    trainer = load(config, path)
    rest = json.loads(json.dumps(describe_extras(trainer)))
    owner, reader = board_of(trainer, boards)
    owner.write(0, 0, trainer.weights.working)
    with monkeypatch.context() as blind:
        blind.setattr(loading, "load_module", lambda *given: pytest.fail("it was loaded"))
        skeleton = ModelSkeleton(config)
        assert skeleton.digest() == owner.layout
        policy = open_reader(skeleton, reader.half(0), rest, path, LONGEST, seed=0)
    assert policy.path == path and policy.transform == trainer.transform
    for version in (1, 2):
        trainer.flat.master.mul_(1.1).add_(0.01)
        trainer.advance()
        owner.write(version % 2, version, trainer.weights.working)
        policy.flat.move_to(reader.half(version % 2))
        assert fixed_logprobs(policy) == fixed_logprobs(trainer)
        assert policy.weights.misplaced_parameters() == []
    own, theirs = dict(policy.module.named_buffers()), dict(trainer.module.named_buffers())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    for tensor in (*policy.module.parameters(), *policy.module.buffers()):
        assert tensor.device.type == "cpu"


def load(config: ModelConfig, path: ModelPath) -> PolicyModel:
    """As a run does, without a tokenizer."""
    module, _ = load_module(config)
    loading.hold_rotary(module, LONGEST)
    return PolicyModel(module, config.dtype, path=path)


class WithTensor(nn.Module):
    """It keeps what is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.ones(3)


@pytest.mark.parametrize("why", ["tensor", "buffer", "large", "fails"])
def test_what_cannot_be_completed_is_loaded(
    why: str, tmp_path: Path, boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(directory_of("tied", tmp_path)), dtype="float32")
    trainer = load(config, FUSED)
    owner, reader = board_of(trainer, boards)
    owner.write(0, 0, trainer.weights.working)
    if why == "large":
        monkeypatch.setattr(reading, "_MAX_BUFFER_BYTES", 8)
    rest = describe_extras(trainer)
    assert (rest is None) == (why == "large")
    skeleton = ModelSkeleton(config)
    if why == "tensor":
        skeleton.module.model.layers[0].add_module("more", WithTensor())
    if why == "buffer":
        skeleton.module.model.layers[0].register_buffer("more", torch.ones(3))
    if why == "fails":
        skeleton.module.model.layers[1].self_attn.o_proj = None
    loaded = list[str]()

    def load_it(*given: Any) -> Any:
        loaded.append("loaded")
        return load_module(*given)

    monkeypatch.setattr(loading, "load_module", load_it)
    policy = open_reader(skeleton, reader.half(0), rest, FUSED, LONGEST, seed=0)
    assert loaded == ["loaded"]
    policy.flat.move_to(reader.half(0))
    assert fixed_logprobs(policy) == fixed_logprobs(trainer)
