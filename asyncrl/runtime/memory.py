"""Forecasts the memory of each device by one formula for all models, warns if too little is free, and chooses settings.

The size of weights follows from the number of parameters, and the size of a microbatch from the output widths of the modules. The
factors were fitted to measured peaks, and the forecast is within 25 % of each peak (tools/results/memory.md, context.md). Every row
is assumed to have the largest length: the longest prompt plus `rollout.max_tokens` tokens. Not counted: states of recurrent layers,
routes of experts, and on a CPU the kernels and packed weights that oneDNN keeps. No run is refused because of the forecast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config.check_losses import needs_reference
from asyncrl.config.resolve import row_limit, with_values
from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.errors import LESS_MEMORY, ConfigError
from asyncrl.generation.vllm.versions import GPU_WORKSPACE
from asyncrl.models.attention.rows import row_bytes
from asyncrl.models.head.logprobs import CHUNK_ROWS, KEEP_LOGITS
from asyncrl.models.loading import adapter_sizes, describe_module, parameter_count
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.reward_model import predict_sizes
from asyncrl.models.routing import EXPERTS
from asyncrl.training.sharded import blocks_of

from .inputs import PromptLengths
from .placement import GIB, Gpus, Placement, place

# Bytes per parameter that `replicate` keeps on each rank with bfloat16: float32 master, gradient and two moments; working copy.
_STATE_BYTES = 18
_MAX_STATE_SHARE = 0.7  # of a GPU's memory; for a larger state, fsdp is the default
_MAX_USED_SHARE = 0.85  # of a device's memory: the prediction is rough
_MICROBATCHES = (16384, 8192, 4096, 2048)  # tokens, tried in this order
# Fitted: (elements kept for backward, temporary elements in the backward of one layer), per element of a module's output.
# "experts": per element of the inputs and outputs of a token's experts. "scan" (selective scan): per element of its states.
_FACTORS = {"fused": (1.0, 1.35), "modules": (2.1, 0.5), "experts": (1.35, 0.7), "scan": (3.0, 4.0)}
_CPU_HEAD_ROWS = 64  # rows of logits that the head computes at a time on a CPU
# Bytes that torch, gloo, and oneDNN or cuBLAS take for their first products and messages.
_LIBRARIES = 32 << 20
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")  # in models' configurations
# Bytes of a worker's process before it computes. On a GPU: CUDA's code and libraries. On a CPU: Python and torch. A process that
# computes on another GPU also takes these bytes on the trainer's GPU, because it opens the board there.
_PROCESS = 600 << 20


class Cut(NamedTuple):
    """How `fsdp` cuts the model. `shards`: number of ranks that hold one copy of the model together. `keep`: each rank keeps all
    gathered weights and all gradients, so weights are gathered and gradients reduced once per step instead of per microbatch."""

    shards: int
    keep: bool = False

    def line(self, ranks: int) -> str:
        """A sentence for the terminal."""
        holders = "all ranks" if self.shards == ranks else f"each {self.shards} ranks"
        often = "step" if self.keep else "microbatch"
        exchange = f"weights and gradients are exchanged once a {often}"
        return f"distributed.sharding: fsdp; {holders} hold one copy of the model; {exchange}"


def predicted(
    config: Config,
    ranks: int = 1,
    prompts: PromptLengths | None = None,
    path: ModelPath | None = None,
    placement: Placement | None = None,
    *,
    cut: Cut | None = None,
) -> dict[str, int]:
    """Purpose -> bytes that one rank needs on its device, computed from the model's configuration: nothing is allocated. `ranks`:
    number of ranks that train. `prompts`: result of `measure_prompts`; None: the limit of the settings. `path`: the model's path;
    None: guessed. `placement`: None: trainer and engine share a CPU. `cut`: used under `fsdp`; None: `Cut(ranks)`.
    Errors: ConfigError if the model's configuration cannot be read. The purposes are:
    weights, gradients, optimizer: of trained parameters, in float32 or wider. With adapters, `weights` includes the frozen weights.
    copies: in the matmul dtype the working copy, merged weights of adapters, the reference, both halves of the weight board, what
    FSDP gathers, and FSDP's gradients. FSDP's gradients count a second time in float32 or wider. A rank that only generates has the
    board and merged weights in the matmul dtype, and adapters in float32 or wider.
    microbatch: activations, logits, and the larger of the head's and one layer's backward.
    cache: keys and values. workers: their libraries, and vLLM's weights. reward_models: weights and one batch. libraries: fixed."""
    placement = placement or Placement((), 1, 1, "")
    described = describe_module(config.model)
    text, itemsize = described.config.get_text_config(), DTYPES[config.model.dtype].itemsize
    parts = _weight_parts(config, described, ranks, placement, cut or Cut(ranks))
    longest_prompt = _longest_prompt(config, prompts)
    if placement.trains:
        path = path or _guess_path(described)
        parts["microbatch"] = _microbatch_bytes(config, described, path, longest_prompt, placement.trainer.type)
    if placement.generates:
        parts["cache"] = _attention_layers(text) * _position_width(text) * itemsize * kv_positions(config, prompts)
    if placement.workers:
        processes = len(placement.devices)
        beside_trainer = sum(not placement.on_other_device(process) for process in range(processes))
        parts["cache"] = parts["cache"] * beside_trainer // processes
        parts["workers"] = processes * _PROCESS
        if config.generation.engine == "vllm":
            # vLLM has its own parameters. The embedded engine reads the board.
            own = parameter_count(config.model) * itemsize // placement.tensor_parallel
            parts["workers"] += beside_trainer * (own + (GPU_WORKSPACE if placement.trainer.type == "cuda" else 0))
    if config.reward.model and placement.generates:
        tokens = config.train.tokens_per_microbatch
        sizes = [predict_sizes(each, config.model.dtype, tokens) for each in config.reward.model]
        parts["reward_models"] = sum(size.weights for size in sizes) + max(size.activations for size in sizes)
    return parts | {"libraries": _LIBRARIES}


def _weight_parts(
    config: Config, described: PreTrainedModel, ranks: int, placement: Placement, cut: Cut
) -> dict[str, int]:
    text, sharded = described.config.get_text_config(), config.distributed.sharding == "fsdp"
    itemsize = DTYPES[config.model.dtype].itemsize
    wide = max(itemsize, 4)
    parameters = sum(parameter.numel() for parameter in described.parameters())
    adapters, merged = adapter_sizes(config.model)
    trained = adapters or parameters
    copies = merged + (2 * parameters if placement.workers or not placement.generates else 0)
    if not placement.trains:
        return {"copies": copies * itemsize + adapters * wide}
    if not placement.generates and (sharded or not (adapters or itemsize < wide)):
        # The board of each rank has only the rank's stripe.
        copies = merged + 2 * parameters // ranks
    # Here the working copy is separate. In the other cases it is a half of the board (weights/sync.py), or the float32 masters.
    if sharded or (itemsize < wide and (adapters or not copies)):
        copies += trained
    copies = (copies + (parameters if needs_reference(config.algorithm) else 0)) * itemsize
    if sharded:
        # Gathered weights of embedding, head and two layers; the gradient of the head or a layer, in the matmul dtype and float32.
        head = int(text.vocab_size) * int(text.hidden_size)
        ends = head if getattr(described.config, "tie_word_embeddings", False) else 2 * head
        layer = (parameters - ends) // int(text.num_hidden_layers)
        copies += (ends + 2 * layer) * itemsize + max(head, layer) * (itemsize + wide)
        copies += parameters * (itemsize + wide) if cut.keep else 0
    shard = -(-trained // (cut.shards if sharded else 1)) * wide
    return {
        "weights": shard + (parameters * itemsize if adapters else 0),
        "gradients": shard,
        "optimizer": 2 * shard,
        "copies": copies,
    }


def _microbatch_bytes(config: Config, described: PreTrainedModel, path: ModelPath, prompt: int, device: str) -> int:
    text, itemsize = described.config.get_text_config(), DTYPES[config.model.dtype].itemsize
    sibling_count = config.distributed.context
    if config.distributed.sharding == "fsdp" and path == FUSED:
        path = PACKED  # a sharded model trains through its own modules
    completion = config.rollout.max_tokens
    context = prompt + completion
    layers, hidden, vocabulary = int(text.num_hidden_layers), int(text.hidden_size) * itemsize, int(text.vocab_size)
    heads, wide = _heads(text), max(itemsize, 4)
    tokens = -(-config.train.tokens_per_microbatch // sibling_count)
    # `row_tokens`: tokens of all rows. For backward, attention keeps `score` bytes a score, and `operands` bytes a token (q, k, v).
    row_tokens, score, operands = float(tokens), 0, 0
    key_width, value_width = _head_widths(text)
    if path.name == "plain":
        # Every row repeats its prompt. Eager attention keeps its weights. In 16-bit types it also keeps them in float32.
        members = max(1, min(config.rollout.group_size, (tokens - prompt) // completion))
        row_tokens *= members * context / (prompt + members * completion)
        score = 0 if path.attention == "sdpa" else itemsize + (wide if itemsize < wide else 0)
        if path.attention == "sdpa" and device == "cpu" and key_width != value_width:
            # torch's kernel for a CPU needs values as wide as keys. Without the kernel attention keeps its weights in float32 and,
            # with a 16-bit type, also copies of queries, keys and values in float32.
            score = wide
            operands = heads * (2 * key_width + value_width) * wide if itemsize < wide else 0
    elif device == "cpu":
        # Attention keeps its weights if all rows are short (models/attention/rows.py). Each of the `siblings` ranks has some heads.
        scores = max(completion * context, prompt**2) * 4 * heads
        score = itemsize if scores <= row_bytes(itemsize) * sibling_count else 0
    kept, temporary = (row_tokens * itemsize * size for size in _widths(described, path, wide // itemsize))
    kept += row_tokens * (score * heads * context + operands) * _attention_layers(text)
    temporary /= layers
    if config.train.gradient_checkpointing:
        kept, temporary = layers * row_tokens * hidden, temporary + kept / layers
    # If there are too many logits to keep, backward computes them again, one chunk after the other.
    logits = tokens if tokens * vocabulary <= KEEP_LOGITS else min(CHUNK_ROWS, tokens)
    head_rows = min(_CPU_HEAD_ROWS if device == "cpu" else CHUNK_ROWS, tokens)
    head = head_rows * vocabulary * (itemsize + 2 * wide)
    # Four hidden states per token: the first, the last, the head's inputs, and a gradient.
    return round(kept + 4 * tokens * hidden + logits * vocabulary * itemsize + max(head, temporary))


def _widths(described: PreTrainedModel, path: ModelPath, widening: int) -> tuple[float, float]:
    """(elements per token kept for backward, temporary elements per token in backward), both summed over the layers. `widening`:
    the size of a float32 divided by the size of the matmul dtype."""
    text, widths = described.config.get_text_config(), Counter[str]()
    experts, chosen = (
        max((size for name in names if isinstance(size := getattr(text, name, None), int)), default=1)
        for names in (EXPERTS, _EXPERTS_PER_TOKEN)
    )
    for name, module in described.named_modules():
        if "experts" in name and "shared" not in name:
            for weight in (p for p in module.parameters(recurse=False) if p.ndim == 3 or isinstance(module, nn.Linear)):
                # A weight with three dimensions holds all experts. A weight with two dimensions belongs to one expert.
                widths["experts"] += chosen * sum(weight.shape[-2:]) / (1 if weight.ndim == 3 else experts)
        elif module is not described.get_output_embeddings():
            # transformers' Conv1D calls its output width `nf`.
            width = getattr(module, "out_features", 0) or getattr(module, "nf", 0)
            widths["fused" if path == FUSED else "modules"] += int(width)
        matrix = getattr(module, "A_log", None)  # of a selective scan (Mamba)
        if matrix is not None and matrix.ndim == 2:
            widths["scan"] += matrix.numel() * widening
    kept, temporary = (sum(_FACTORS[kind][part] * width for kind, width in widths.items()) for part in (0, 1))
    leaves = Counter(name.rpartition(".")[2] for name, _ in described.named_modules())
    queries, keys = (count * _head_widths(text)[0] for count in (_heads(text), _key_heads(text)))
    # A layer with norms of queries and keys also keeps the inputs of these norms.
    kept += leaves["q_norm"] * queries + leaves["k_norm"] * keys
    if path == FUSED:
        # A fused layer also keeps the output of attention. If norms follow both branches, it keeps the outputs of both branches.
        # The layer's inputs are not added: they are as wide as two outputs that are counted but not kept (models/fused/decoder.py).
        kept += _attention_layers(text) * queries + 2 * int(text.hidden_size) * leaves["post_feedforward_layernorm"]
    return kept, temporary


def _heads(text: Any) -> int:
    return int(getattr(text, "num_attention_heads", None) or 1)


def _key_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or _heads(text))


def _guess_path(described: PreTrainedModel) -> ModelPath:
    """A guess from the configuration: FUSED for the two usual activations of gated MLPs. The real path is known after the model is
    loaded (runtime/gate.py)."""
    text = described.config.get_text_config()
    if hasattr(text, "kv_lora_rank") or any(isinstance(module, nn.Conv1d) for module in described.modules()):
        return PLAIN[0]
    activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    return FUSED if activation in ("silu", "gelu_pytorch_tanh") and hasattr(text, "num_key_value_heads") else PACKED


def _position_width(text: Any) -> int:
    """Elements that a layer with attention caches for a token: keys and values, or what latent attention compresses them to."""
    if rank := getattr(text, "kv_lora_rank", None):
        return int(rank) + int(text.qk_rope_head_dim)
    return _key_heads(text) * sum(_head_widths(text))


def _head_widths(text: Any) -> tuple[int, int]:
    """(elements of a head's key, elements of a head's value). With latent attention the two may differ."""
    size = getattr(text, "head_dim", None) or int(text.hidden_size) // _heads(text)
    key = text.qk_nope_head_dim + text.qk_rope_head_dim if getattr(text, "kv_lora_rank", None) else size
    return int(key), int(getattr(text, "v_head_dim", None) or size)


def _attention_layers(text: Any) -> int:
    """Number of layers whose attention caches keys and values."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return int(text.num_hidden_layers) if getattr(text, "num_attention_heads", None) else 0
    return sum("attention" in kind and "linear" not in kind for kind in kinds)


def cut_model(
    config: Config, device: torch.device, world: World, placement: Placement | None = None, gpus: Gpus | None = None
) -> Cut:
    """How `distributed.sharding: fsdp` cuts the model. Depends on the total memory and not on the free memory, so that ranks choose
    the same cut."""
    ranks, per_machine = len(world.roles.train), world.local_world_size
    memory = (gpus or Gpus()).memory(device) if device.type == "cuda" else _meminfo("MemTotal") // per_machine
    # If training ranks fill whole machines, several ranks on each, each machine may hold a copy. If not, all ranks share a copy.
    fills_machines = ranks % per_machine == 0 and world.roles.train == tuple(range(ranks))
    shards = per_machine if per_machine > 1 and fills_machines else ranks
    for cut in (Cut(shards, True), Cut(shards)):
        if sum(predicted(config, ranks, placement=placement, cut=cut).values()) <= _MAX_USED_SHARE * memory:
            return cut
    return Cut(ranks)


def fit_gpu(
    config: Config, device: torch.device, world: World, resolve: Callable[[Config], Config], gpus: Gpus | None = None
) -> tuple[Config, list[str]]:
    """(the resolved configuration, lines for the user). With the trainer on a GPU, chooses `distributed.sharding` and
    `train.tokens_per_microbatch` if the user left them out. All ranks must choose the same, so the choice depends on the total
    memory of a GPU and not on its free memory. Errors: ConfigError, those of `resolve`."""
    if device.type != "cuda" or config.train.kind != "torch":
        return resolve(config), []
    lines, gpus = [], gpus or Gpus()
    memory, name = gpus.memory(device), gpus.describe(device)[0]
    state, training = _STATE_BYTES * parameter_count(config.model), len(world.roles.train)
    if training > 1 and "sharding" not in config.distributed.model_fields_set and state > _MAX_STATE_SHARE * memory:
        why = f"left out; replicate takes {state / GIB:.0f} GiB for the state on each {name}"
        # Each of these two calls raises ConfigError for what does not work with FSDP.
        try:
            resolve(sharded := with_values(config, {"distributed.sharding": "fsdp"}))
            blocks_of(describe_module(config.model))
            config = sharded
        except ConfigError as error:
            why += f", but {error}"
        lines.append(f"distributed.sharding: {config.distributed.sharding} ({why})")
    if "tokens_per_microbatch" in config.train.model_fields_set:
        return resolve(config), lines
    for tokens in (size for size in _MICROBATCHES if size >= row_limit(config)):
        chosen = resolve(with_values(config, {"train.tokens_per_microbatch": tokens}))
        placement = place(chosen, device, replace(world, rank=0), None, gpus)  # a rank that trains
        if sum(predicted(chosen, training, placement=placement).values()) <= _MAX_USED_SHARE * memory:
            break
    else:
        chosen = resolve(config)
    lines.append(f"train.tokens_per_microbatch: {chosen.train.tokens_per_microbatch} (left out; chosen for {name})")
    return chosen, lines


def worker_parts(config: Config, placement: Placement, cache: int) -> dict[str, int]:
    """Purpose -> bytes of a worker's process on another GPU than the trainer's. `cache`: bytes of the caches of all workers."""
    # The embedded engine copies both halves of the board. A vLLM process copies one half, and has its share of vLLM's parameters.
    half, split = parameter_count(config.model) * DTYPES[config.model.dtype].itemsize, placement.tensor_parallel
    process = _PROCESS + (GPU_WORKSPACE if config.generation.engine == "vllm" else 0)
    return {"copies": half + half // split, "cache": placement.share(cache) // split, "workers": process}


def kv_positions(config: Config, prompts: PromptLengths | None = None) -> int:
    """Positions in the engine's cache: as configured. If not: enough for `engine.max_sequences` sequences of the largest length."""
    sequences, tokens = config.engine.max_sequences, _longest_prompt(config, prompts) + config.rollout.max_tokens
    assert sequences is not None
    return config.engine.kv_positions or max(sequences * tokens, row_limit(config))


def _longest_prompt(config: Config, prompts: PromptLengths | None) -> int:
    return row_limit(config) - config.rollout.max_tokens if prompts is None else prompts.longest


def _meminfo(name: str) -> int:
    """Bytes in the line `name` of /proc/meminfo. Where this file does not exist: 2**62, more than any memory."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    return int(fields[name].split()[0]) * 1024


def table(parts: dict[str, int]) -> str:
    """A line for each part in GiB, and a line for their sum."""
    width = max(len(name) for name in parts)
    lines = [f"  {name:<{width}}  {size / GIB:8.3f} GiB" for name, size in parts.items()]
    return "\n".join([*lines, f"  {'total':<{width}}  {sum(parts.values()) / GIB:8.3f} GiB"])


def memory_warnings(parts: dict[str, int], device: torch.device, gpus: Gpus | None = None) -> list[str]:
    """A list with a warning if the forecast is above the free memory of the device; else an empty list."""
    total = sum(parts.values())
    free = (gpus or Gpus()).free(device) if device.type == "cuda" else _meminfo("MemAvailable")
    if total <= free:
        return []
    return [
        f"this run needs about {total / GIB:.1f} GiB on {device}, give or take a quarter, and {free / GIB:.1f} GiB are free; "
        f"if memory runs out, {LESS_MEMORY}"
    ]
