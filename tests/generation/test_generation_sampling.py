"""Keyed randomness, inverse-CDF sampling, filters and both log-prob columns against slow references."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.errors import DivergenceError
from asyncrl.generation.embedded.sampling import (
    BLOCK,
    FIRST_TRY,
    Drawn,
    LogitChanges,
    RowParams,
    Sampled,
    Sampler,
    keyed_uniform,
    seed_array,
)  # fmt: skip
from asyncrl.types import SamplingParams


def params(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, uniform: np.ndarray | None = None
) -> RowParams:
    drawn = keyed_uniform(seed_array(list(range(count))), np.zeros(count, dtype=np.int64))
    return RowParams(
        np.full(count, temperature, dtype=np.float32),
        np.full(count, top_k, dtype=np.int64),
        np.full(count, top_p, dtype=np.float32),
        np.zeros(count, dtype=np.float32),
        drawn if uniform is None else uniform,
        LogitChanges(),
    )


def reference(logits_V: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs over the whole vocabulary, and after the filters (-inf outside), float64, one row, by the definition."""
    scaled = logits_V.astype(np.float64) / temperature
    full = scaled - scaled.max()
    full -= math.log(np.exp(full).sum())
    order = np.argsort(-full, kind="stable")
    kept = order[: top_k or None]
    mass = np.exp(full[kept])
    before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
    kept = kept[before < top_p] if top_p < 1 else kept
    filtered = np.full_like(full, -np.inf)
    filtered[kept] = full[kept] - math.log(np.exp(full[kept]).sum())
    return full, filtered


def test_uniform_numbers_depend_on_seed_and_index_alone() -> None:
    seeds, index = seed_array([3, 1, 3, -7, 2**80 + 5]), np.array([0, 4, 9, 2, 1])
    together = keyed_uniform(seeds, index)
    for place in range(5):
        one = keyed_uniform(seeds[place : place + 1], index[place : place + 1])
        assert one[0] == together[place]
    assert np.unique(together).size == 5


def test_uniform_numbers_are_uniform_and_independent_in_both_directions() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    index = np.tile(np.arange(300), 300)
    drawn = keyed_uniform(seeds, index)
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.histogram(drawn, bins=64, range=(0, 1))[0]
    expected = drawn.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110  # chi-square, 63 degrees of freedom, p about 2e-4
    grid = drawn.reshape(300, 300)
    for neighbour in (
        np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel()),
        np.corrcoef(grid[:-1].ravel(), grid[1:].ravel()),
    ):
        assert abs(neighbour[0, 1]) < 0.015


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.7), (0.9, 9, 0.8)]
)
def test_sampled_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square of 40,000 draws against the reference; nothing outside the filters' support."""
    logits = np.random.default_rng(0).normal(0, 1.5, 23).astype(np.float32)
    count = 40_000
    sampled = Sampler().sample(torch.from_numpy(np.tile(logits, (count, 1))), params(count, temperature, top_k, top_p))
    full, filtered = reference(logits, temperature, top_k, top_p)
    support = np.isfinite(filtered)
    assert np.bincount(sampled.tokens, minlength=23)[~support].sum() == 0
    np.testing.assert_allclose(sampled.logprobs, full[sampled.tokens], atol=1e-5)
    np.testing.assert_allclose(sampled.sampled_logprobs, filtered[sampled.tokens], atol=1e-5)
    expected = np.exp(filtered[support]) * count
    seen = np.bincount(sampled.tokens, minlength=23)[support]
    statistic = ((seen - expected) ** 2 / expected).sum()
    degrees = support.sum() - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 6


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([2, 7, 255, 256, 1023, 1024, 1025, 2000, 4 * BLOCK + 1]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 0.5])),
)
def test_two_level_inverse_cdf_equals_the_plain_one(seed: int, vocabulary: int, spread: float, u: float) -> None:
    """Same token as a float64 cumulative sum, up to rounding at a boundary; never a token of probability zero."""
    logits = np.random.default_rng(seed).normal(0, spread, (1, vocabulary)).astype(np.float32)
    sampled = Sampler().sample(torch.from_numpy(logits.copy()), params(1, uniform=np.array([u])))
    token = int(sampled.tokens[0])
    full, _ = reference(logits[0], 1.0, 0, 1.0)
    assert np.isfinite(sampled.logprobs[0])
    cumulative = np.cumsum(np.exp(full))
    assert (cumulative[token - 1] if token else 0.0) <= u + 1e-5
    assert cumulative[token] >= u - 1e-5


@pytest.mark.parametrize("vocabulary", [64, 5 * BLOCK])
def test_impossible_tokens_are_never_sampled(vocabulary: int) -> None:
    """Everything but the first entry of each block has probability zero, also at the very end of the CDF."""
    logits = torch.full((4, vocabulary), -math.inf)
    logits[:, :: BLOCK // 8] = 0.0
    uniform = np.array([0.0, 1 - 2**-53, 0.5, 0.999999])
    sampled = Sampler().sample(logits, params(4, uniform=uniform))
    assert (sampled.tokens % (BLOCK // 8) == 0).all()
    assert sampled.tokens[0] == 0


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.95), (0, 0.2), (1, 1.0), (FIRST_TRY + 50, 1.0), (FIRST_TRY + 50, 0.999), (10**6, 1.0)]
)
def test_filters_on_a_vocabulary_larger_than_the_first_try(top_k: int, top_p: float) -> None:
    """A flat row needs the whole sort, a peaked one does not; both in one batch."""
    random = np.random.default_rng(1)
    flat, peaked = random.normal(0, 0.1, 3000), random.normal(0, 4, 3000)
    rows = np.stack([flat, peaked] * 100).astype(np.float32)
    sampled = Sampler().sample(torch.from_numpy(rows.copy()), params(200, 1.0, top_k, top_p))
    for row, token, logp, sampled_logp in zip(
        rows, sampled.tokens, sampled.logprobs, sampled.sampled_logprobs, strict=True
    ):
        full, filtered = reference(row, 1.0, top_k, top_p)
        assert logp == pytest.approx(full[token], abs=1e-5)
        assert sampled_logp == pytest.approx(filtered[token], abs=1e-4)


def test_greedy_rows_among_others() -> None:
    logits = np.random.default_rng(2).normal(0, 2, (3, 40)).astype(np.float32)
    mixed = RowParams(
        np.array([0.0, 0.5, 0.0], dtype=np.float32),
        np.array([0, 0, 4]),
        np.array([0.3, 1.0, 1.0], dtype=np.float32),
        np.zeros(3, dtype=np.float32),
        np.array([0.9, 0.9, 0.9]),
        LogitChanges(),
    )
    sampled = Sampler().sample(torch.from_numpy(logits.copy()), mixed)
    assert sampled.tokens[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()
    assert sampled.sampled_logprobs[[0, 2]].tolist() == [0.0, 0.0]
    for row, temperature in enumerate((1.0, 0.5, 1.0)):
        full, _ = reference(logits[row], temperature, 0, 1.0)
        assert sampled.logprobs[row] == pytest.approx(full[sampled.tokens[row]], abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise(bad: float) -> None:
    logits = torch.zeros(3, 50)
    logits[1, 7] = bad
    with pytest.raises(DivergenceError, match="diverged"):
        Sampler().sample(logits, params(3))


class NoWaiting(TorchDispatchMode):
    """Operators with which a host waits for a device."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"), name
        return function(*arguments, **(named or {}))


def test_a_draw_waits_for_nothing() -> None:
    """Greedy rows, temperatures, filters and changed logits included."""
    torch.manual_seed(0)
    temperature = np.array([0.0, 1.0, 0.5, 1.0, 2.0, 1.0], np.float32)
    changing = SamplingParams(max_tokens=4, logit_bias={3: 2.0}, repetition_penalty=1.2, bad_words=((5,),))
    logits, uniform = torch.randn(6, 1300), params(6).uniform

    def rows(own: slice) -> RowParams:
        given = replace(params(3, uniform=uniform[own]), temperature=temperature[own])
        given.top_p[2], given.top_k[1], given.min_p[1] = 0.8, 5, 0.1
        given.changes.add(1, changing, (2,), np.array([1, 4, 4]), 2)
        return given

    halves = [(logits[own].clone(), rows(own)) for own in (slice(0, 3), slice(3, 6))]
    sampler = Sampler()
    with NoWaiting():
        drawn = [sampler.draw(own, given) for own, given in halves]
    found = Sampled.read(drawn)
    for number, own in enumerate((slice(0, 3), slice(3, 6))):
        alone = Sampler().sample(logits[own].clone(), rows(own))
        for name in ("tokens", "logprobs", "sampled_logprobs"):
            np.testing.assert_array_equal(getattr(found, name)[3 * number : 3 * number + 3], getattr(alone, name))


def test_a_batch_that_was_not_sorted_far_enough_is_sampled_again_and_no_other() -> None:
    random = np.random.default_rng(1)
    spreads, whole = (4, 0.1, 4), []
    batches = [random.normal(0, spread, (2, 3000)).astype(np.float32) for spread in spreads]
    sampler, drawn = Sampler(), []
    for number, rows in enumerate(batches):
        values, sort_all = sampler.draw(torch.from_numpy(rows.copy()), params(2, top_p=0.9))
        drawn.append(Drawn(values, lambda own=sort_all, number=number: whole.append(number) or own()))
    found = Sampled.read(drawn)
    assert whole == [1]
    for number, rows in enumerate(batches):
        alone = Sampler().sample(torch.from_numpy(rows.copy()), params(2, top_p=0.9))
        for name in ("tokens", "logprobs", "sampled_logprobs"):
            np.testing.assert_array_equal(getattr(found, name)[2 * number : 2 * number + 2], getattr(alone, name))


class NoSort(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in ("topk", "sort")
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("vocabulary", [23, 3000])
def test_min_p_alone_sorts_nothing(vocabulary: int) -> None:
    """Chi-square against the definition; rows without a filter, and greedy ones, are beside it."""
    logits = np.random.default_rng(0).normal(0, 1.5, vocabulary).astype(np.float32)
    count, least = 20_000 if vocabulary == 23 else 2_000, 0.3
    mixed = params(count)
    mixed.min_p[::2], mixed.temperature[:2], mixed.min_p[1] = least, 0.0, 0.9
    with NoSort():
        sampled = Sampler().sample(torch.from_numpy(np.tile(logits, (count, 1))), mixed)
    full, _ = reference(logits, 1.0, 0, 1.0)
    probability = np.exp(full)
    kept = np.where(probability >= np.float32(least) * probability.max(), probability, 0.0)
    kept /= kept.sum()
    own, others = np.arange(2, count, 2), np.arange(3, count, 2)
    assert (sampled.tokens[:2] == logits.argmax()).all() and (sampled.sampled_logprobs[:2] == 0).all()
    np.testing.assert_allclose(sampled.logprobs, full[sampled.tokens], atol=1e-5)
    np.testing.assert_allclose(sampled.sampled_logprobs[own], np.log(kept[sampled.tokens[own]]), atol=1e-5)
    np.testing.assert_allclose(sampled.sampled_logprobs[others], full[sampled.tokens[others]], atol=1e-5)
    expected = kept * own.size
    seen = np.bincount(sampled.tokens[own], minlength=vocabulary)
    statistic, degrees = ((seen - expected)[kept > 0] ** 2 / expected[kept > 0]).sum(), (kept > 0).sum() - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 6
