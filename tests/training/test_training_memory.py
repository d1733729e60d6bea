"""Predicted memory: of weights, of what a real step keeps for backward on every path, of caches, and what is said without a
measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import make_group, tiny_module
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from asyncrl.config.schema import LoraConfig, ModelConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.training import footprint as room
from asyncrl.training import memory as predictions
from asyncrl.training.footprint import Cached, estimate_footprint, measure_footprint
from asyncrl.training.memory import Lengths, activation_bytes, cache_bytes, predict_memory
from asyncrl.training.passes import Forward

SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
)
TRAIN = TrainConfig(tokens_per_microbatch=100)


def described(kind: str, **settings: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings))


def real(kind: str, path: ModelPath, dtype: str = "float32", **settings: Any) -> PolicyModel:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings), dtype=torch.float32)
    return PolicyModel(module, dtype, path=path)


def kept_by_step(policy: PolicyModel, batch: Any) -> int:
    """Bytes of all storages that autograd keeps in a real forward of the trainer, weights and what the head keeps left out."""
    hidden: list[int] = []
    own = policy.hidden
    weights = {p.untyped_storage().data_ptr() for p in policy.module.parameters()}
    held: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    def counted(*arguments: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = own(*arguments)
        hidden.append(sum(size for size, _ in held.values()))
        return result

    policy.hidden = counted  # type: ignore[method-assign]
    Forward(policy)(batch)
    return hidden[0]


def full_batch(prompt: int, completion: int, members: int, groups: int) -> Any:
    """A microbatch of groups that are as long as they can be."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(groups):
        group, advantages = make_group(rng, number, size=members)
        (first, *_) = group.trajectories
        prompt_ids = rng.integers(1, 40, prompt).astype(np.int32)
        rows = []
        for member in range(members):
            tokens = np.concatenate([prompt_ids, rng.integers(1, 40, completion).astype(np.int32)])
            mask = np.arange(tokens.size) >= prompt
            zeros = np.zeros(tokens.size, np.float32)
            rows.append(
                type(first)(
                    group_id=number, member=member, group_size=members, prompt_length=prompt, tokens=tokens, mask=mask,
                    logprobs=zeros, sampled_logprobs=zeros, versions=np.where(mask, 0, -1).astype(np.int32),
                    temperature=1.0, finish_reason=first.finish_reason,
                )
            )  # fmt: skip
        made.append((type(group)(group.ticket, group.prompt, tuple(rows)), advantages))
    (batch,) = pack_groups(made, 100_000)
    return batch


def test_weights_gradients_and_copies_follow_from_the_parameters(tmp_path: Path) -> None:
    LlamaConfig(**SIZES | {"vocab_size": 1000}, num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    parameters = 1000 * 64 + matrices + 2 * 2 * 64 + 64
    model, lengths = ModelConfig(path=str(tmp_path), dtype="float32"), Lengths(4, 6)
    sizes = predict_memory(model, TRAIN, max_sequences=3, lengths=lengths)
    assert sizes["masters"] == sizes["gradients"] == sizes["optimizer"] / 2 == parameters * 4
    assert sizes["kv_cache"] == 3 * 10 * 2 * 2 * 2 * 16 * 4
    assert sizes["working_copy"] == sizes["reference"] == 0
    assert sizes["packed_weights"] in (0, pytest.approx((1000 * 64 + matrices) * 4, rel=0.01))
    bounded = predict_memory(model, TRAIN, max_sequences=3, lengths=lengths, kv_positions=12)
    assert bounded["kv_cache"] == sizes["kv_cache"] * 12 // 30
    narrow = predict_memory(
        ModelConfig(path=str(tmp_path), dtype="bfloat16"), TRAIN, max_sequences=3, lengths=lengths, needs_reference=True
    )
    assert narrow["working_copy"] == narrow["reference"] == parameters * 2 and narrow["masters"] == parameters * 4
    lean = predict_memory(
        model, TrainConfig(tokens_per_microbatch=100, gradient_checkpointing=True), max_sequences=3, lengths=lengths
    )
    assert lean["activations"] < sizes["activations"] / 2


# Layers without experts, and others with them.
MIXED = {
    "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "mlp_only_layers": [1, 2],
}  # fmt: skip
HYBRID = {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "settings", "path"),
    [
        ("llama", {"num_hidden_layers": 5}, FUSED),
        ("qwen3", {"num_hidden_layers": 5, "head_dim": 16}, FUSED),
        ("llama", {"num_hidden_layers": 5}, PACKED),
        ("llama", {"num_hidden_layers": 5}, PLAIN[0]),
        ("mistral", {"num_hidden_layers": 5, "sliding_window": 8}, PLAIN[1]),
        ("lfm2", HYBRID, PLAIN[0]),
        ("olmoe", {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2}, PACKED),
        ("olmoe", {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2}, FUSED),
        ("qwen3_moe", MIXED, FUSED),
    ],
)
def test_what_a_step_keeps_is_predicted(kind: str, settings: dict[str, Any], path: ModelPath, dtype: str) -> None:
    """Within 15 % of a real microbatch of shared prompts, from layers that were run over single rows of other lengths."""
    lengths = Lengths(30, 50, 4)
    batch = full_batch(30, 50, 4, groups=3)
    found = measure_footprint(described(kind, **settings), dtype, path)
    assert found is not None and found.path == path and len(found.layers) == settings["num_hidden_layers"]
    counted = kept_by_step(real(kind, path, dtype, **settings), batch)
    predicted, _ = activation_bytes(found, batch.tokens.size, lengths, hidden_bytes=0)
    assert predicted == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("kind", ["llama", "lfm2", "mistral"])
def test_caches_of_the_plain_path_are_predicted(kind: str) -> None:
    """Against the bytes in transformers' cache of a whole model: keys, values, states; a window holds no more than itself."""
    settings = HYBRID if kind == "lfm2" else {"num_hidden_layers": 4}
    settings |= {"sliding_window": 70} if kind == "mistral" else {}
    found = measure_footprint(described(kind, **settings), "float32", PLAIN[1])
    assert found is not None
    policy = real(kind, PLAIN[1], **settings)
    for length in (40, 150):
        sizes = [size for size, _ in room._cached_bytes(policy, length)]
        if kind == "mistral" and length > 70:  # a prefill hands out what lies before its window as well
            sizes = [size * 70 / length for size in sizes]
        assert cache_bytes(found, 1, length) == pytest.approx(sum(sizes), rel=0.02)


def test_the_engines_own_cache_is_predicted_to_the_byte() -> None:
    module = described("qwen3", num_hidden_layers=3, head_dim=16)
    found = measure_footprint(module, "bfloat16", FUSED)
    assert found is not None
    assert cache_bytes(found, 7, 1234) == cache_shape(module.config, 1, 1234).nbytes(torch.bfloat16)


def test_the_path_is_the_first_that_takes_the_model() -> None:
    paths = [
        measure_footprint(described(kind, **more), "float32")
        for kind, more in (("llama", {}), ("arcee", {}), ("lfm2", HYBRID))
    ]
    assert [str(each.path).split()[0] for each in paths if each] == ["fused", "packed", "plain"]


def test_experts_are_not_packed_and_have_gradients_of_their_own_on_the_way(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3_moe", **SIZES | MIXED, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32")
    sizes = predict_memory(model, TRAIN, max_sequences=3, lengths=Lengths(4, 6), path=FUSED)
    attention, dense = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128
    assert sizes["packed_weights"] in (0, pytest.approx((300 * 64 + 4 * attention + 2 * dense) * 4, rel=0.02))
    gate_up = 4 * 2 * 48 * 64 * 4  # bytes, of all experts of a layer
    assert predictions._largest_temporary(described("qwen3_moe", **MIXED), FUSED, 4) == gate_up
    assert predictions._largest_temporary(described("llama"), FUSED, 4) == 0


def test_frozen_weights_keep_less_on_transformers_modules() -> None:
    whole = measure_footprint(described("llama"), "float32", PACKED)
    adapted = measure_footprint(described("llama"), "float32", PACKED, LoraConfig(rank=4))
    assert whole is not None and adapted is not None
    assert 0.5 * whole.layers[0].token < adapted.layers[0].token < 1.3 * whole.layers[0].token


def test_long_rows_keep_no_attention_weights() -> None:
    found = measure_footprint(described("llama"), "float32", FUSED)
    assert found is not None and found.layers[0].score == 16.0  # four heads in float32: kept where rows are short
    short, long = (sum(activation_bytes(found, 8192, Lengths(64, size), 256)) for size in (1000, 8000))
    longest_short = sum(activation_bytes(found, 8192, Lengths(64, 1400), 256))
    assert short < longest_short and long == pytest.approx(longest_short, rel=0.06), "short rows may come in a long run"


def test_models_that_cannot_be_measured_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PARAMETERS", 1000)
    assert measure_footprint(described("llama"), "float32") is None
    found = estimate_footprint(described("llama", num_hidden_layers=2).config, "float32", None)
    monkeypatch.undo()
    measured = measure_footprint(described("llama", num_hidden_layers=2), "float32")
    assert measured is not None and not found.measured and found.path == measured.path == FUSED
    assert found.layers[0].of(1, 50) == pytest.approx(measured.layers[0].of(1, 50), rel=0.05)
    assert found.cached == measured.cached == (Cached(2 * 2 * 16 * 4.0),) * 2


def test_many_experts_are_measured_with_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a token keeps is of the experts that it goes to: a model of 64 is no reason for a formula."""
    module = described("qwen3_moe", **MIXED | {"num_experts": 64})
    whole = measure_footprint(module, "float32", FUSED)
    monkeypatch.setattr(room, "MAX_PARAMETERS", 400_000)  # 64 experts of two layers have over a million
    found = measure_footprint(module, "float32", FUSED)
    assert whole is not None and found is not None and found.measured and module.config.num_experts == 64
    for few, all_of_them in zip(found.layers, whole.layers, strict=True):
        assert few.of(100, 0) == pytest.approx(all_of_them.of(100, 0), rel=0.1)
    monkeypatch.setattr(room, "MAX_PARAMETERS", 100_000)  # with eight it is still too large
    assert measure_footprint(module, "float32", FUSED) is None


def test_a_state_space_model_is_predicted_without_heads(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba", vocab_size=300, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    sizes = [
        predict_memory(
            ModelConfig(path=str(tmp_path), dtype="float32"), TRAIN, max_sequences=5, lengths=Lengths(9, length)
        )["kv_cache"]
        for length in (10, 500)
    ]
    assert (
        sizes[0] == sizes[1] == 5 * 2 * 64 * (16 + 4) * 4
    )  # states of 16 and a convolution over 4, whatever the length


def test_nothing_of_the_process_changes() -> None:
    before = torch.get_rng_state()
    module = tiny_module()
    kept = [p.clone() for p in module.parameters()]
    measure_footprint(module, "float32")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(kept, module.parameters(), strict=True))
