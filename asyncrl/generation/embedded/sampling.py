"""Turning logits into tokens: keyed randomness, inverse-CDF sampling, both log-prob columns.

Guarantees
* The uniform number of token `i` of a request depends on (seed, i) alone: never on arrival, row or neighbours.
* A token of probability zero is never sampled, not even when rounding makes the CDF end early.
* `logprobs` = log softmax(logits / T) over the whole vocabulary, of the logits as the model gave them; `sampled_logprobs` = of
  the distribution that was drawn from: bias, penalties, bans, temperature, top-k, top-p, min-p, renormalised. Greedy rows
  (T = 0): the first is taken at T = 1, the second is 0, for the choice was certain.
* NaN or infinite logits raise `DivergenceError`; nothing is sampled from them.

Cost per row without filters: one scaling, one softmax and one block sum over the vocabulary; the CDF itself is walked
in two levels (blocks, then one block), so no cumulative sum runs over the vocabulary and nothing is sorted. Rows with
top-k, top-p or min-p pay for a partial sort of their own, rows whose logits change for another softmax and copies of their logits.

Shape legend: N rows, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.errors import DivergenceError
from asyncrl.models.copying import to_device
from asyncrl.types import Float32Array, Int64Array, SamplingParams

BLOCK = 256  # vocabulary entries per block of the two-level CDF
# Sorted candidates looked at before a top-p row pays for a sort of the whole vocabulary.
FIRST_TRY = 256

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

UInt64Array = npt.NDArray[np.uint64]


def _mix(state: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits, good on a mere counter."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def seed_array(seeds: list[int] | tuple[int, ...] | int) -> UInt64Array:
    """Any Python ints -> uint64, modulo 2^64."""
    values = [seeds] if isinstance(seeds, int) else seeds
    return np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in values], dtype=np.uint64)


def keyed_uniform(seed_N: UInt64Array, index_N: Int64Array) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, a pure function of (seed, index). [N], [N] -> [N]."""
    counter = index_N.astype(np.uint64)
    with np.errstate(over="ignore"):  # wrapping around is the arithmetic of the generator
        key = _mix(seed_N + _GOLDEN)
        bits = _mix(key + (counter + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


# What is made of logits, in this order, on which transformers and vLLM agree: [pairs], and a number for each.
_CHANGES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda logit, bias: logit + bias,
    lambda logit, penalty: torch.where(logit < 0, logit * penalty, logit / penalty),  # repetition
    lambda logit, penalty: logit - penalty,  # frequency and presence
    lambda logit, ban: ban,
)
_BIAS, _REPETITION, _PENALTY, _BAN = range(len(_CHANGES))


class LogitChanges:
    """What requests do to the logits of some tokens before the temperature; `rows` of the batch have any. Everything follows from
    the request and its tokens so far: there is no state to keep."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._parts: list[list[tuple[int, Int64Array, npt.NDArray[np.float64]]]] = [[] for _ in _CHANGES]

    def add(
        self, row: int, sampling: SamplingParams, stop_ids: tuple[int, ...], tokens: Int64Array, prompt: int
    ) -> None:
        """`tokens` [L]: of the sequence so far, the first `prompt` of them its prompt's. `stop_ids`: what ends its completion."""
        found: dict[int, tuple[Int64Array, npt.NDArray[np.float64]]] = {}
        if sampling.logit_bias:
            found[_BIAS] = np.array([*sampling.logit_bias]), np.array([*sampling.logit_bias.values()], np.float64)
        # A token that stands there twice is written twice, with the same number.
        if sampling.repetition_penalty != 1:
            found[_REPETITION] = tokens, np.full(tokens.size, sampling.repetition_penalty, np.float64)
        if (sampling.frequency_penalty or sampling.presence_penalty) and tokens.size > prompt:
            token, count = np.unique(tokens[prompt:], return_counts=True)
            found[_PENALTY] = token, count * np.float64(sampling.frequency_penalty) + sampling.presence_penalty
        banned = [*stop_ids] if tokens.size - prompt < sampling.min_tokens else []
        for *before, last in sampling.bad_words:
            start = tokens.size - len(before)
            if start >= prompt and tokens[start:].tolist() == before:
                banned.append(last)
        if banned:
            found[_BAN] = np.array(banned), np.full(len(banned), -np.inf)
        for kind, (token, value) in found.items():
            self._parts[kind].append((len(self.rows), token, value))
        if found:
            self.rows.append(row)

    def apply_(self, logits_RV: Tensor) -> None:
        """To the logits of `rows`, in place."""
        for change, parts in zip(_CHANGES, self._parts, strict=True):
            if parts:
                place = np.repeat([row for row, _, _ in parts], [token.size for _, token, _ in parts])
                token, value = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
                at = tuple(to_device(index, logits_RV.device) for index in (place, token))
                own = to_device(value, logits_RV.device).to(logits_RV.dtype)
                logits_RV[at] = change(logits_RV[at], own)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Per-row sampling numbers, all [N] on the host. `uniform` in [0, 1)."""

    temperature: Float32Array  # 0 is greedy
    top_k: Int64Array  # 0 is off
    top_p: Float32Array  # 1 is off
    min_p: Float32Array  # 0 is off
    uniform: npt.NDArray[np.float64]
    changes: LogitChanges


@dataclass(frozen=True, slots=True)
class Sampled:
    """Columns of one decode step, [N] on the host."""

    tokens: Int64Array
    logprobs: Float32Array
    sampled_logprobs: Float32Array

    @staticmethod
    def read(drawn: Sequence[Tensor]) -> Sampled:
        """What `Sampler.draw` gave in one call or several, one after the other. The host waits for the device here. Errors:
        DivergenceError where a row of logits held NaN or +inf."""
        host = (drawn[0] if len(drawn) == 1 else torch.cat([*drawn], 1)).cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(host[3]))
        if bad.size:
            error = DivergenceError(
                f"the model's logits are not finite in {bad.size} of {host.shape[1]} sequences (rows {bad[:8].tolist()}): "
                "the weights have diverged; lower the learning rate or resume from an earlier checkpoint"
            )
            error.spoiled = True
            raise error
        return Sampled(host[0].astype(np.int64), host[1].astype(np.float32), host[2].astype(np.float32))


class Sampler:
    """Owns one probability buffer, reused every step (fresh buffers cost page faults). Lives on the lane."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def _probabilities(self, logits_NV: Tensor) -> Tensor:
        rows, vocabulary = logits_NV.shape
        buffer = self._buffer
        if (
            buffer is None
            or buffer.shape[0] < rows
            or buffer.shape[1] != vocabulary
            or buffer.dtype != logits_NV.dtype
            or buffer.device != logits_NV.device
        ):
            buffer = self._buffer = torch.empty_like(logits_NV)
        return torch.softmax(logits_NV, dim=-1, out=buffer[:rows])

    def sample(self, logits_NV: Tensor, params: RowParams) -> Sampled:
        """As `draw`, and read. Errors: DivergenceError."""
        return Sampled.read([self.draw(logits_NV, params)])

    def draw(self, logits_NV: Tensor, params: RowParams) -> Tensor:
        """One token per row: [4, N] float64 on the device, of tokens, log-probs under the model, log-probs as sampled, and a number
        that is not finite where the logits are not. `logits_NV` [N, V] float32 or float64 is overwritten. Without filters the host
        waits for nothing."""
        device = logits_NV.device
        greedy = params.temperature == 0
        temperature = np.where(greedy, np.float32(1.0), params.temperature)
        changed = params.changes.rows
        changed_RV = logits_NV[changed] if changed else None
        if (temperature != 1).any():
            scale = to_device(temperature, device).to(logits_NV.dtype)
            logits_NV.div_(scale.unsqueeze(1))
        own_RV: Tensor | None = None  # the model's, at the temperature
        if changed_RV is not None:
            own_RV = logits_NV[changed]
            params.changes.apply_(changed_RV)
            scale = to_device(temperature[changed], device).to(logits_NV.dtype)
            logits_NV[changed] = changed_RV.div_(scale.unsqueeze(1))
        probs_NV = self._probabilities(logits_NV)
        uniform = to_device(params.uniform, device)
        token_N = _inverse_cdf(probs_NV, uniform)
        filtered = ~greedy & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
        mass_N: Tensor | None = None
        if filtered.any():
            index = to_device(np.flatnonzero(filtered), device)
            chosen, mass = _filtered(probs_NV, index, params, filtered, uniform[index])
            token_N = token_N.index_copy(0, index, chosen)
            mass_N = torch.ones_like(uniform).index_copy_(0, index, mass)
        mask = to_device(greedy, device) if greedy.any() else None
        if mask is not None:
            token_N = torch.where(mask, logits_NV.argmax(dim=-1), token_N)
        chosen_N = probs_NV.gather(1, token_N.unsqueeze(1)).squeeze(1).double()
        logp_N = chosen_N.log()
        sampled_N = logp_N if mass_N is None else logp_N - mass_N.log()
        if own_RV is not None:
            # No softmax, which would underflow: to the model alone such a token may be all but impossible.
            own_R = own_RV.gather(1, token_N[changed].unsqueeze(1)).squeeze(1).double() - own_RV.logsumexp(-1).double()
            index = to_device(np.array(changed), device)
            logp_N = logp_N.index_copy(0, index, own_R)
            chosen_N[index] = torch.where(own_R.isfinite(), chosen_N[index], torch.nan)
        if mask is not None:
            sampled_N = sampled_N.masked_fill(mask, 0.0)
        return torch.stack((token_N.double(), logp_N, sampled_N, chosen_N))


def _inverse_cdf(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """First index whose cumulative probability exceeds u x total, in two levels. [N, V], float64 [N] -> int64 [N].

    Sums above the block level are float64. The target is held strictly below the last cumulative value, so the search
    always ends on an entry that adds something, that is, one of positive probability.
    """
    vocabulary = probs_NV.shape[1]
    whole = vocabulary // BLOCK
    if whole < 4:  # a tiny vocabulary: one level
        return _search(probs_NV.double().cumsum(1), uniform_N)[0]
    sums = probs_NV[:, : whole * BLOCK].view(-1, whole, BLOCK).sum(-1)
    if vocabulary % BLOCK:
        sums = torch.cat((sums, probs_NV[:, whole * BLOCK :].sum(-1, keepdim=True)), 1)
    cumulative = sums.double().cumsum(1)
    block, target = _search(cumulative, uniform_N)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    columns = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=probs_NV.device)
    inside = probs_NV.gather(1, columns.clamp(max=vocabulary - 1)).double()
    inside.masked_fill_(columns >= vocabulary, 0.0)
    within = _search_value(inside.cumsum(1), target - before)
    return (block * BLOCK + within).clamp_(max=vocabulary - 1)


def _search(cumulative: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first entry above u x total, and that target. float64 [N, B], [N] -> int64 [N], float64 [N]."""
    target = uniform_N * cumulative[:, -1]
    return _search_value(cumulative, target), target


def _search_value(cumulative: Tensor, target_N: Tensor) -> Tensor:
    last = cumulative[:, -1]
    below = torch.nextafter(last, torch.zeros_like(last))
    target = torch.minimum(target_N, below).clamp_(min=0.0).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=cumulative.shape[1] - 1)


def _filtered(
    probs_NV: Tensor, index_R: Tensor, params: RowParams, filtered: npt.NDArray[np.bool_], uniform_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample the R rows that have a filter: tokens int64 [R], and the mass of the softmax kept, float64 [R].

    Order as in transformers: top-k first, then the smallest set of the renormalised rest that reaches top-p, then what has at least
    min-p of the largest probability. (vLLM's own sampler has min-p before the others: another set where top-p is there, too.)
    """
    device, vocabulary = probs_NV.device, probs_NV.shape[1]
    top_k = params.top_k[filtered]
    k_R = to_device(np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary), device)
    p_R = to_device(params.top_p[filtered].astype(np.float64), device)
    least_R = to_device(params.min_p[filtered].astype(np.float64), device)
    probs_RV = probs_NV[index_R]
    count = min(vocabulary, FIRST_TRY)
    while True:
        values, order = torch.topk(probs_RV, count, dim=1, sorted=True)
        kept = values.double()
        rank = torch.arange(count, device=device)
        kept.masked_fill_(rank >= k_R.unsqueeze(1), 0.0)
        cumulative = kept.cumsum(1)
        # Mass that top-p refers to: of the top-k candidates, or of the whole row where top-k is off.
        total = torch.where(k_R < vocabulary, cumulative[:, -1], probs_RV.sum(1, dtype=torch.float64))
        enough = (k_R <= count) | ((k_R == vocabulary) & (p_R < 1) & (cumulative[:, -1] >= p_R * total))
        # Nothing behind the candidates is above min-p either; the mass that top-p refers to is known all the same.
        enough |= (values[:, -1] < least_R * values[:, 0]) & ((k_R == vocabulary) | (p_R == 1))
        if count == vocabulary or bool(enough.all()):
            break
        count = vocabulary
    outside = (cumulative - kept) >= (p_R * total).unsqueeze(1)
    outside[:, 0] = False  # the most probable token always stays
    kept.masked_fill_(outside & (p_R < 1).unsqueeze(1), 0.0)
    kept.masked_fill_(values < (least_R * values[:, 0]).unsqueeze(1), 0.0)
    cumulative = kept.cumsum(1)
    place, _ = _search(cumulative, uniform_R)
    return order.gather(1, place.unsqueeze(1)).squeeze(1), cumulative[:, -1]
