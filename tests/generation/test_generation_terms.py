"""Windows, capped scores and sinks over the cache: the dense formula, and transformers' own forward of whole models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from generation_models import VOCABULARY, answered, assert_plain, request
from ragged_reference import ReferenceKernel
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.generation.embedded import plans
from asyncrl.generation.embedded.cache import CacheShape, KVCache
from asyncrl.models.attention import general as general_attention
from asyncrl.models.attention.interface import AttentionTerms
from asyncrl.models.policy import PolicyModel

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": dict(sliding_window=6),
    "Gemma2": dict(sliding_window=5, attn_logit_softcapping=3.0, final_logit_softcapping=None),
    "Gemma3Text": dict(sliding_window=6, layer_types=MIXED),
    "GptOss": dict(
        sliding_window=5, num_local_experts=4, num_experts_per_tok=2, layer_types=MIXED, max_position_embeddings=131072
    ),
}
HEADS, KV_HEADS = 6, 2


def policy_and_plain(family: str) -> tuple[PolicyModel, PreTrainedModel]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=16, initializer_range=0.15, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**{**sizes, **FAMILIES[family]})
    name = f"{family.removesuffix('Text')}ForCausalLM"
    module = getattr(transformers, name)._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for path, parameter in module.named_parameters():
        if "sinks" in path:
            torch.nn.init.normal_(parameter)
    plain = copy.deepcopy(module)
    return PolicyModel(module), plain


# -- the two plans --------------------------------------------------------------------------------------------------------


def dense(query: Tensor, keys: Tensor, values: Tensor, first: int, scale: float, terms: AttentionTerms) -> Tensor:
    """`query` [L, H, D] at positions first.. of a row that holds `keys` and `values` [C, K, D], in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", query, keys) * scale
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    distance = torch.arange(first, first + len(query))[:, None] - torch.arange(len(keys))
    seen = (distance >= 0) & (distance < (terms.window or 10**9))
    exponents = scores.masked_fill(~seen, float("-inf")).exp()
    total = exponents.sum(-1, keepdim=True)
    if terms.sinks is not None:
        total = total + terms.sinks.double().exp()[:, None, None]
    return torch.einsum("hts,shd->thd", exponents / total, values)


TERMS = [
    (None, None, False),
    (1, None, False),
    (7, None, False),
    (7, 0.7, True),
    (None, 0.7, False),
    (None, None, True),
    (40, None, False),
]


@pytest.mark.parametrize("way", ["", "in small parts", "by a kernel for ragged rows"])
@pytest.mark.parametrize(
    ("size", "dtype"), [(16, torch.float32), (8, torch.float64)], ids=str
)  # native kernel, and not
@pytest.mark.parametrize("case", TERMS, ids=str)
def test_prefill_in_chunks_and_decode_equal_the_dense_formula(
    case: tuple[int | None, float | None, bool],
    size: int,
    dtype: torch.dtype,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = ReferenceKernel()
    if way.startswith("by"):
        monkeypatch.setattr("asyncrl.generation.embedded.cache.kernel_for", lambda *case: kernel)
    if way == "in small parts":
        monkeypatch.setattr(plans, "_BAND_BYTES", 1)
        monkeypatch.setattr(general_attention, "_MAX_QUERIES", 3)
        monkeypatch.setattr(general_attention, "_MIN_QUERIES", 2)
    generator = torch.Generator().manual_seed(1)
    window, softcap, with_sinks = case
    sinks = torch.randn(HEADS, generator=generator, dtype=dtype) if with_sinks else None
    terms = AttentionTerms(window, softcap, sinks)
    lengths = [3, 20, 20, 33, 9]
    stored = KVCache(CacheShape(2, 5, KV_HEADS, 48, size), dtype, torch.device("cpu"))
    stored.data.copy_(torch.randn(stored.data.shape, generator=generator))  # what is not overwritten must not be seen
    tokens = [
        [
            torch.randn(length + 1, heads, size, generator=generator, dtype=dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        for length in lengths
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6

    def check(out: Tensor, row: int, first: int, length: int) -> None:
        query, key, value = tokens[row]
        last = first + length
        right = dense(query[first:last], key[:last], value[:last], first, 0.3, terms)
        torch.testing.assert_close(out.double(), right, rtol=0, atol=tolerance)

    for chunk in (range(8), range(8, 31), range(31, 40)):
        own = [(row, chunk.start, min(length, chunk.stop) - chunk.start) for row, length in enumerate(lengths)]
        own = sorted((part for part in own if part[2] > 0), key=lambda part: part[1:])
        plan = plans.ExtendPlan(
            stored, [plans.PromptPiece(row, *part) for row, *part in ((r, r, *rest) for r, *rest in own)]
        )
        packed = [torch.cat([tokens[row][i][first : first + n] for row, first, n in own]) for i in range(3)]
        out = plan.attend(1, packed[0], packed[1], packed[2], 0.3, terms)
        for part, (row, first, n) in zip(out.split([n for _, _, n in own]), own, strict=True):
            check(part, row, first, n)
    position = np.array(lengths)
    plan_ = plans.DecodePlan(stored, position)
    query, key, value = (torch.stack([own[i][-1] for own in tokens]) for i in range(3))
    out = plan_.attend(1, query, key, value, 0.3, terms)
    for row, length in enumerate(lengths):
        check(out[row : row + 1], row, length, 1)
    if way.startswith("by"):
        assert kernel.calls == (4 if softcap is None and sinks is None else 0), "one call of each plan"


def test_a_window_that_no_row_leaves_is_plain_attention_bit_for_bit() -> None:
    outs = []
    for window in (None, 21, 20):
        generator = torch.Generator().manual_seed(1)
        stored = KVCache(CacheShape(1, 3, 2, 48, 16), torch.float32, torch.device("cpu"))
        stored.data.copy_(torch.randn(stored.data.shape, generator=generator))
        position = np.array([20, 3, 11])
        plan = plans.DecodePlan(stored, position)
        query, key, value = (torch.randn(3, heads, 16, generator=generator) for heads in (6, 2, 2))
        outs.append(plan.attend(0, query, key, value, 0.3, AttentionTerms(window)))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_rows_read_their_bands_alone() -> None:
    position = np.array([1000, 1003, 1010, 5, 5000, 5001])
    assert plans.split_bands(position, 100, max_positions=600) == [(0, 3, 901, 1011), (3, 4, 0, 6), (4, 6, 4901, 5002)]
    assert [run[:2] for run in plans.split_bands(position, 100, max_positions=150)] == [(i, i + 1) for i in range(6)]
    assert plans.split_bands(position, None, max_positions=10**9) == [(0, 6, 0, 5002)]


# -- models ---------------------------------------------------------------------------------------------------------------


def ragged() -> list[Any]:
    """Prompts of 1 to 40 tokens, two of them shared, some longer than a chunk of the prefill."""
    requests = []
    for seed in range(12):
        key = f"shared {seed % 2}" if seed % 3 == 0 else None
        length = (11, 17)[seed % 2] if key else 1 + 13 * seed % 40
        requests.append(request(length, seed, prefix_key=key, max_tokens=3 + seed * 5 % 14))
    return requests


@pytest.mark.parametrize("family", FAMILIES)
async def test_sampled_logprobs_equal_the_eager_forward(family: str) -> None:
    policy, plain = policy_and_plain(family)
    requests = ragged()
    answers = await answered(policy, requests, max_sequences=5, prefill_tokens=15)
    assert [each.token_ids.size for each in answers] == [each.sampling.max_tokens for each in requests]
    assert_plain(plain, requests, answers, atol=5e-5)
