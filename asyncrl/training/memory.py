"""Estimates the memory of a run before the run allocates any, by one formula for all models.

Bytes of weights follow from the number of parameters. Bytes that a microbatch saves for backward follow from the output widths of
the model's matrix products. The factors were fitted to measured peaks (tools/results/memory.md), and the estimate is within 25 % of
each of those peaks. Every row is assumed to be the longest one: the longest prompt and `rollout.max_tokens` more tokens. No run is
refused because of the estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.models.attention.rows import row_bytes
from asyncrl.models.head.logprobs import CHUNK_ROWS, KEEP_LOGITS
from asyncrl.models.loading import adapter_sizes, describe_module, parameter_count
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.routing import EXPERTS, describe_routes

# Fitted factors. A "saved" value lives until backward; a "temporary" value lives during the backward of one layer.
# By path: elements per output element of the layer's matrix products.
_SAVED = {"fused": 1.1, "packed": 2.0, "plain": 2.15}
_TEMPORARY = {"fused": 1.35, "packed": 0.5, "plain": 0.55}
# Experts: saved elements per element of the inner width, and temporary hidden states per expert of a token.
_SAVED_EXPERT, _TEMPORARY_EXPERT = 1.9, 3
# Selective scan: saved and temporary tensors of shape [tokens, channels, state].
_SAVED_SCAN, _TEMPORARY_SCAN = 3, 4
# Bytes that the backward of our attention uses for one bin: scores, their gradient, gathered rows.
_ATTENTION_BIN = 8 << 20
# Rows of the head's forward products on a CPU in float32 and in other dtypes (models/head/logprobs.py).
_HEAD_ROWS_FLOAT32, _HEAD_ROWS = 256, 64
# oneDNN compiles a kernel for every new number of rows: bytes of a kernel, and kernels in each of its two caches.
_KERNEL_BYTES, _KERNEL_CACHE = 576 << 10, 768
# Names in configurations: size of a recurrent state; experts per token.
_STATE_SIZES = ("state_size", "ssm_state_size", "mamba_d_state", "linear_key_head_dim")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest prompt and of the longest completion, and the number of completions of a prompt. `ranks`: number of
    ranks that share each microbatch."""

    prompt: int
    completion: int
    members: int = 1
    ranks: int = 1

    @property
    def context(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion


@dataclass(slots=True)
class _Widths:
    """Sizes of a model in elements, summed over all layers."""

    dense: int = 0  # per token: outputs of matrix products
    experts: float = 0.0  # per token: elements that its experts save
    choices: float = 0.0  # per token: number of experts
    scan: int = 0  # per token: elements of selective scans
    experts_numel: int = 0  # parameters of all experts
    state: int = 0  # per sequence: cache of recurrent layers
    sinks: bool = False  # whether attention has sinks


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
    keep: bool = False,
    path: ModelPath | None = None,
    device: str = "cpu",
) -> dict[str, int]:
    """Purpose -> bytes on one rank. Errors: ConfigError if the model's configuration cannot be read.

    kv_positions: tokens that the cache holds; None: all sequences at full length. shards: number of ranks that share the masters;
    None: no sharding. keep: see `ShardedParameters`. path: how the model is run; None: guessed. The purposes are:
    masters, gradients, optimizer: of the trained parameters, in float32 or wider.
    working_copy, reference: in the matmul dtype. packed_weights: copies in oneDNN's layout, for CPU products.
    frozen: with adapters, the frozen weights and the merged weights. second_gradients: see training/second_buffer.py.
    activations: saved for backward by the layers, for a microbatch of `train.tokens_per_microbatch` tokens.
    logits: kept for backward, or one chunk of them. working: the larger of the head's forward product and one layer's backward.
    compiled: kernels that oneDNN caches on a CPU after batches of many sizes. kv_cache: the cache, and recurrent states.
    gathered: if sharded, embedding, head and two layers in the matmul dtype, and one gradient before and after its reduction. With
    `keep` also all weights, and all gradients in the master dtype.
    """
    described = describe_module(model)
    text = described.config.get_text_config()
    widths = _measure_widths(described)
    path = path or _guess_path(text, widths)
    # A sharded model trains through its own modules.
    training_path = PACKED if shards is not None and path == FUSED else path
    itemsize, tokens = DTYPES[model.dtype].itemsize, -(-train.tokens_per_microbatch // lengths.ranks)
    vocabulary = int(text.vocab_size)
    kept_rows = tokens if tokens * vocabulary <= KEEP_LOGITS else min(CHUNK_ROWS, tokens)
    head_rows = _HEAD_ROWS_FLOAT32 if model.dtype == "float32" else _HEAD_ROWS
    product_rows = min(head_rows if device == "cpu" else CHUNK_ROWS, tokens)
    saved, temporary = _activation_bytes(text, widths, training_path, train, lengths, itemsize)
    if not model.lora.rank:  # with adapters the model's weights have no gradient
        temporary += _largest_weight(described, training_path) * itemsize
    weights = _weight_bytes(model, described, widths, path, shards, device)
    if keep:
        weights["gathered"] += parameter_count(model) * (itemsize + max(itemsize, 4))
    positions = kv_positions or max_sequences * lengths.context
    return weights | {
        "second_gradients": weights["masters"] * (shards or 1) if second_buffer else 0,
        "reference": parameter_count(model) * itemsize if needs_reference else 0,
        "activations": saved,
        "logits": kept_rows * vocabulary * itemsize,
        "working": max(2 * product_rows * vocabulary * itemsize, temporary),
        "compiled": _kernel_bytes(model.dtype, path, device, max(product_rows, max_sequences)),
        "kv_cache": _cache_bytes(text, widths, path, itemsize, max_sequences, positions),
    }


def _largest_setting(text: PretrainedConfig, names: tuple[str, ...], default: int) -> int:
    values = [getattr(text, name, None) for name in names]
    return max((value for value in values if isinstance(value, int)), default=default)


def _measure_widths(described: PreTrainedModel) -> _Widths:
    text, head, widths = described.config.get_text_config(), described.get_output_embeddings(), _Widths()
    hidden = int(text.hidden_size)
    experts = _largest_setting(text, EXPERTS, 1)
    per_token = min(_largest_setting(text, _EXPERTS_PER_TOKEN, 1), experts)
    state = _largest_setting(text, _STATE_SIZES, 0)
    for name, module in described.named_modules():
        if "experts" in name and "shared" not in name:
            for weight in (p for p in module.parameters(recurse=False) if p.ndim == 3 or isinstance(module, nn.Linear)):
                # A weight with three dimensions holds all experts. Otherwise each expert has its own weight.
                uses = per_token * (1.0 if weight.ndim == 3 else 1 / experts)
                inner_width = sum(weight.shape[-2:]) - hidden
                widths.experts += uses * (hidden + _SAVED_EXPERT * inner_width)
                widths.choices += uses / 2  # an expert has two weights
            widths.experts_numel += sum(p.numel() for p in module.parameters(recurse=False))
        elif module is not head:
            # transformers' Conv1D calls its output width `nf`.
            widths.dense += int(getattr(module, "out_features", 0) or getattr(module, "nf", 0))
        if isinstance(module, nn.Conv1d):
            widths.state += module.out_channels * (module.kernel_size[0] + state)
        widths.sinks |= hasattr(module, "sinks")
        matrix = getattr(module, "A_log", None)  # of a selective scan (Mamba)
        widths.scan += matrix.numel() if matrix is not None and matrix.ndim == 2 else 0
    return widths


def _guess_path(text: PretrainedConfig, widths: _Widths) -> ModelPath:
    """A guess from the configuration: FUSED has kernels for two activations. The real path is known after the model is loaded
    (runtime/gate.py)."""
    if widths.state or _latent_width(text):
        return PLAIN[0]
    activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    return FUSED if activation in ("silu", "gelu_pytorch_tanh") and hasattr(text, "num_key_value_heads") else PACKED


def _latent_width(text: PretrainedConfig) -> int:
    """Elements that latent attention caches per token and layer. 0 for other attention."""
    rank = getattr(text, "kv_lora_rank", None)
    return int(rank) + int(text.qk_rope_head_dim) if rank else 0


def _sliding_layers(text: PretrainedConfig) -> list[bool]:
    """For each layer with attention: whether it has a sliding window."""
    layers = int(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        has_heads = getattr(text, "num_attention_heads", None) is not None
        return [getattr(text, "sliding_window", None) is not None] * layers if has_heads else []
    return ["sliding" in kind for kind in kinds if "attention" in kind and "linear" not in kind]


def _activation_bytes(
    text: PretrainedConfig, widths: _Widths, path: ModelPath, train: TrainConfig, lengths: Lengths, itemsize: int
) -> tuple[int, int]:
    """(bytes that a microbatch saves for backward, temporary bytes of the backward of one layer)."""
    tokens = -(-train.tokens_per_microbatch // lengths.ranks)
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size) * itemsize
    heads, wide = int(getattr(text, "num_attention_heads", None) or 1), max(itemsize, 4)
    # Keys per query, tokens of all rows, and bytes saved for one score of each head.
    keys, row_tokens, score = float(lengths.context), float(tokens), heads * itemsize
    if path.name == "plain":
        # Every row repeats its prompt. Eager attention saves the attention weights, and their softmax in float32. Torch's attention
        # does the same if keys are wider than values.
        members = max(1, min(lengths.members, (tokens - lengths.prompt) // lengths.completion))
        groups = max(tokens / (lengths.prompt + members * lengths.completion), 1.0)
        row_tokens = groups * members * lengths.context
        saves_no_weights = path.attention == "sdpa" and _latent_width(text) == 0
        # A softmax in float32 is another tensor only if the weights have a smaller dtype.
        softmax = wide if itemsize < wide else 0
        score = 0 if saves_no_weights else heads * (itemsize + softmax)
    else:
        # No attention weights are saved for rows whose float32 scores [heads, keys, keys] are larger than `row_bytes`
        # (models/attention/rows.py), and none with capped scores or sinks.
        keys = min(keys, math.sqrt(row_bytes(itemsize) * lengths.ranks / (4 * heads)))
        score = 0 if widths.sinks or getattr(text, "attn_logit_softcapping", None) else score
    per_token = itemsize * (_SAVED[path.name] * widths.dense + widths.experts) + _SAVED_SCAN * wide * widths.scan
    saved = row_tokens * (per_token + score * keys * len(_sliding_layers(text)))
    # The backward of a layer runs its experts and its other products one after the other.
    per_token = itemsize * _TEMPORARY[path.name] * widths.dense + _TEMPORARY_SCAN * wide * widths.scan
    products = row_tokens * per_token / layers + (0 if path.name == "plain" else _ATTENTION_BIN)
    temporary = max(products, row_tokens * _TEMPORARY_EXPERT * hidden * widths.choices / layers)
    if lengths.ranks > 1:
        # Sent and received: queries, keys, values, output and its gradient.
        kv_heads = math.lcm(int(getattr(text, "num_key_value_heads", None) or heads), lengths.ranks)
        head_size = int(getattr(text, "head_dim", None) or int(text.hidden_size) // heads)
        temporary += 2 * tokens * (3 * heads + 2 * kv_heads) * head_size * itemsize
    if train.gradient_checkpointing:
        temporary += saved / layers
        saved = layers * row_tokens * hidden
    # Four hidden states per token: embedded, last, scored, and a gradient.
    return round(saved + 4 * tokens * hidden), round(temporary)


def _largest_weight(described: PreTrainedModel, path: ModelPath) -> int:
    """Elements of the largest weight whose gradient is a temporary tensor. Only the plain path has one for embedding and head."""
    embeddings = (described.get_input_embeddings(), described.get_output_embeddings())
    excluded = set() if path.name == "plain" else {id(module.weight) for module in embeddings if module}
    return max((p.numel() for p in described.parameters() if id(p) not in excluded), default=0)


def _weight_bytes(
    model: ModelConfig, described: PreTrainedModel, widths: _Widths, path: ModelPath, shards: int | None, device: str
) -> dict[str, int]:
    config = described.config
    text = config.get_text_config()
    parameters = parameter_count(model)
    adapters, merged = adapter_sizes(model)
    trained = adapters or parameters
    itemsize = DTYPES[model.dtype].itemsize
    wide = max(itemsize, 4)
    embedding = int(text.vocab_size) * int(text.hidden_size)
    shard = -(-trained // (shards or 1))
    layer = (parameters - embedding) // max(int(text.num_hidden_layers), 1)
    is_tied = getattr(config, "tie_word_embeddings", False)
    embedding_and_head = embedding if is_tied else 2 * embedding
    packs = device == "cpu" and packing_works(DTYPES[model.dtype], torch.device("cpu"))
    fused = parameters - embedding_and_head - widths.experts_numel if path == FUSED else 0
    gathered = (embedding_and_head + 2 * layer) * itemsize + max(embedding_and_head, layer) * (itemsize + 2 * wide)
    return {
        "masters": shard * wide,
        "gradients": shard * wide,
        "optimizer": 2 * shard * wide,
        "gathered": gathered if shards else 0,
        "working_copy": trained * itemsize if itemsize < wide or shards else 0,
        "packed_weights": (embedding + fused) * itemsize if packs else 0,
        "frozen": (parameters + merged) * itemsize if adapters else 0,
    }


def _kernel_bytes(dtype: str, path: ModelPath, device: str, head_rows: int) -> int:
    """Bytes of oneDNN's caches of kernels. `head_rows`: the most rows of one product of the head."""
    if device != "cpu" or not packing_works(DTYPES[dtype], torch.device("cpu")):
        return 0
    # The head has packed weights on every path, and all layers have them on the fused path.
    packed = _KERNEL_CACHE if path == FUSED else min(_KERNEL_CACHE, head_rows)
    # In float32 oneDNN computes only products with packed weights.
    return (packed + (_KERNEL_CACHE if dtype == "bfloat16" else 0)) * _KERNEL_BYTES


def _cache_bytes(
    text: PretrainedConfig, widths: _Widths, path: ModelPath, itemsize: int, max_sequences: int, positions: int
) -> int:
    """Bytes of keys and values, and of recurrent states. Only the plain path limits sliding layers to their window."""
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or int(text.hidden_size) // heads)
    position_bytes = (_latent_width(text) or 2 * kv_heads * head_size) * itemsize
    if path.name != "plain":
        return int(text.num_hidden_layers) * position_bytes * positions
    window = min(positions, max_sequences * int(getattr(text, "sliding_window", None) or positions))
    cached = sum(window if sliding else positions for sliding in _sliding_layers(text))
    return position_bytes * cached + max_sequences * widths.state * max(itemsize, 4)


def route_bytes(model: ModelConfig) -> int:
    """Bytes of the recorded experts of one token. 0 for a model without routers that can be recorded."""
    shape = describe_routes(describe_module(model))
    return 0 if shape is None else shape.token_bytes
