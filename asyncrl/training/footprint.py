"""What a forward keeps for backward, what a backward takes beside it, and what a cache holds, measured on a few layers of the
model: no formula per architecture.

The model is built once more with one layer of each kind, a small vocabulary and weights that are nearly all zeros, at its real
widths, and forward and backward of its path run over rows of three lengths. What autograd keeps is counted by storage, weights
left out, layer by layer: `constant + token x n + score x n^2` of a row of n tokens goes through the three points. Layers of one
kind keep the same, so the sum over all layers of the real model follows. The backward goes down to the embeddings, past most
weights: the size of a weight's gradient does not depend on tokens (memory.py).

Shape legend: n tokens of a row, T of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import DTYPES, PolicyModel
from asyncrl.models.probe import first_of_kind, probe_config
from asyncrl.models.routing import EXPERTS

from .layer_passes import HEAD, run_passes, tensors

MAX_PARAMETERS = 500_000_000  # of the few layers: seconds and gigabytes; beyond it the formula has to do
_FEWEST_EXPERTS = 8
_SMALL = 1 << 20  # parameters of a matrix that is drawn and not zero
_MOST_SCORES = 4  # times the bytes that are kept of a pair, that a backward may take of it
_ROW = 64  # tokens of the shortest row; linear attention goes by chunks of as many
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_DESPITE = (ConfigError, ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes: of each token, and of each pair of a query and a key of one row (attention that keeps its weights)."""

    token: float = 0.0
    score: float = 0.0

    def of(self, tokens: float, scores: float) -> float:
        """Bytes of so many tokens and pairs."""
        return self.token * tokens + self.score * scores


@dataclass(frozen=True, slots=True)
class Cached:
    """Bytes that a cache holds of one layer: of each position (the last `window` of them), and of each sequence."""

    position: float = 0.0
    sequence: float = 0.0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Footprint:
    """`layers`, `beside`, `making`, `attending`, `cached`: one entry a layer of the model. `layers`: what it keeps for backward;
    `beside`: the most that its backward takes beside what is kept, gradients of weights left out; `making`: the same of the times
    at which there is one (of experts; of other layers not told apart); `attending`: of the time of our attention's backward, which
    takes its own beside that. `rest`: kept outside of the layers. `heads`: of queries. `measured`: False where the numbers come
    from `estimate_footprint`."""

    path: ModelPath
    layers: tuple[Kept, ...]
    beside: tuple[Kept, ...]
    making: tuple[Kept, ...]
    attending: tuple[Kept, ...]
    rest: Kept
    cached: tuple[Cached, ...]
    heads: int
    measured: bool = True


def measure_footprint(
    module: PreTrainedModel, dtype: str, path: ModelPath | None = None, lora: LoraConfig | None = None
) -> Footprint | None:
    """Of a model that may lie on the meta device. `path` None: the first that takes it. None where a few of its layers cannot
    be built or run by themselves, or are too large."""
    first = first_of_kind(module)
    try:
        policy, path = _few_layers(module, dtype, path, lora)
        layers, rest = _measure_passes(policy, _row_length(policy.config))
        cached = own_cache(module.config, dtype)
        if path.name == "plain":
            cached = _measure_cached(policy, first, _row_length(policy.config))
    except _DESPITE:  # the prediction is an estimate then, which it says; whether the model runs is the gate's question
        return None
    if max(first, default=0) >= len(layers):
        return None
    kept, beside, making, attending = zip(*(layers[number] for number in first), strict=True)
    return Footprint(path, kept, beside, making, attending, rest, cached, _heads(module.config))


def _few_layers(
    module: PreTrainedModel, dtype: str, path: ModelPath | None, lora: LoraConfig | None
) -> tuple[PolicyModel, ModelPath]:
    config = probe_config(module, contexts=False)
    while (size := _size(module, config)) > MAX_PARAMETERS:
        if not _halve_experts(config):
            raise ValueError(f"a layer of each kind has {size} parameters")
    refused: Exception | None = None
    for each in (path,) if path is not None else (FUSED, PACKED, *PLAIN):
        with no_init_weights(), torch.random.fork_rng(devices=[]):
            small: PreTrainedModel = type(module)._from_config(config, dtype=torch.float32)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in small.parameters():  # vectors are told apart by what norms make of them
                if parameter.ndim < 2:
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                else:  # routers have to send tokens to all experts
                    parameter.normal_(generator=random) if parameter.numel() <= _SMALL else parameter.zero_()
        try:
            policy = PolicyModel(small, dtype, lora=lora, served=not (lora and lora.rank), path=each)
        except ConfigError as error:
            refused = error
            continue
        if not (lora and lora.rank):
            small.requires_grad_(True)  # what autograd keeps depends on it
        return policy, each
    raise refused or ValueError("no path")


def _size(module: PreTrainedModel, config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in type(module)._from_config(config).parameters())


def _halve_experts(config: PretrainedConfig) -> bool:
    """What a token keeps is of the experts that it goes to, however many there are. False where there are few."""
    text = config.get_text_config()
    found = {name: value for name in EXPERTS if isinstance(value := getattr(text, name, None), int)}
    if max(found.values(), default=0) < 2 * _FEWEST_EXPERTS:
        return False
    for name, value in found.items():  # some of them are two names of one number
        setattr(text, name, value // 2)
    return True


def _row_length(config: PretrainedConfig) -> int:
    """A whole number of the chunks in which a layer pads its rows."""
    text = config.get_text_config()
    given = [getattr(text, name, None) for name in _CHUNKS]
    return max(_ROW, *(size for size in given if isinstance(size, int)), 0)


def _measure_passes(policy: PolicyModel, row: int) -> tuple[list[tuple[Kept, ...]], Kept]:
    """(of each of the few layers `layers`, `beside`, `making` and `attending`; what is kept outside of them)."""
    lengths = [row, 2 * row, 3 * row]
    found = [run_passes(policy, length) for length in lengths]
    layers = []
    for owner in sorted({owner for each in found for owner in each.kept} - {HEAD}):
        kept = _fit(lengths, [each.kept.get(owner, 0) for each in found])
        peaks = ("beside", "making", "attending")
        sizes = ([getattr(each, name).get(owner, 0) for each in found] for name in peaks)
        layers.append((kept, *(_fit_peak(lengths, each, kept) for each in sizes)))
    return layers, _fit(lengths, [each.kept.get(HEAD, 0) for each in found])


def _fit(lengths: list[int], sizes: list[int]) -> Kept:
    square, linear, _ = np.polyfit(np.array(lengths, np.float64), np.array(sizes, np.float64), 2)
    square = 0.0 if square < 1e-6 * max(linear, 1.0) else square
    return Kept(round(max(float(linear), 0.0), 3), round(float(square), 3))


def _fit_peak(lengths: list[int], sizes: list[int], kept: Kept) -> Kept:
    """As `_fit`. A peak moves from one operation to another as rows grow, which bends the curve: where nothing is kept of pairs it
    is a line, and else no more is taken of them than a few times what is kept."""
    if kept.score:
        found = _fit(lengths, sizes)
        if found.score <= _MOST_SCORES * kept.score:
            return found
    slope = max(sizes[-1] - sizes[-2], 0) / (lengths[-1] - lengths[-2])
    return Kept(round(max(slope, sizes[-1] / lengths[-1] if kept.score else 0.0), 3))


@torch.no_grad()
def _measure_cached(policy: PolicyModel, first: list[int], row: int) -> tuple[Cached, ...]:
    """Of each layer of the model, from what transformers' own cache holds after rows of two lengths."""
    short, long = (_cached_bytes(policy, length) for length in (row, 2 * row))
    found = []
    for (before, window), (after, _) in zip(short, long, strict=True):
        if window is not None:
            found.append(Cached(before / row, 0.0, window))
        else:
            slope = max((after - before) / row, 0.0)
            found.append(Cached(slope, before - slope * row))
    return tuple(found[number] for number in first)


def _cached_bytes(policy: PolicyModel, length: int) -> list[tuple[int, int | None]]:
    """(bytes, window) of each layer of the cache after one row of `length` tokens."""
    module: Any = policy.module
    tokens = torch.zeros(1, length, dtype=torch.int64, device=policy.device)
    output = module(input_ids=tokens, use_cache=True, return_dict=True)
    (cache,) = (value for value in output.values() if isinstance(value, Cache))
    layers = []
    for layer in cache.layers:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors(vars(layer))}
        window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
        layers.append((sum(storages.values()), window))
    return layers


def estimate_footprint(config: PretrainedConfig, dtype: str, path: ModelPath | None) -> Footprint:
    """The same by a formula for Llama-like decoders, where nothing can be measured. `path` None: fused if it looks so."""
    text = config.get_text_config()
    narrow = DTYPES[dtype].itemsize
    wide = max(narrow, 4)
    hidden, layers = int(text.hidden_size), int(text.num_hidden_layers)
    heads = _heads(config)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or hidden // heads)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    attention = (2 * heads + 2 * kv_heads) * head_size
    if path is None:
        looks_so = getattr(text, "hidden_act", None) == "silu" and hasattr(text, "num_key_value_heads")
        path = FUSED if looks_so else PACKED
    if path == FUSED:
        # models.fused keeps per token and layer: two residuals, q/k/v, the attention's output, gate and up
        token = narrow * (2 * hidden + attention + 2 * inner)
    else:
        # autograd keeps: both residuals and normed inputs, four of the MLP's inner size, attention's twice (one wide)
        token = narrow * (4 * hidden + 4 * inner + attention) + wide * attention
    score = float(heads * narrow)  # weights of short rows, or the plain path's own
    kept = (Kept(float(token), score),) * layers
    beside = kept if path == FUSED else (Kept(),) * layers  # a fused layer holds gradients beside what it kept
    return Footprint(
        path,
        kept,
        beside,
        beside,
        beside,
        Kept(2.0 * narrow * hidden),
        own_cache(config, dtype),
        heads,
        measured=False,
    )


def own_cache(config: PretrainedConfig, dtype: str) -> tuple[Cached, ...]:
    """Of the engine's own cache (generation/embedded/cache.py): keys and values of every position, in every layer."""
    text = config.get_text_config()
    heads = _heads(config)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    one = Cached(float(2 * kv_heads * head_size * DTYPES[dtype].itemsize))
    return (one,) * int(text.num_hidden_layers)


def _heads(config: PretrainedConfig) -> int:
    return int(getattr(config.get_text_config(), "num_attention_heads", None) or 1)
