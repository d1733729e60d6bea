"""Memory of a run, estimated before anything of it is allocated: one formula for all models.

Weights and their copies follow from the number of parameters. What a microbatch keeps for backward follows from the widths of the
model's matrix products, by factors that were fitted to measured peaks (tools/results/memory.md). Rows are taken to be as long as
they can be: the longest prompt with a completion of `rollout.max_tokens`. The estimate is right within a quarter for the models of
that table; nothing is refused because of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.models.attention.rows import ROW_BYTES
from asyncrl.models.head.logprobs import CHUNK_ROWS, KEEP_LOGITS
from asyncrl.models.loading import adapter_sizes, describe_module, parameter_count
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.routing import EXPERTS, describe_routes

# Numbers kept for backward, and taken by one layer's backward, for each number that a matrix product of a layer gives.
_KEPT = {"fused": 1.1, "packed": 2.0, "plain": 2.15}
_TAKEN = {"fused": 1.35, "packed": 0.5, "plain": 0.55}
# Of experts: kept for each number of their inner width, and hidden states that a backward takes for each choice of a token.
_KEPT_INNER, _TAKEN_CHOICE = 1.9, 3
# Of a selective scan: tensors [tokens, channels, state] kept, and taken by a backward.
_KEPT_SCAN, _TAKEN_SCAN = 3, 4
# Of a bin of rows in the backward of our attention: scores, their gradient, gathered rows.
_BINS = 8 << 20
# Rows of the head's forward products on a CPU in float32 and in another dtype (models/head/logprobs.py).
_HEAD_ROWS, _HEAD_ROWS_NARROW = 256, 64
# oneDNN compiles a product anew for each number of rows: bytes of one, and how many are kept of packed weights and of others.
_COMPILED, _CACHED = 576 << 10, 768
_STATES = ("state_size", "ssm_state_size", "mamba_d_state", "linear_key_head_dim")
_CHOICES = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")


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


@dataclass(slots=True)
class _Widths:
    """Numbers a token, summed over all layers: what products give (`dense`), what the experts that it goes to hold (`experts`),
    `scan` of a selective scan. `choices`: experts of a token in all layers. `experts_numel`: the experts' parameters. `state`:
    numbers that a cache holds of a sequence in recurrent layers. `sinks`: attention has them."""

    dense: int = 0
    experts: float = 0.0
    choices: float = 0.0
    scan: int = 0
    experts_numel: int = 0
    state: int = 0
    sinks: bool = False


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
    length. `shards`: ranks over which the model is cut; None where it is not. `path`: how the model is run; None: guessed.

    masters, gradients, optimizer: flat, in float32 or wider, of what is trained. working_copy and reference: in the matmul
    dtype. packed_weights: copies of them in the layout of the CPU's products. frozen: with adapters, the merged weights, and the
    layers' own below them. activations: of one microbatch of `train.tokens_per_microbatch` packed tokens, what the layers keep
    for backward. logits: those that wait for it, or the chunk that is alive. working: what the head's forward products take, or
    one layer's backward with the largest gradient of a weight. compiled: what oneDNN keeps of products on a CPU, once batches
    have had many numbers of rows. kv_cache: the budget, and the states of recurrent layers. gathered: of a cut model, embedding,
    head and two layers in the matmul dtype, with the gradients of one part before and after their reduction.
    Errors: ConfigError where the model has no configuration.
    """
    described = describe_module(model)
    text = described.config.get_text_config()
    widths = _measure_widths(described)
    path = path or _guess_path(text, widths)
    # A cut model trains through its own modules.
    training = PACKED if shards is not None and path == FUSED else path
    narrow, tokens = DTYPES[model.dtype].itemsize, train.tokens_per_microbatch
    vocabulary = int(text.vocab_size)
    waiting = tokens if tokens * vocabulary <= KEEP_LOGITS else min(CHUNK_ROWS, tokens)
    head_rows = _HEAD_ROWS if model.dtype == "float32" else _HEAD_ROWS_NARROW
    in_the_making = min(head_rows if device == "cpu" else CHUNK_ROWS, tokens)
    kept, taken = _activation_bytes(text, widths, training, train, lengths, narrow)
    taken += 0 if model.lora.rank else _largest_weight(described, training) * narrow
    weights = _weight_bytes(model, described, widths, path, shards, device)
    return weights | {
        "second_gradients": weights["masters"] * (shards or 1) if second_buffer else 0,
        "reference": parameter_count(model) * narrow if needs_reference else 0,
        "activations": kept,
        "logits": waiting * vocabulary * narrow,
        "working": max(2 * in_the_making * vocabulary * narrow, taken),
        "compiled": _compiled(model.dtype, path, device, max(in_the_making, max_sequences)),
        "kv_cache": _cache_bytes(
            text, widths, path, narrow, max_sequences, kv_positions or max_sequences * lengths.context
        ),
    }


def _measure_widths(described: PreTrainedModel) -> _Widths:
    text, head, found = described.config.get_text_config(), described.get_output_embeddings(), _Widths()
    hidden = int(text.hidden_size)
    number = max((n for name in EXPERTS if isinstance(n := getattr(text, name, None), int)), default=1)
    choices = min(max((n for name in _CHOICES if isinstance(n := getattr(text, name, None), int)), default=1), number)
    state = max((n for name in _STATES if isinstance(n := getattr(text, name, None), int)), default=0)
    for name, module in described.named_modules():
        if "experts" in name and "shared" not in name:
            for weight in (p for p in module.parameters(recurse=False) if p.ndim == 3 or isinstance(module, nn.Linear)):
                # One weight of all experts, or each expert with its own.
                share = choices * (1.0 if weight.ndim == 3 else 1 / number)
                found.experts += share * (hidden + _KEPT_INNER * (sum(weight.shape[-2:]) - hidden))
                found.choices += share / 2
            found.experts_numel += sum(p.numel() for p in module.parameters(recurse=False))
        elif module is not head:
            found.dense += int(getattr(module, "out_features", 0) or getattr(module, "nf", 0))
        if isinstance(module, nn.Conv1d):
            found.state += module.out_channels * (module.kernel_size[0] + state)
        found.sinks |= hasattr(module, "sinks")
        matrix = getattr(module, "A_log", None)
        found.scan += matrix.numel() if matrix is not None and matrix.ndim == 2 else 0
    return found


def _guess_path(text: PretrainedConfig, widths: _Widths) -> ModelPath:
    """The gate decides when the model is loaded (runtime/gate.py)."""
    if widths.state or _latent(text):
        return PLAIN[0]
    act = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    return FUSED if act in ("silu", "gelu_pytorch_tanh") and hasattr(text, "num_key_value_heads") else PACKED


def _latent(text: PretrainedConfig) -> int:
    """Numbers that latent attention caches of a token; 0 of other attention."""
    rank = getattr(text, "kv_lora_rank", None)
    return int(rank) + int(text.qk_rope_head_dim) if rank else 0


def _attending(text: PretrainedConfig) -> list[bool]:
    """Of each layer that attends to earlier tokens, whether by a sliding window."""
    layers = int(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        has_heads = getattr(text, "num_attention_heads", None) is not None
        return [getattr(text, "sliding_window", None) is not None] * layers if has_heads else []
    return ["sliding" in kind for kind in kinds if "attention" in kind and "linear" not in kind]


def _activation_bytes(
    text: PretrainedConfig, widths: _Widths, path: ModelPath, train: TrainConfig, lengths: Lengths, narrow: int
) -> tuple[int, int]:
    """(what a microbatch keeps for backward, what the backward of one layer takes beside it)."""
    tokens, layers, hidden = train.tokens_per_microbatch, int(text.num_hidden_layers), int(text.hidden_size) * narrow
    heads, wide = int(getattr(text, "num_attention_heads", None) or 1), max(narrow, 4)
    span, held, score = float(lengths.context), float(tokens), heads * narrow
    if path.name == "plain":
        # Rows of their own, each with its prompt. Eager attention keeps its weights, and their softmax in float32; so does torch's
        # where keys are wider than values.
        members = max(1, min(lengths.members, (tokens - lengths.prompt) // lengths.completion))
        groups = max(tokens / (lengths.prompt + members * lengths.completion), 1.0)
        held = groups * members * lengths.context
        by_kernel = path.attention == "sdpa" and _latent(text) == 0
        score = 0 if by_kernel else heads * (narrow if narrow >= wide else narrow + wide)
    else:
        # Longer rows keep no weights of their attention (models/attention/rows.py), nor does one with capped scores or sinks.
        span = min(span, math.sqrt(ROW_BYTES / (4 * heads)))
        score = 0 if widths.sinks or getattr(text, "attn_logit_softcapping", None) else score
    token = narrow * (_KEPT[path.name] * widths.dense + widths.experts) + _KEPT_SCAN * wide * widths.scan
    kept = held * (token + score * span * len(_attending(text)))
    # A layer's backward goes through its products and through its experts one after the other.
    products = held * (narrow * _TAKEN[path.name] * widths.dense + _TAKEN_SCAN * wide * widths.scan) / layers
    products += 0 if path.name == "plain" else _BINS
    taken = max(products, held * _TAKEN_CHOICE * hidden * widths.choices / layers)
    if train.gradient_checkpointing:
        taken += kept / layers
        kept = layers * held * hidden
    # The embedded tokens and the last hidden states, those of scored tokens, and their gradient.
    return round(kept + 4 * tokens * hidden), round(taken)


def _largest_weight(described: PreTrainedModel, path: ModelPath) -> int:
    """Numbers of the largest gradient that is made before it is added to the flat one; that of the embedding on the plain path."""
    ends = {id(each.weight) for each in (described.get_input_embeddings(), described.get_output_embeddings()) if each}
    return max((p.numel() for p in described.parameters() if path.name == "plain" or id(p) not in ends), default=0)


def _weight_bytes(
    model: ModelConfig, described: PreTrainedModel, widths: _Widths, path: ModelPath, shards: int | None, device: str
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
    own = parameters - ends - widths.experts_numel
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


def _cache_bytes(
    text: PretrainedConfig, widths: _Widths, path: ModelPath, narrow: int, max_sequences: int, positions: int
) -> int:
    """Of the engine's own cache, or on the plain path of transformers', where a window holds no more than itself."""
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_size = int(getattr(text, "head_dim", None) or int(text.hidden_size) // heads)
    position = (_latent(text) or 2 * kv_heads * head_size) * narrow
    if path.name != "plain":
        return int(text.num_hidden_layers) * position * positions
    window = min(positions, max_sequences * int(getattr(text, "sliding_window", None) or positions))
    held = sum(window if sliding else positions for sliding in _attending(text))
    return position * held + max_sequences * widths.state * max(narrow, 4)


def route_bytes(model: ModelConfig) -> int:
    """Of a token, where it is recorded which experts it went to; 0 for a model without any that could be."""
    shape = describe_routes(describe_module(model))
    return 0 if shape is None else shape.token_bytes
