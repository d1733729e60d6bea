"""Predicted memory: of weights and caches by arithmetic, of a microbatch beside the peaks of processes that trained."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.models.loading import describe_module
from asyncrl.models.paths import FUSED, PACKED, PATHS, PLAIN
from asyncrl.training.memory import Lengths, predict_memory

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure import context
from measure.memory import CASES, MEMBERS, TOKENS, measure

RESULTS = Path(__file__).resolve().parents[2] / "tools/results/memory.md"
SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
)
TRAIN, SHORT = TrainConfig(tokens_per_microbatch=100), Lengths(4, 6)
# Layers without experts, and others with them.
MIXED: dict[str, Any] = dict(
    num_hidden_layers=4, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1, 2],
)  # fmt: skip


def saved(folder: Path, kind: str, dtype: str = "float32", **settings: Any) -> ModelConfig:
    AutoConfig.for_model(kind, **SIZES | settings).save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype=dtype)


def predicted(model: ModelConfig, lengths: Lengths = SHORT, **settings: Any) -> dict[str, int]:
    return predict_memory(model, settings.pop("train", TRAIN), max_sequences=3, lengths=lengths, **settings)


def test_weights_gradients_and_copies_follow_from_the_parameters(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", vocab_size=1000, num_hidden_layers=2, tie_word_embeddings=True)
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    parameters = 1000 * 64 + matrices + 2 * 2 * 64 + 64
    sizes = predicted(model)
    assert sizes["masters"] == sizes["gradients"] == sizes["optimizer"] / 2 == parameters * 4
    assert sizes["kv_cache"] == 3 * 10 * 2 * 2 * 2 * 16 * 4
    assert sizes["working_copy"] == sizes["reference"] == 0
    assert sizes["packed_weights"] in (0, pytest.approx((1000 * 64 + matrices) * 4, rel=0.01))
    assert predicted(model, kv_positions=12)["kv_cache"] == sizes["kv_cache"] * 12 // 30
    narrow = predicted(ModelConfig(path=str(tmp_path), dtype="bfloat16"), needs_reference=True)
    assert narrow["working_copy"] == narrow["reference"] == parameters * 2 and narrow["masters"] == parameters * 4
    lean = predicted(model, train=TRAIN.model_copy(update={"gradient_checkpointing": True}))
    assert lean["activations"] < sizes["activations"] / 2


def recorded() -> dict[tuple[str, str], float]:
    """(case, dtype) -> MiB that a microbatch took in a process, of tools/results/memory.md."""
    rows = [[cell.strip() for cell in line.split("|")] for line in RESULTS.read_text().splitlines()]
    return {(row[1], row[2]): float(row[5]) for row in rows if len(row) == 8 and row[3] == "microbatch"}


@pytest.mark.parametrize(("name", "dtype"), recorded())
def test_what_a_microbatch_took_is_predicted(tmp_path: Path, name: str, dtype: str) -> None:
    """Within a quarter of each peak that was recorded: paths, dtypes, experts, windows, convolutions, a state space."""
    case = CASES[name]
    AutoConfig.for_model(case.kind, **case.settings).save_pretrained(tmp_path)
    sizes = predict_memory(
        ModelConfig(path=str(tmp_path), dtype=dtype),
        TrainConfig(tokens_per_microbatch=TOKENS, gradient_checkpointing=case.checkpointing),
        max_sequences=case.sequences,
        lengths=Lengths(case.prompt, case.completion, MEMBERS),
        path=next(path for path in PATHS if str(path).startswith(case.path)),
    )
    found = sum(sizes[part] for part in ("activations", "logits", "working"))
    assert found / 2**20 == pytest.approx(recorded()[name, dtype], rel=0.25)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of a process are read from Linux's /proc")
def test_the_peak_of_a_process_is_predicted() -> None:
    found = measure("small qwen3_moe, fused, checkpointing", "float32", only_microbatch=True)
    assert found["path"] == "fused"
    assert found["predicted"]["microbatch"] == pytest.approx(found["measured"]["microbatch"], rel=0.25)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("llama", {}, "fused"),
        ("arcee", {}, "packed"),
        ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}, "plain"),
    ],
)
def test_a_path_that_nobody_knows_yet_is_guessed(
    tmp_path: Path, kind: str, settings: dict[str, Any], words: str
) -> None:
    model = saved(tmp_path, kind, **settings)
    path = next(each for each in PATHS if each.name == words)
    assert predicted(model) == predicted(model, path=path)


def test_experts_count_as_many_as_a_token_goes_to(tmp_path: Path) -> None:
    """They are not packed, and their gradients are the largest that are made on the way."""
    few = saved(tmp_path / "few", "qwen3_moe", **MIXED, tie_word_embeddings=True)
    many = saved(tmp_path / "many", "qwen3_moe", **MIXED | {"num_experts": 64}, tie_word_embeddings=True)
    sizes, of_many = (predicted(model, path=FUSED) for model in (few, many))
    attention, dense = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128
    assert sizes["packed_weights"] in (0, pytest.approx((300 * 64 + 4 * attention + 2 * dense) * 4, rel=0.02))
    assert sizes["activations"] == of_many["activations"]
    assert of_many["working"] - sizes["working"] == (64 - 4) * 2 * 48 * 64 * 4  # of the joined gate and up
    twice = saved(tmp_path / "twice", "qwen3_moe", **MIXED | {"num_experts_per_tok": 4})
    assert predicted(twice, path=FUSED)["activations"] > 1.2 * sizes["activations"]


def test_long_rows_keep_no_attention_weights(tmp_path: Path) -> None:
    model, train = saved(tmp_path, "llama"), TrainConfig(tokens_per_microbatch=8192)
    fused, eager = (
        [predicted(model, Lengths(64, size), path=path, train=train)["activations"] for size in (100, 2000, 8000)]
        for path in (FUSED, PLAIN[1])
    )
    assert fused[0] < fused[1] == fused[2], "short rows may come in a long run"
    assert eager[2] > 3 * eager[1]


def test_ranks_that_share_a_microbatch_hold_a_part_of_it_each(tmp_path: Path) -> None:
    model, train = saved(tmp_path, "llama"), TrainConfig(tokens_per_microbatch=8192)
    one, *others = (predicted(model, Lengths(64, 8000, ranks=ranks), path=FUSED, train=train) for ranks in (1, 2, 4))
    for ranks, sizes in zip((2, 4), others, strict=True):
        assert sizes["masters"] == one["masters"] and sizes["kv_cache"] == one["kv_cache"]
        assert sizes["logits"] == one["logits"] / ranks
        # Attention keeps the weights of longer rows, because a rank has fewer heads.
        assert 1 <= sizes["activations"] * ranks / one["activations"] < 1.01 * ranks**0.5


def test_the_memory_of_ranks_that_shared_microbatches_is_predicted() -> None:
    """Within a quarter for short rows, and not below for long ones, whose attention keeps no weights. Two ranks of 8,192 tokens
    took at most 0.6 of one rank."""
    lines = (RESULTS.parent / "context.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")[1:5]]
        for line in lines
        if line.startswith(("| 1", "| 2", "| 4", "| 8"))
    ]
    assert len(rows) == len(context.CASES)
    for *sizes, peaks in rows:
        (tokens, row, ranks), (one, several) = map(int, sizes), map(int, re.findall(r"\d+", peaks)[:2])
        if (tokens, ranks) == (8192, 2):
            assert several / one <= 0.6
        for sharing, peak in ((1, one), (ranks, several)):
            parts = predict_memory(
                ModelConfig(path=f"{context.__file__}:build", dtype="float32"),
                TrainConfig(tokens_per_microbatch=tokens),
                max_sequences=1,
                lengths=Lengths(row // 8, row - row // 8, ranks=sharing),
            )
            found = sum(size for name, size in parts.items() if name not in ("kv_cache", "compiled")) / 2**20
            assert 0.75 * peak < found and (found < 1.25 * peak or row > 256)


def test_caches_are_predicted_by_what_a_layer_holds(tmp_path: Path) -> None:
    model = saved(tmp_path / "own", "qwen3", "bfloat16", num_hidden_layers=3, head_dim=16)
    shape = cache_shape(describe_module(model).config, 1, 1234)
    assert predicted(model, kv_positions=1234, path=PACKED)["kv_cache"] == shape.nbytes(torch.bfloat16)
    # A window holds no more than itself; a convolution its width of the last tokens; a state space its states as well.
    window = saved(tmp_path / "window", "mistral", num_hidden_layers=2, sliding_window=70)
    assert predicted(window, Lengths(100, 100), path=PLAIN[1])["kv_cache"] == 2 * 3 * 70 * 2 * 2 * 16 * 4
    hybrid = saved(tmp_path / "hybrid", "lfm2", num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"])
    assert predicted(hybrid, path=PLAIN[0])["kv_cache"] == 3 * 10 * 2 * 2 * 16 * 4 + 3 * 2 * 64 * 3 * 4
    AutoConfig.for_model("mamba", vocab_size=300, hidden_size=32, num_hidden_layers=2).save_pretrained(
        tmp_path / "mamba"
    )
    mamba = ModelConfig(path=str(tmp_path / "mamba"), dtype="float32")
    sizes = [predicted(mamba, Lengths(9, length))["kv_cache"] for length in (10, 500)]
    assert sizes[0] == sizes[1] == 3 * 2 * 64 * (16 + 4) * 4
