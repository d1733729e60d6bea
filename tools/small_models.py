"""Every causal model type of the installed transformers, small: a few layers of each kind, random weights that matter.

`small_config` takes the type's default configuration and makes the numbers small that SIZES and OVERRIDES name; lists with
one entry a layer keep one layer of each kind, in the order in which they first appear. `small_model` builds it with weights
that hide nothing: products of unit size, norms off 1, biases off 0. `VARIANTS` are configurations of a type that are worth
a row of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROW = "ASYNCRL_SMALL_MODEL"  # environment: which row `build` builds
VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD = 128, 64, 4, 2, 16
WINDOW, CONTEXT, POSITIONS = 8, 16, 128
_MOST_LAYERS = 8

# A size, and the settings of any configuration that get it.
_SIZES = f"""
{VOCABULARY} vocab_size vocab_size_per_layer_input audio_vocab_size pronunciation_vocab_size shape_vocab_size
{HIDDEN} hidden_size d_model n_embd dim_model_base word_embed_proj_dim embedding_dim emb_dim attention_hidden_size
{HIDDEN} linear_width lru_width input_embedding_size output_embedding_size embedding_size cross_attention_hidden_size
{HIDDEN} hidden_size_global adapter_input_size adapter_in_dim adapter_out_dim adapter_output_size
96 intermediate_size ffn_dim dim_ff dff d_inner ffn_hidden_size intermediate_size_mlp dense_intermediate_size n_inner
96 encoder_ffn_dim decoder_ffn_dim feed_forward_size
48 moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
48 shared_experts_intermediate_size moe_shared_expert_intermediate_size prefix_dense_intermediate_size
4 num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers
4 linear_num_value_heads num_experts n_routed_experts num_local_experts moe_num_experts
{HEADS} num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads
{HEADS} num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_heads
{KV_HEADS} num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups num_global_key_value_heads
{HEAD} head_dim dim_head attention_head_size d_head swa_head_dim global_head_dim v_head_dim kv_channels
{HEAD} linear_head_dim attention_head_dim
8 qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state state_size ssm_state_size
8 mamba_dt_rank time_step_rank mamba_n_heads mamba_num_heads n_mamba_heads hidden_size_per_layer_input laurel_rank
8 adapter_rank gated_norm_rank chunk_size mamba_chunk_size block_size lsh_attn_chunk_length local_attn_chunk_length
16 qk_head_dim index_head_dim rotary_dim mamba_d_head mamba_head_dim mamba_headdim d_rel
24 q_lora_rank kv_lora_rank o_lora_rank
2 linear_num_key_heads n_groups mamba_n_groups mamba_ngroups index_n_heads moe_num_shared_experts num_experts_per_tok
2 num_experts_per_token moe_topk moe_k top_k_experts zero_expert_num
1 n_group num_expert_group topk_group first_k_dense_replace num_dense_layers
{WINDOW} sliding_window sliding_window_size window_size attention_window_size attention_chunk_size local_attention
6 index_topk keep_window_size
{CONTEXT} original_max_position_embeddings floor_scale log_scaling_n_floor rel_extent
{POSITIONS} max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length
128 encoder_hash_byte_group_vocab
"""
SIZES = {name: int(size) for size, *names in map(str.split, _SIZES.strip().splitlines()) for name in names}
_DROPOUT = re.compile(r"drop(out|_?path)?($|_p$|_prob$|_rate$|out$)|_pdrop$|dropout")

_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
    "roc_bert roformer xlm-roberta xlm-roberta-xl xmod reformer"
)
_DEFAULT_ROTARY = {"rope_theta": 10000.0, "rope_type": "default"}
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"],
}  # fmt: skip
_MIXED = ["linear_attention", "full_attention"] * 2
_DOTS3 = {
    "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 24,
    "swa_head_dim": HEAD, "swa_qk_nope_head_dim": 8, "swa_qk_rope_head_dim": 8, "swa_v_head_dim": HEAD,
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {name: {"is_decoder": True} for name in _DECODERS.split()} | {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _DEFAULT_ROTARY),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.95, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": _MIXED},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0, "num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "ministral": {"head_dim": HEAD, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "nemotron": {"head_dim": HEAD, "num_key_value_heads": KV_HEADS},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6, "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def _rotary(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": CONTEXT}
_LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)], "long_factor": [1.5 + 0.5 * i for i in range(HEAD // 2)],
    "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.1}

# name -> (type, what differs from its small configuration)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama linear": ("llama", _rotary("linear", factor=4.0)),
    "llama dynamic": ("llama", _rotary("dynamic", factor=4.0) | {"max_position_embeddings": CONTEXT}),
    "llama dynamic, short rows": ("llama", _rotary("dynamic", factor=4.0)),
    "llama yarn": ("llama", _rotary("yarn", **_ORIGINAL)),
    "llama longrope": ("llama", _rotary("longrope", **_LONG)),
    "llama longrope, short rows": (
        "llama", _rotary("longrope", **(_LONG | {"original_max_position_embeddings": POSITIONS // 2})),
    ),
    "llama llama3": ("llama", _rotary("llama3", **_ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi3 longrope": ("phi3", _rotary("longrope", **_LONG)),
    "phimoe longrope": ("phimoe", _rotary("longrope", **_LONG, short_mscale=1.1, long_mscale=1.3)),
    "gemma3_text longrope layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope", "rope_theta": 10000.0, **_LONG}, "sliding_attention": _DEFAULT_ROTARY,
            }
        },
    ),
    "deepseek_v3 longrope": (
        "deepseek_v3", _rotary("longrope", **_LONG | {name: _LONG[name][: HEAD // 4] for name in ("short_factor", "long_factor")}),
    ),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2 windowed": ("qwen2", _WINDOWED),
    "qwen3 windowed": ("qwen3", _WINDOWED),
    "gemma2 capped": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "mixtral jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "phimoe jitter": ("phimoe", {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1}),
    "granite multipliers": ("granite", _GRANITE),
    "granitemoe multipliers": ("granitemoe", _GRANITE),
    "cohere query norms": ("cohere", {"use_qk_norm": True}),
    "falcon alibi": ("falcon", {"alibi": True, "parallel_attn": False, "bias": True}),
    "falcon new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}),
    "dots1 windowed": ("dots1", {"sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None}),
    "falcon_h1 multipliers": (
        "falcon_h1",
        {
            "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.5,
            "attention_out_multiplier": 0.8, "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 1.1], "ssm_in_multiplier": 1.2,
        },
    ),
    "mpt without alibi": ("mpt", {"attn_config": {"alibi": False}}),
    "gpt2 by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_bigcode many heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "opt norms after": ("opt", {"do_layer_norm_before": False}),
    "olmo clipped": ("olmo", {"clip_qkv": 0.5}),
    "phi query norms": ("phi", {"qk_layernorm": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "deepseek_v3 yarn": ("deepseek_v3", _rotary("yarn", **_ORIGINAL, mscale=1.0, mscale_all_dim=0.7)),
    "ministral3 scaled queries": (
        "ministral3", _rotary("yarn", **_ORIGINAL, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0),
    ),
    "doge experts": ("doge", {"is_moe": True}),
    "xlm causal": ("xlm", {"causal": True}),
}  # fmt: skip


def row_names() -> list[str]:
    """Every row of the sweep: the types, and after each its variants."""
    return [name for kind in types() for name in (kind, *(n for n, (of, _) in VARIANTS.items() if of == kind))]


class Unbuildable(Exception):
    """transformers itself cannot build this type as a small decoder, or it is none; the message says why."""


def types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(name: str, **changes: Any) -> PretrainedConfig:
    """`name`: a type, or one of `VARIANTS`. Errors: Unbuildable."""
    model_type, varied = VARIANTS.get(name, (name, {}))
    settings = {**OVERRIDES.get(model_type, {}), **varied, **changes}
    kind = CONFIG_MAPPING[model_type]
    try:
        base = kind()
        small = _small(base)
        for name, value in settings.items():
            part = small.get(name)
            small[name] = type(part)(**(_small(part) | value)) if isinstance(part, PretrainedConfig) else value
        config: PretrainedConfig = kind(**small)
    except Exception as error:
        raise Unbuildable(f"its configuration: {_short(error)}") from error
    return config


def _small(base: PretrainedConfig) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(base)}  # the rest of its attributes is computed from these
    aliases = base.attribute_map
    values = {name: vars(base).get(aliases.get(name, name)) for name in fields}
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            small[name] = type(value)(**_small(value))
        elif name in SIZES and (isinstance(value, int) and not isinstance(value, bool)):
            small[name] = SIZES[name]
        elif isinstance(value, float) and _DROPOUT.search(name):
            small[name] = 0.0
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            small[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}[name]
        elif name == "rope_parameters" and value:
            small[name] = _small_rotary(value)
    if small.get("kv_lora_rank"):
        small["num_key_value_heads"] = HEADS  # of latent attention: one a query head
    return small | _layers(values)


def _small_rotary(rope: dict[str, Any]) -> dict[str, Any]:
    rope = copy.deepcopy(rope)
    for part in [rope, *rope.values()]:
        if isinstance(part, dict):
            if part.get("original_max_position_embeddings"):
                part["original_max_position_embeddings"] = CONTEXT
            if part.get("mrope_section"):
                part["mrope_section"] = [1, 1, 0]
    return rope


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to layers of each kind; and how many these are."""
    name = next((n for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if n in values), None)
    if name is None:
        return {}
    total = values[name]
    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == total and total > 1
    }
    if not lists:
        return {}
    kinds: dict[Any, int] = {}
    for number in range(total):
        kinds.setdefault(tuple(str(value[number]) for value in lists.values()), number)
    picks = list(kinds.values())[:_MOST_LAYERS]
    if len(picks) < 3:
        picks = [number for number in range(total) if number in picks or number + 1 in picks or number - 1 in picks][:4]
    return {name: len(picks)} | {key: type(value)(value[number] for number in picks) for key, value in lists.items()}


def small_model(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    """In float32, with eager attention where the class has it; the same weights for the same seed. Errors: Unbuildable."""
    config = small_config(name, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        except Exception as error:
            raise Unbuildable(f"its class: {_short(error)}") from error
    draw_weights(model, seed)
    return model.eval()


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Products of unit size; whatever starts as a constant is moved off it."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator, device="cpu")
        if parameter.ndim < 2 or "A_log" in name or (min(parameter.shape[-2:]) == 1 and "conv" not in name):
            parameter.add_(0.2 * noise.to(parameter.device))
        elif id(parameter) in embeddings:
            parameter.copy_(noise * 0.5)
        else:
            parameter.copy_(noise * float(parameter.shape[-1]) ** -0.5)


def finite(model: PreTrainedModel) -> Tensor:
    """Logits [1, L, V] of its own forward. Errors: Unbuildable where it has none, or they are not finite."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    try:
        with torch.no_grad():
            logits: Tensor = model(
                input_ids=(torch.arange(24) * 7 % min(vocabulary, VOCABULARY))[None], use_cache=False
            ).logits
    except Exception as error:
        raise Unbuildable(f"its own forward: {_short(error)}") from error
    if not torch.isfinite(logits).all():
        raise Unbuildable("its own forward gives logits that are not finite")
    return logits


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def build(seed: int) -> tuple[PreTrainedModel, Any]:
    """For `model.path=tools/small_models.py:build`: the model of the row that the environment names, and a tokenizer."""
    return small_model(os.environ[ROW], seed), SimpleNamespace(eos_token_id=2)
