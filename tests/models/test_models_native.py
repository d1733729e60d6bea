"""The native kernels against the torch code that runs where they were not built, and against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.models.attention.rows import RowAttention
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.head import logprobs
from asyncrl.models.native import kernels
from asyncrl.models.native import library as native
from asyncrl.models.native.kernels import Scratch
from asyncrl.models.parameters.flat import add_widened_

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def both(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], ...]:
    """What `compute` gives natively and in torch. It must start from copies."""
    first = compute()
    with monkeypatch.context() as without:
        without.setattr(native, "_library", None)
        assert not native.available()
        second = compute()
    return first, second


def close(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """float32: a few roundings of sums. bfloat16: torch rounds in between, the kernels once at the end."""
    relative = 2e-5 if dtype == torch.float32 else 2.5e-2
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.isfinite().all()
        assert float((a.double() - b.double()).norm()) <= relative * float(b.double().norm()) + 1e-6


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 1.5).to(dtype)


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 37])
def test_norms(dtype: torch.dtype, rows: int, offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = values(rows, 48, dtype=dtype), values(rows, 96, dtype=dtype)
    weight, before = values(48, dtype=dtype), values(rows, 48, dtype=dtype, seed=1)

    def compute() -> tuple[Tensor, ...]:
        out, into, total = torch.empty_like(x), before.clone(), torch.ones(48)
        kernels.rms_norm(x, weight, 1e-5, out, offset)
        kernels.rms_norm_backward(wide[:, 48:], x, weight, 1e-5, total, into, offset)  # a strided view
        frozen = before.clone()
        kernels.rms_norm_backward(wide[:, 48:], x, weight, 1e-5, None, frozen, offset)
        assert torch.equal(frozen, into)
        return out, into, total

    close(*both(monkeypatch, compute), dtype)


@DTYPES
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary(dtype: torch.dtype, inverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, angle = values(5, 4 * 32, dtype=dtype), torch.rand(5, 16)
    cos, sin = angle.cos().to(dtype), torch.stack((-angle.sin(), angle.sin())).to(dtype)

    def compute() -> tuple[Tensor, ...]:
        own = qkv.clone()
        kernels.rotate_(own[:, : 3 * 32].unflatten(1, (3, 32)), cos, sin, inverse)
        assert torch.equal(own[:, 3 * 32 :], qkv[:, 3 * 32 :])
        return (own,)

    close(*both(monkeypatch, compute), dtype)


@DTYPES
def test_swiglu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, grad = values(7, 2 * 80, dtype=dtype), values(7, 80, dtype=dtype)
    gate_up[0, :4] = torch.tensor([100.0, -100.0, 60.0, -60.0], dtype=dtype)  # ends of the exponential

    def compute() -> tuple[Tensor, ...]:
        out, own, product = torch.empty_like(grad), gate_up.clone(), torch.empty_like(grad)
        kernels.gated(own, out, "silu")
        kernels.gated_backward_(own, grad.clone(), product, Scratch(), "silu")
        assert torch.equal(product, out) or not native.available()
        return out, own, product

    close(*both(monkeypatch, compute), dtype)


@DTYPES
@pytest.mark.parametrize("vocabulary", [5, 64, 1003])
@pytest.mark.parametrize("entropy", [False, True])
def test_head(dtype: torch.dtype, vocabulary: int, entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = values(9, vocabulary, dtype=dtype), torch.arange(9) % vocabulary
    target[-1] = vocabulary - 1  # behind the last whole vector
    inverse, slope, outer = torch.linspace(0.5, 2, 9), torch.linspace(-1, 1, 9), torch.linspace(1, -1, 9)

    def compute() -> tuple[Tensor, ...]:
        logp, lse, spread = torch.empty(3, 9)
        own, columns = logits.clone(), logprobs.Columns(target, inverse, lse, spread)
        passes = logprobs.default_passes(logits, vocabulary, chunk=4)
        passes.statistics(own, 0, columns, logp)
        passes.gradient_(own, 0, columns, slope, outer if entropy else None)
        return logp, lse, spread, own

    mine, theirs = both(monkeypatch, compute)
    close(mine[:3], theirs[:3], torch.float32)
    close(mine[3:], theirs[3:], dtype)
    expected = torch.log_softmax(logits.double() * inverse.double().unsqueeze(1), -1).gather(1, target.unsqueeze(1))
    torch.testing.assert_close(mine[0].double(), expected.squeeze(1), rtol=0, atol=3e-6)


def test_a_nan_among_the_logits_is_not_lost() -> None:
    logits, out = torch.zeros(2, 40), torch.empty(3, 2)
    logits[1, 33] = float("nan")
    native.head_statistics(logits, torch.ones(2), torch.zeros(2, dtype=torch.int64), out[0], out[1], out[2])
    assert out[:, 0].isfinite().all() and out[:, 1].isnan().all()
    narrow, into = torch.full((32,), float("nan"), dtype=torch.bfloat16), torch.zeros(32)
    native.add_widened(into, narrow)
    x = narrow.view(1, 32)
    native.rms_norm(x, torch.ones(32, dtype=torch.bfloat16), 1e-5, x)
    assert into.isnan().all() and x.isnan().all()


def test_bfloat16_is_rounded_to_nearest_even_and_widened_exactly() -> None:
    exact = torch.tensor([1.0, 1.00390625, 1.01171875, -3.0e38, 1e-30, 0.0] * 8)  # the second and third are ties
    gate_up = torch.cat([torch.full((1, 48), 200.0), exact.view(1, 48)], 1)  # silu(200) * up
    out = torch.empty(1, 48, dtype=torch.bfloat16)
    native.swiglu(gate_up.to(torch.bfloat16), out)
    torch.testing.assert_close(out, (200.0 * exact.bfloat16()).view(1, 48).bfloat16(), rtol=0, atol=0)
    into = torch.arange(37.0)
    add_widened_(into, torch.arange(37).bfloat16())
    assert torch.equal(into, 2 * torch.arange(37.0))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 16), (12, 2, 32), (7, 1, 128)])
def test_decode_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    rows, room = 5, 200
    lengths = np.array([1, 64, 65, 130, 200])
    keys, stored = (values(8, kv_heads, room, size, dtype=dtype, seed=seed) for seed in (1, 2))
    query = values(rows, heads, size, dtype=dtype)
    fresh = values(rows, 2 * kv_heads, size, dtype=dtype)  # views of one product, as the decoder has them
    key, value = fresh[:, :kv_heads], fresh[:, kv_heads:]
    whole = [keys.clone(), stored.clone()]
    out = native.decode_attention(query, key, value, *whole, torch.from_numpy(lengths - 1), size**-0.5)
    for row, length in enumerate(lengths.tolist()):
        for cache, old, new in ((whole[0], keys, key), (whole[1], stored, value)):
            assert torch.equal(cache[row, :, length - 1], new[row])
            assert torch.equal(cache[row, :, : length - 1], old[row, :, : length - 1])
            assert torch.equal(cache[row, :, length:], old[row, :, length:])
        expected = scaled_dot_product_attention(
            query[row].double().unsqueeze(1),
            whole[0][row, :, :length].double().repeat_interleave(heads // kv_heads, 0),
            whole[1][row, :, :length].double().repeat_interleave(heads // kv_heads, 0),
        ).squeeze(1)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[row].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(whole[0][rows:], keys[rows:])
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)  # heads of a row that are not adjacent
    again = native.decode_attention(turned, key, value, *whole, torch.from_numpy(lengths - 1), size**-0.5)
    assert torch.equal(out, again)


@DTYPES
def test_row_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # The last node has a context of two pieces.
    rows = TreePlan([30, 1, 17, 33, 6, 8, 2, 16], [-1, 0, 0, 0, 3, 3, 0, -1]).rows
    query, key, value = (values(113, heads, 16, dtype=dtype, seed=heads) for heads in (6, 2, 2))
    grad = values(113, 6, 16, dtype=dtype, seed=3)

    def compute() -> tuple[Tensor, ...]:
        plan = RowAttention(rows, 6, torch.float32)
        out, kept = plan.forward(query, key, value, 0.25)
        gradients = tuple(torch.empty_like(t) for t in (query, key, value))
        plan.backward(grad, (query, key, value, out, kept), 0.25, (gradients[0], gradients[1], gradients[2]))
        return (out, *gradients)

    close(*both(monkeypatch, compute), dtype)


def test_long_rows_of_scores_are_computed_twice() -> None:
    """More keys than the kernel's own line holds."""
    length, context = 3, 2100
    scores = values(2, length, context + length, dtype=torch.float32)
    out = torch.empty_like(scores)
    native.row_softmax(scores, out, torch.tensor([2100]), torch.tensor([3]), 2, length)
    mask = torch.zeros(length, context + length).masked_fill_(
        torch.ones(length, context + length).triu(context + 1).bool(), float("-inf")
    )
    torch.testing.assert_close(out, torch.softmax(scores + mask, -1), rtol=1e-5, atol=1e-7)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = values(64, 64, dtype=torch.float32), values(64, dtype=torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out, into = torch.empty_like(x), x.clone()
            native.rms_norm(x, weight, 1e-5, out)
            native.rms_norm_backward(x, x, weight, 1e-5, None, into)
            results.append((out, into))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for own in results[1:] for a, b in zip(own, results[0], strict=True))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scratch_does_not_follow_the_default_dtype(default: torch.dtype) -> None:
    x, weight, grad = (values(*shape, dtype=torch.float32) for shape in ((5, 64), (64,), (5, 64)))

    def gradient() -> Tensor:
        total = torch.zeros(64, dtype=torch.float32)
        native.rms_norm_backward(grad, x, weight, 1e-5, total, torch.zeros_like(x))
        return total

    expected, before = gradient(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        assert torch.equal(gradient(), expected)
    finally:
        torch.set_default_dtype(before)


def test_decode_attention_refuses_what_does_not_fit_its_cache() -> None:
    query, key = torch.zeros(2, 4, 64), torch.zeros(2, 2, 64)
    place = torch.zeros(2, dtype=torch.int64)
    for cache, value in (
        (torch.zeros(2, 2, 8, 64, dtype=torch.bfloat16), key),  # twice the bytes would be written
        (torch.zeros(2, 2, 8, 32), key),
        (torch.zeros(2, 2, 8, 64), key[:, :, :32]),
    ):
        with pytest.raises(ValueError, match="the cache holds 2 heads of"):
            native.decode_attention(query, key, value, cache, cache.clone(), place, 0.125)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_rotary_table_of_another_layout_is_torchs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, table = values(rows, 2, 64, dtype=torch.float32), torch.rand(rows, 64)
    sin = torch.stack((-table[:, 32:], table[:, 32:]))

    def compute() -> tuple[Tensor, ...]:
        own = heads.clone()
        kernels.rotate_(own, table[:, :32], sin)
        return (own,)

    close(*both(monkeypatch, compute), torch.float32)
    with pytest.raises(RuntimeError, match="must match"):  # of half a head: the kernel would read behind it
        kernels.rotate_(heads, table[:, :16], sin[..., :16])


def test_what_the_kernels_do_not_know_is_refused() -> None:
    x = torch.zeros(2, 32)
    assert native.takes(x, size=32) and not native.takes(x, size=24)
    assert not native.takes(x.double()) and not native.takes(x, x.bfloat16()) and not native.takes(x.t())
    assert native.attends(64, x) and not native.attends(80, x)
