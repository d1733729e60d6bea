"""Memory of a run, predicted from the model's configuration before anything is allocated."""

from __future__ import annotations

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.models.loading import adapter_sizes, load_model_config, parameter_count
from asyncrl.models.logprobs import CHUNK_ROWS, KEEP_LOGITS

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def predict_memory(
    model: ModelConfig,
    train: TrainConfig,
    *,
    max_sequences: int,
    max_context: int,
    needs_reference: bool = False,
    second_buffer: bool = False,
    shards: int | None = None,
) -> dict[str, int]:
    """Bytes by what they are for. `max_context`: tokens of the longest prompt with its completion. `shards`: ranks over which
    the model is cut; None where it is not.

    masters, gradients, optimizer: flat, in float32 or wider, of what is trained. working_copy and reference: in the matmul
    dtype. frozen: with adapters, the merged weights, and the layers' own below them. activations: of one microbatch of
    `train.tokens_per_microbatch` packed tokens, what the layers keep for backward. logits: those that wait for it, or the
    chunk that is alive. embedding_gradient: the one temporary of an embedding's size. kv_cache: all
    sequences at full length. gathered: of a cut model, embedding, head and two layers in the matmul dtype, with the gradients of
    one part before and after their reduction. Errors: ConfigError where the model has no configuration.
    """
    config = load_model_config(model)
    parameters = parameter_count(model)
    adapters, merged = adapter_sizes(model)
    trained = adapters or parameters
    narrow = _BYTES[model.dtype]
    wide = max(narrow, 4)
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_size = int(getattr(config, "head_dim", None) or hidden // heads)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    vocabulary = int(config.vocab_size)
    attention = (2 * heads + 2 * kv_heads) * head_size
    fused = getattr(config, "hidden_act", None) == "silu" and hasattr(config, "num_key_value_heads")
    if fused and shards is None:
        # models.fused keeps per token and layer: two residuals, q/k/v, the attention's output, gate and up
        per_layer = narrow * (2 * hidden + attention + 2 * inner) + wide * heads
    else:
        # autograd keeps: both residuals and normed inputs, four of the MLP's inner size, attention's twice (one wide)
        per_layer = narrow * (4 * hidden + 4 * inner + attention) + wide * attention
    tokens = train.tokens_per_microbatch
    kept = layers * narrow * hidden + per_layer if train.gradient_checkpointing else layers * per_layer
    waiting = tokens if tokens * vocabulary <= KEEP_LOGITS else min(CHUNK_ROWS, tokens)
    part = -(-trained // (shards or 1))
    layer = (parameters - vocabulary * hidden) // max(layers, 1)
    ends = vocabulary * hidden * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    return {
        "masters": part * wide,
        "gradients": part * wide,
        "second_gradients": trained * wide if second_buffer else 0,
        "optimizer": 2 * part * wide,
        "gathered": (ends + 2 * layer) * narrow + max(ends, layer) * (narrow + 2 * wide) if shards else 0,
        "working_copy": trained * narrow if narrow < wide or shards else 0,
        "frozen": (parameters + merged) * narrow if adapters else 0,
        "reference": parameters * narrow if needs_reference else 0,
        "activations": tokens * kept,
        "logits": waiting * vocabulary * narrow,
        "embedding_gradient": 0 if adapters else vocabulary * hidden * narrow,
        "kv_cache": max_sequences * max_context * layers * 2 * kv_heads * head_size * narrow,
    }
