"""The probe of a model is narrow: what is compared hardly grows with the model, and has what the kernels can tell apart."""

from __future__ import annotations

import pytest
import torch
from runtime_gated import GATED, built, llama
from transformers import LlamaConfig, LlamaModel, Qwen3Config

from asyncrl.models.paths import FUSED
from asyncrl.models.probe import build_probe
from asyncrl.runtime.gate import check_model


def test_the_probe_of_a_wide_model_is_narrow() -> None:
    """What the gate costs hardly depends on the model's size: equal parts are compared in part, with the weights they have."""
    model = llama(hidden_size=256, num_attention_heads=16, num_key_value_heads=8, intermediate_size=600)
    probe = build_probe(model, width="heads")
    assert (probe.config.hidden_size, probe.config.num_attention_heads, probe.config.num_key_value_heads) == (64, 4, 2)
    assert (probe.config.head_dim, probe.config.intermediate_size) == (16, 64 + 600 % 64)
    own, whole = probe.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(
        own / own.norm(), whole[:64, :64] / whole[:64, :64].norm()
    )  # scaled up, and nothing else
    assert check_model(model).path == FUSED


@pytest.mark.parametrize(
    ("whole", "narrow"),
    [
        ((9, 3, 576), (6, 2, 384)),  # SmolLM2
        ((14, 2, 896), (14, 2, 896)),  # Qwen 2: groups of up to eight stay, two of them
        ((64, 8, 8192), (16, 2, 2048)),
        ((80, 8, 10240), (12, 2, 1536)),  # ten at one key: four, and two are left, as in ten
        ((32, 32, 4096), (2, 2, 256)),
        ((96, 8, 4096), (24, 2, 1024)),  # GLM-4.5-Air: 16 / 96 of its hidden size is no whole number
        ((80, 8, 4096), (20, 2, 1024)),
        ((12, 6, 1416), (4, 2, 472)),  # the hidden size leaves the same rest to the kernels' sixteen numbers
        ((16, 8, 1160), (16, 8, 1160)),  # and stays where that cannot be
    ],
)
def test_narrow_heads_are_what_the_kernels_see(whole: tuple[int, int, int], narrow: tuple[int, int, int]) -> None:
    """(query heads, key heads, hidden size): groups, and what is left past four query heads and sixteen numbers."""
    heads, keys, hidden = whole
    config = GATED | {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": hidden, "head_dim": 16}
    with torch.device("meta"):
        model = built(Qwen3Config(**config))
    probe = build_probe(model, width="heads").config
    assert (probe.num_attention_heads, probe.num_key_value_heads, probe.hidden_size) == narrow


@pytest.mark.parametrize(("hidden", "heads", "narrow"), [(576, 9, 96), (1152, 18, 96)])
def test_the_stream_of_narrow_heads_is_narrower_still(hidden: int, heads: int, narrow: int) -> None:
    """Where heads have a size of their own: a multiple of their number, with the same rest to the kernels' sixteen numbers."""
    model = llama(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads // 3, head_dim=64)
    probe = build_probe(model, width="stream")
    assert probe.config.hidden_size == narrow == probe.model.layers[0].self_attn.q_proj.weight.shape[1]
    assert narrow % probe.config.num_attention_heads == 0 and narrow % 16 == hidden % 16
    assert probe.model.layers[0].self_attn.head_dim == 64
    assert check_model(model).path == FUSED


@pytest.mark.parametrize("only", [(576, 384), (576,)])
def test_what_cannot_be_narrow_is_compared_wider(only: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A class whose width is its own affair, or that of its heads: its small copy fails, and that is not the model's fault."""
    widths = []
    init = LlamaModel.__init__

    def fixed(self: LlamaModel, config: LlamaConfig) -> None:
        widths.append(config.hidden_size)
        if config.hidden_size not in only:
            raise ValueError(f"this class is {only} wide")
        init(self, config)

    monkeypatch.setattr(LlamaModel, "__init__", fixed)
    model = llama(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    assert check_model(model).path == FUSED
    assert widths == [576, 96, *([384] if 384 in only else [384, 576])]
