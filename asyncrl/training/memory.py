"""Memory of a run, predicted before anything of it is allocated.

Weights and their copies follow from the number of parameters; what a microbatch keeps for backward and what a cache holds
from a few layers of the model (footprint.py), at the longest rows that the run can have: a prompt of the longest length with
a completion of `rollout.max_tokens`. So it is the worst case of a run, which short completions stay below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.models.attention.rows import fits
from asyncrl.models.fused.layers import experts_of
from asyncrl.models.head.logprobs import CHUNK_ROWS, KEEP_LOGITS
from asyncrl.models.head.output import decoder_of
from asyncrl.models.loading import adapter_sizes, describe_module, parameter_count
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.paths import FUSED, PACKED, ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.routing import describe_routes

from .footprint import Footprint, Kept, estimate_footprint, measure_footprint

_HEAD_ROWS = {
    "float32": 256
}  # rows of the head's forward products on a CPU (models/head/logprobs.py); 64 in another dtype


_BINS = 8 << 20  # of a bin of rows in the backward of our attention: scores, their gradient, gathered rows

# oneDNN compiles a product anew for each number of rows: so many bytes, whatever the size of the weight.
_COMPILED = 576 << 10
_CACHED = (
    768  # such products that torch and oneDNN keep, of packed weights, and as many of others; then older ones leave
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest prompt and of the longest completion, and how many completions share a prompt."""

    prompt: int
    completion: int
    members: int = 1

    @property
    def context(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion


def predict_memory(
    model: ModelConfig,
    train: TrainConfig,
    *,
    max_sequences: int,
    lengths: Lengths,
    kv_positions: int | None = None,
    needs_reference: bool = False,
    second_buffer: bool = False,
    shards: int | None = None,
    path: ModelPath | None = None,
    device: str = "cpu",
) -> dict[str, int]:
    """Bytes by what they are for. `kv_positions`: budget of the cache (generation/owner.py); None: all sequences at full
    length. `shards`: ranks over which the model is cut; None where it is not. `path`: how the model is run; None: the first of
    the paths that takes it.

    masters, gradients, optimizer: flat, in float32 or wider, of what is trained. working_copy and reference: in the matmul
    dtype. packed_weights: copies of them in the layout of the CPU's products. frozen: with adapters, the merged weights, and the
    layers' own below them. activations: of one microbatch of `train.tokens_per_microbatch` packed tokens, what the layers keep
    for backward. logits: those that wait for it, or the chunk that is alive. working: what the head's forward products take, or
    one layer's backward with the largest gradient that is made before it is added to the flat buffer. compiled: what oneDNN keeps
    of products on a CPU, once batches have had many numbers of rows. kv_cache: the budget, and the states of recurrent layers.
    gathered: of a cut model, embedding, head and two layers in the matmul dtype, with the gradients of one part before and
    after their reduction. Errors: ConfigError where the model has no configuration.
    """
    described = describe_module(model)
    config = described.config
    footprint = training = find_footprint(model, described, path)
    if shards is not None and footprint.path == FUSED:  # a cut model trains through its own modules
        training = find_footprint(model, described, PACKED)
    narrow, tokens = DTYPES[model.dtype].itemsize, train.tokens_per_microbatch
    hidden_bytes = int(config.get_text_config().hidden_size) * narrow
    vocabulary = int(config.get_text_config().vocab_size)
    waiting = tokens if tokens * vocabulary <= KEEP_LOGITS else min(CHUNK_ROWS, tokens)
    in_the_making = min(_HEAD_ROWS.get(model.dtype, 64) if device == "cpu" else CHUNK_ROWS, tokens)
    temporary = 0 if model.lora.rank else _largest_temporary(described, training.path, narrow)
    kept, through = activation_bytes(training, tokens, lengths, hidden_bytes, temporary, train.gradient_checkpointing)
    weights = _weight_bytes(model, described, footprint.path, shards, device)
    trained = weights["masters"] * (shards or 1)  # bytes
    return weights | {
        "second_gradients": trained if second_buffer else 0,
        "reference": parameter_count(model) * narrow if needs_reference else 0,
        "activations": kept,
        "logits": waiting * vocabulary * narrow,
        "working": max(2 * in_the_making * vocabulary * narrow, through),
        "compiled": _compiled(model.dtype, footprint.path, device, max(in_the_making, max_sequences)),
        "kv_cache": cache_bytes(footprint, max_sequences, kv_positions or max_sequences * lengths.context),
    }


def _weight_bytes(
    model: ModelConfig, described: PreTrainedModel, path: ModelPath, shards: int | None, device: str
) -> dict[str, int]:
    """Of the weights, their gradients, and copies."""
    config = described.config
    text = config.get_text_config()
    parameters = parameter_count(model)
    adapters, merged = adapter_sizes(model)
    trained = adapters or parameters
    narrow = DTYPES[model.dtype].itemsize
    wide = max(narrow, 4)
    embedding = int(text.vocab_size) * int(text.hidden_size)
    part = -(-trained // (shards or 1))
    layer = (parameters - embedding) // max(int(text.num_hidden_layers), 1)
    ends = embedding * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    packs = device == "cpu" and packing_works(DTYPES[model.dtype], torch.device("cpu"))
    own = parameters - ends - sum(experts_sizes(described))
    in_products = embedding + (own if path == FUSED else 0)
    return {
        "masters": part * wide,
        "gradients": part * wide,
        "optimizer": 2 * part * wide,
        "gathered": (ends + 2 * layer) * narrow + max(ends, layer) * (narrow + 2 * wide) if shards else 0,
        "working_copy": trained * narrow if narrow < wide or shards else 0,
        "packed_weights": in_products * narrow if packs else 0,
        "frozen": (parameters + merged) * narrow if adapters else 0,
    }


def _compiled(dtype: str, path: ModelPath, device: str, head_rows: int) -> int:
    """`head_rows`: most that the head, whose weight is packed on every path, computes at once. In float32 oneDNN makes the
    products of packed weights alone."""
    if device != "cpu" or not packing_works(DTYPES[dtype], torch.device("cpu")):
        return 0
    packed = _CACHED if path == FUSED else min(_CACHED, head_rows)
    return (packed + (_CACHED if dtype == "bfloat16" else 0)) * _COMPILED


def find_footprint(model: ModelConfig, described: PreTrainedModel, path: ModelPath | None) -> Footprint:
    """Measured, or where that is not possible estimated. `described`: the model, on the meta device."""
    measured = measure_footprint(described, model.dtype, path, model.lora)
    return measured or estimate_footprint(described.config, model.dtype, path)


def activation_bytes(
    footprint: Footprint,
    tokens: int,
    lengths: Lengths,
    hidden_bytes: int,
    temporary: int = 0,
    checkpointing: bool = False,
) -> tuple[int, int]:
    """Of a microbatch of `tokens` packed tokens whose rows are as long as they get: (what is kept for backward, what one layer
    takes while it is gone through). `hidden_bytes`: of one hidden state; `temporary`: of the largest gradient of a weight."""
    given = hidden_bytes, temporary, checkpointing
    longest = _at_length(footprint, tokens, lengths, *given)
    if footprint.path.name == "plain" or _by_products(footprint, lengths):
        return longest
    short = lengths.completion  # shorter rows keep the weights of their attention, and may need more
    while short > 1 and not _by_products(footprint, replace(lengths, completion=short)):
        short -= max(short // 16, 1)
    return max(longest, _at_length(footprint, tokens, replace(lengths, completion=short), *given), key=sum)


def _at_length(
    footprint: Footprint, tokens: int, lengths: Lengths, hidden_bytes: int, temporary: int, checkpointing: bool
) -> tuple[int, int]:
    rows, prefixes = _rows_of(tokens, lengths)
    scores = prefixes * lengths.prompt**2 + rows * lengths.completion * lengths.context
    layers, rest = footprint.layers, footprint.rest
    held = float(tokens)
    if footprint.path.name == "plain":  # rows of their own, each with its prompt
        held, scores = rows * lengths.context, rows * float(lengths.context) ** 2
    elif not _by_products(footprint, lengths):
        layers = tuple(Kept(kept.token + 4.0 * footprint.heads, 0.0) for kept in layers)  # the log-sum-exp instead
    elif layers and layers[0].score:
        rest = Kept(rest.token, rest.score + 4.0)  # the mask of these products
    each = [kept.of(held, scores) for kept in layers]
    # Our attention's own backward goes by bins of rows: only others take something of each pair.
    pairs, bins = (scores, 0) if footprint.path.name == "plain" else (0.0, _BINS)
    beside = zip(footprint.beside, footprint.making, footprint.attending, strict=True)
    through = [
        max(taken.of(held, pairs), making.of(held, pairs) + temporary, attending.of(held, pairs) + bins)
        for taken, making, attending in beside
    ]
    if checkpointing:
        through = [sum(both) for both in zip(each, through, strict=True)]
    kept_bytes = (len(each) * held * hidden_bytes if checkpointing else sum(each)) + rest.of(held, scores)
    beside_head = 2 * tokens * hidden_bytes  # the scored tokens' hidden states, and their gradient
    return round(kept_bytes + beside_head), round(max(through, default=0.0))


def _rows_of(tokens: int, lengths: Lengths) -> tuple[float, float]:
    """(completions, prompts) of a microbatch of `tokens` packed tokens at full length."""
    fit = (tokens - lengths.prompt) // lengths.completion
    members = max(1, min(lengths.members, fit))
    prefixes = max(tokens / (lengths.prompt + members * lengths.completion), 1.0)
    return prefixes * members, prefixes


def _by_products(footprint: Footprint, lengths: Lengths) -> bool:
    """Whether rows of these lengths keep the weights of their attention (models/attention/rows.py)."""
    rows = [(0, lengths.prompt, 0, lengths.completion), (0, 0, 0, max(lengths.prompt, 1))]
    return fits(rows, footprint.heads)


def _largest_temporary(described: PreTrainedModel, path: ModelPath, narrow: int) -> int:
    """Of the fused path none in float32, but for experts: products add to the flat gradient. Else the largest weight's; that of the
    embedding, where the model looks up by itself."""
    ends = {id(each.weight) for each in (described.get_input_embeddings(), described.get_output_embeddings()) if each}
    sizes = [p.numel() for p in described.parameters() if id(p) not in ends or path.name == "plain"]
    if path == FUSED:
        own = max(experts_sizes(described), default=0) if narrow >= 4 else 2 * max(sizes, default=0)
        return own * narrow
    return max(sizes, default=0) * narrow


def route_bytes(model: ModelConfig) -> int:
    """Of a token, where it is recorded which experts it went to; 0 for a model without any that could be."""
    shape = describe_routes(describe_module(model))
    return 0 if shape is None else shape.token_bytes


def experts_sizes(described: PreTrainedModel) -> list[int]:
    """Numbers of each parameter of the layers' experts, which a fused layer leaves to the model."""
    blocks = getattr(decoder_of(described), "layers", None)
    experts = [experts_of(block) for block in blocks] if isinstance(blocks, nn.ModuleList) else []
    return [parameter.numel() for each in experts if each is not None for parameter in each.parameters()]


def cache_bytes(footprint: Footprint, max_sequences: int, kv_positions: int) -> int:
    """Of the engine's own cache, or of transformers' caches on the plain path."""
    total = 0.0
    for cached in footprint.cached:
        held = kv_positions if cached.window is None else min(kv_positions, max_sequences * cached.window)
        total += cached.position * held + cached.sequence * max_sequences
    return round(total)
