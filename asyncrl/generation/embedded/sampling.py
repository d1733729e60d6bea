"""Samples tokens from logits, and computes two log-probs for each token.

Guarantees
* The random number for token `i` of a request depends only on (seed, i), not on its row, other rows or arrival order.
* A token of probability zero is never sampled, even if the cumulative probability ends below 1 by rounding.
* `logprobs` are log softmax(logits / T) over the full vocabulary, with the model's own logits. For greedy rows T is taken as 1.
* `sampled_logprobs` are log-probs of the distribution that was sampled: after bias, penalties, bans, temperature, top-k, top-p and
  min-p, renormalised; 0 for greedy rows, whose choice was certain.
* A row of logits with NaN or +inf raises `DivergenceError`, and no token is returned.

Cost of a row without filters: one scaling, one softmax, and the sum of each block of the vocabulary. The sampler searches the
cumulative sums of the blocks, then those within one block, so it sorts nothing. min-p alone needs one more pass. Rows with top-k
or top-p need a partial sort. Rows with changed logits need copies of their logits and a logsumexp.

The host waits for the device only to copy the tokens. The copy also tells whether the partial sort sufficed. If it did not, the
batch is sampled again with a whole sort.

Shape legend: N rows, V vocabulary, B blocks of the vocabulary, R a subset of the rows, P pairs (see `_CHANGES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.errors import DivergenceError
from asyncrl.models.copying import to_device
from asyncrl.types import Float32Array, Int64Array, SamplingParams

BLOCK = 256  # vocabulary entries per block
# How many of the most probable tokens a filter examines first. If these do not suffice, all tokens are sorted.
FIRST_TRY = 256

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

UInt64Array = npt.NDArray[np.uint64]


def _mix(state: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64 bits: a counter becomes good random bits."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def seed_array(seeds: list[int] | int) -> UInt64Array:
    """Ints of any size, also of numpy, to uint64, modulo 2^64."""
    values = seeds if isinstance(seeds, list) else [seeds]
    return np.array([int(seed) & 0xFFFFFFFFFFFFFFFF for seed in values], dtype=np.uint64)


def keyed_uniform(seed_N: UInt64Array, index_N: Int64Array) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, a pure function of (seed, index). [N], [N] -> [N]."""
    counter = index_N.astype(np.uint64)
    with np.errstate(over="ignore"):  # the generator is defined modulo 2^64
        key = _mix(seed_N + _GOLDEN)
        bits = _mix(key + (counter + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


# Changes of logits, in the order of transformers and vLLM. Each maps (logits [pairs], values [pairs]) to new logits [pairs]. A pair
# is one token of one row.
_CHANGES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda logit, bias: logit + bias,
    lambda logit, penalty: torch.where(logit < 0, logit * penalty, logit / penalty),  # repetition
    lambda logit, penalty: logit - penalty,  # frequency and presence
    lambda logit, ban: ban,
)
_BIAS, _REPETITION, _PENALTY, _BAN = range(len(_CHANGES))


class LogitChanges:
    """Changes of logits that requests ask for, applied before the temperature. The changes of a row depend only on its request and
    the tokens of its sequence. `rows`: rows of the batch with at least one change."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        # For each of `_CHANGES`: (index in `rows`, token ids, a value for each token).
        self._parts: list[list[tuple[int, Int64Array, npt.NDArray[np.float64]]]] = [[] for _ in _CHANGES]

    def add(
        self, row: int, sampling: SamplingParams, stop_ids: tuple[int, ...], tokens: Int64Array, prompt_length: int
    ) -> None:
        """Add the changes for one row. `tokens` [L]: all tokens of the sequence, of which the first `prompt_length` are the prompt.
        `stop_ids`: tokens that end the completion."""
        changes: dict[int, tuple[Int64Array, npt.NDArray[np.float64]]] = {}
        if sampling.logit_bias:
            changes[_BIAS] = np.array([*sampling.logit_bias]), np.array([*sampling.logit_bias.values()], np.float64)
        # A token may be in `tokens` twice. `apply_` reads all logits before it writes, so it writes the same new logit twice.
        if sampling.repetition_penalty != 1:
            changes[_REPETITION] = tokens, np.full(tokens.size, sampling.repetition_penalty, np.float64)
        if (sampling.frequency_penalty or sampling.presence_penalty) and tokens.size > prompt_length:
            token, count = np.unique(tokens[prompt_length:], return_counts=True)
            changes[_PENALTY] = token, count * np.float64(sampling.frequency_penalty) + sampling.presence_penalty
        banned = [*stop_ids] if tokens.size - prompt_length < sampling.min_tokens else []
        # The last token of a bad word is banned if the completion ends with the other tokens of the word.
        for *before, last in sampling.bad_words:
            start = tokens.size - len(before)
            if start >= prompt_length and tokens[start:].tolist() == before:
                banned.append(last)
        if banned:
            changes[_BAN] = np.array(banned), np.full(len(banned), -np.inf)
        for kind, (token, value) in changes.items():
            self._parts[kind].append((len(self.rows), token, value))
        if changes:
            self.rows.append(row)

    def apply_(self, logits_RV: Tensor) -> None:
        """Apply the changes in place. `logits_RV`: the logits of `rows`."""
        for change, parts in zip(_CHANGES, self._parts, strict=True):
            if parts:
                row = np.repeat([index for index, _, _ in parts], [token.size for _, token, _ in parts])
                token = np.concatenate([token for _, token, _ in parts])
                value = np.concatenate([value for _, _, value in parts])
                pairs = tuple(to_device(index, logits_RV.device) for index in (row, token))
                value_P = to_device(value, logits_RV.device).to(logits_RV.dtype)
                logits_RV[pairs] = change(logits_RV[pairs], value_P)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of N rows: arrays [N] on the host, and changes of logits. `uniform`: random numbers in [0, 1)."""

    temperature: Float32Array  # 0 is greedy
    top_k: Int64Array  # 0 is off
    top_p: Float32Array  # 1 is off
    min_p: Float32Array  # 0 is off
    uniform: npt.NDArray[np.float64]
    changes: LogitChanges

    @property
    def needs_sort(self) -> npt.NDArray[np.bool_]:
        """Whether the filters of each row need sorted probabilities: bool [N]."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1))


class Drawn(NamedTuple):
    """The result of `Sampler.draw`. `values` [5, N] float64 on the device: tokens, log-probs of the model, log-probs as sampled, a
    check that is NaN for logits with NaN or +inf, and whether the partial sort sufficed (1 or 0). `sort_all` computes the values
    again with a whole sort, and for this keeps the logits alive. `sort_all` is None if no row needs a sort."""

    values: Tensor
    sort_all: Callable[[], Tensor] | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and log-probs (nats) of one decode step, [N] on the host."""

    tokens: Int64Array
    logprobs: Float32Array
    sampled_logprobs: Float32Array

    @staticmethod
    def read(drawn: Sequence[Drawn]) -> Sampled:
        """Copy the results of one or more calls of `Sampler.draw` to the host, in order. Waits for the device. Errors:
        DivergenceError if a row of logits has NaN or +inf."""
        values = [batch.values for batch in drawn]
        host = torch.cat(values, 1).cpu().numpy()
        if not host[4].all():
            ends = np.cumsum([batch.shape[1] for batch in values])
            sufficed = [part.all() for part in np.split(host[4], ends[:-1])]
            values = [
                batch.values if enough or batch.sort_all is None else batch.sort_all()
                for batch, enough in zip(drawn, sufficed, strict=True)
            ]
            host = torch.cat(values, 1).cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(host[3]))
        if bad.size:
            error = DivergenceError(
                f"the model's logits are not finite in {bad.size} of {host.shape[1]} sequences (rows {bad[:8].tolist()}): "
                "the weights have diverged; lower the learning rate or resume from an earlier checkpoint"
            )
            error.unusable_weights = True
            raise error
        return Sampled(host[0].astype(np.int64), host[1].astype(np.float32), host[2].astype(np.float32))


class Sampler:
    """Samples one token per row of logits. Keeps its buffer of probabilities, because new memory costs page faults. Only the lane,
    the device's thread, may use a sampler."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._buffer_kind: object = None

    def _probabilities(self, logits_NV: Tensor) -> Tensor:
        rows, vocabulary = logits_NV.shape
        kind = vocabulary, logits_NV.dtype, logits_NV.device
        if self._buffer is None or self._buffer_kind != kind or self._buffer.shape[0] < rows:
            self._buffer, self._buffer_kind = torch.empty_like(logits_NV), kind
        return torch.softmax(logits_NV, dim=-1, out=self._buffer[:rows])

    def sample(self, logits_NV: Tensor, params: RowParams) -> Sampled:
        """`draw` and `Sampled.read` in one call. Errors: DivergenceError."""
        return Sampled.read([self.draw(logits_NV, params)])

    def draw(self, logits_NV: Tensor, params: RowParams) -> Drawn:
        """Sample one token per row. `logits_NV` (float32 or float64) is overwritten. The host does not wait for the device."""
        device = logits_NV.device
        temperature = np.where(params.temperature == 0, np.float32(1.0), params.temperature)
        changed = params.changes.rows
        changed_RV: Tensor | None = None
        if changed:
            # If the index were a list, the host would wait until the list is copied to the device.
            changed_R = to_device(np.array(changed), device)
            changed_RV = logits_NV[changed_R]  # a copy, changed below
        if (temperature != 1).any():
            scale = to_device(temperature, device).to(logits_NV.dtype)
            logits_NV.div_(scale.unsqueeze(1))
        # For the log-probs of the model: (rows with changes, logits of these rows without the changes, divided by the temperature).
        unchanged: tuple[Tensor, Tensor] | None = None
        if changed_RV is not None:
            unchanged = changed_R, logits_NV[changed_R]
            params.changes.apply_(changed_RV)
            scale = to_device(temperature[changed], device).to(logits_NV.dtype)
            logits_NV[changed_R] = changed_RV.div_(scale.unsqueeze(1))
        choose = partial(self._choose, logits_NV, params, unchanged)
        return Drawn(choose(FIRST_TRY), partial(choose, logits_NV.shape[1]) if params.needs_sort.any() else None)

    def _choose(
        self, logits_NV: Tensor, params: RowParams, unchanged: tuple[Tensor, Tensor] | None, count: int
    ) -> Tensor:
        """`Drawn.values` for logits after changes and temperature. `count`: how many of a row's tokens to sort."""
        device, rows = logits_NV.device, logits_NV.shape[0]
        greedy, sort = params.temperature == 0, params.needs_sort
        probs_NV = self._probabilities(logits_NV)
        uniform = to_device(params.uniform, device)
        min_p_alone = ~greedy & ~sort & (params.min_p > 0)
        # The probability of the tokens that the filters keep. None: 1 in every row.
        mass_N: Tensor | None = None
        if min_p_alone.any():
            least_N = to_device(np.where(min_p_alone, params.min_p, 0.0), device).to(probs_NV.dtype) * probs_NV.amax(-1)
            probs_NV.masked_fill_(probs_NV < least_N.unsqueeze(1), 0.0)
            mass_N = torch.where(to_device(min_p_alone, device), probs_NV.sum(-1, dtype=torch.float64), 1.0)
        token_N = torch.zeros(rows, dtype=torch.int64, device=device) if sort.all() else _inverse_cdf(probs_NV, uniform)
        enough_N = torch.ones_like(uniform)
        if sort.any():
            index = to_device(np.flatnonzero(sort), device)
            chosen, mass, enough = _sample_sorted(probs_NV, index, params, uniform[index], count)
            token_N.index_copy_(0, index, chosen)
            mass_N = (torch.ones_like(uniform) if mass_N is None else mass_N).index_copy_(0, index, mass)
            enough_N.index_copy_(0, index, enough.double())
        greedy_N = to_device(greedy, device) if greedy.any() else None
        if greedy_N is not None:
            token_N = torch.where(greedy_N, logits_NV.argmax(dim=-1), token_N)
        prob_N = probs_NV.gather(1, token_N.unsqueeze(1)).squeeze(1).double()
        logp_N = prob_N.log()
        sampled_logp_N = logp_N if mass_N is None else logp_N - mass_N.log()
        check_N = prob_N
        if unchanged is not None:
            changed_R, unchanged_RV = unchanged
            # A bias can choose a token whose probability without the bias underflows to 0. So the log-prob comes from logits.
            logit_R = unchanged_RV.gather(1, token_N[changed_R].unsqueeze(1)).squeeze(1)
            logp_R = logit_R.double() - unchanged_RV.logsumexp(-1).double()
            logp_N = logp_N.index_copy(0, changed_R, logp_R)
            check_N[changed_R] = torch.where(logp_R.isfinite(), check_N[changed_R], torch.nan)
        if greedy_N is not None:
            sampled_logp_N = sampled_logp_N.masked_fill(greedy_N, 0.0)
        return torch.stack((token_N.double(), logp_N, sampled_logp_N, check_N, enough_N))


def _inverse_cdf(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Index of the first token whose cumulative probability exceeds uniform x total. [N, V], float64 [N] -> int64 [N].
    Searches the cumulative sums of the blocks (float64), then the tokens of one block."""
    vocabulary = probs_NV.shape[1]
    full_blocks = vocabulary // BLOCK
    if full_blocks < 4:  # a small vocabulary needs no blocks
        return _search(probs_NV.double().cumsum(1), uniform_N)[0]
    sums_NB = probs_NV[:, : full_blocks * BLOCK].view(-1, full_blocks, BLOCK).sum(-1)
    if vocabulary % BLOCK:
        sums_NB = torch.cat((sums_NB, probs_NV[:, full_blocks * BLOCK :].sum(-1, keepdim=True)), 1)
    cumulative_NB = sums_NB.double().cumsum(1)
    block, target = _search(cumulative_NB, uniform_N)
    before = torch.where(block > 0, cumulative_NB.gather(1, (block - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    tokens = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=probs_NV.device)
    probs_in_block = probs_NV.gather(1, tokens.clamp(max=vocabulary - 1)).double()
    probs_in_block.masked_fill_(tokens >= vocabulary, 0.0)
    offset = _search_target(probs_in_block.cumsum(1), target - before)
    return (block * BLOCK + offset).clamp_(max=vocabulary - 1)


def _search(cumulative: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the first entry above the target, target = uniform x total). float64 [N, B], [N] -> int64 [N], float64 [N]."""
    target = uniform_N * cumulative[:, -1]
    return _search_target(cumulative, target), target


def _search_target(cumulative: Tensor, target_N: Tensor) -> Tensor:
    last = cumulative[:, -1]
    # With a target below the last value the search always ends at an entry of positive probability.
    below_last = torch.nextafter(last, torch.zeros_like(last))
    target = torch.minimum(target_N, below_last).clamp_(min=0.0).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=cumulative.shape[1] - 1)


def _sample_sorted(
    probs_NV: Tensor, index_R: Tensor, params: RowParams, uniform_R: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the rows with top-k or top-p, `index_R`, from their `count` most probable tokens. Returns (tokens, total
    probability of the kept tokens, whether `count` sufficed): int64, float64 and bool [R].

    Filters run in the order of transformers: top-k, then the smallest set that reaches top-p of the remaining probability, then the
    tokens with at least min-p of the largest probability. (vLLM's own sampler applies min-p first, so top-p keeps another set.)
    """
    device, vocabulary, sort = probs_NV.device, probs_NV.shape[1], params.needs_sort
    top_k = params.top_k[sort]
    k_R = to_device(np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary), device)
    p_R = to_device(params.top_p[sort].astype(np.float64), device)
    min_p_R = to_device(params.min_p[sort].astype(np.float64), device)
    probs_RV = probs_NV[index_R]
    count = min(vocabulary, count)
    values, order = torch.topk(probs_RV, count, dim=1, sorted=True)
    kept = values.double()
    column = torch.arange(count, device=device)
    kept.masked_fill_(column >= k_R.unsqueeze(1), 0.0)
    cumulative = kept.cumsum(1)
    # top-p is a fraction of `total`: the probability of the top-k tokens, or of the full row if top-k is off.
    total = torch.where(k_R < vocabulary, cumulative[:, -1], probs_RV.sum(1, dtype=torch.float64))
    # The `count` candidates suffice if they include all top-k tokens, or if top-k is off and the candidates reach top-p.
    enough = (k_R <= count) | ((k_R == vocabulary) & (p_R < 1) & (cumulative[:, -1] >= p_R * total))
    # If min-p removes all other tokens, the candidates also suffice if `total` is known (top-k off) or not needed (top-p off).
    others_below_min_p = values[:, -1] < min_p_R * values[:, 0]
    enough |= others_below_min_p & ((k_R == vocabulary) | (p_R == 1))
    outside = (cumulative - kept) >= (p_R * total).unsqueeze(1)
    outside[:, 0] = False  # the most probable token always stays
    kept.masked_fill_(outside & (p_R < 1).unsqueeze(1), 0.0)
    kept.masked_fill_(values < (min_p_R * values[:, 0]).unsqueeze(1), 0.0)
    cumulative = kept.cumsum(1)
    column_R, _ = _search(cumulative, uniform_R)
    return order.gather(1, column_R.unsqueeze(1)).squeeze(1), cumulative[:, -1], enough
