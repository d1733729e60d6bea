"""Builds a probe: a small model of the same class as the run's model, with a part of its weights.

At the start of a run the gate (runtime/gate.py) compares the probe on each path with transformers. The comparison tests code. Which
code runs depends on class and configuration, so the sizes may be smaller:

    layers             the first layers, at least two, until there is a layer of each kind
    vocabulary         the first tokens
    width              if the class allows it: the first heads, the first values of the hidden size, and the first units of the MLPs
    windows, contexts  shorter than the longest compared row. If rotary frequencies depend on the length of a row, their original
                       context is shortened only with `long_rows`
    weights            the model's own, but very small weights are scaled up and constants (1 in a norm, 0 in a bias) get noise,
                       because the comparison would not notice if a path left such a weight out
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from .native import library as native
from .rotary import depends_on_length, rope_parts

# Sizes of the probe: tokens in a window, tokens in the original context of rotary scaling, tokens of the vocabulary.
WINDOW = 8
CONTEXT = 16
VOCABULARY = 256
# Settings for a window of attention, or for the length of the chunks in which a recurrent layer computes a row.
_WINDOWS = (
    "sliding_window", "window_size", "attention_window", "attention_chunk_size", "attention_window_size",
    "chunk_size", "mamba_chunk_size", "block_size",
)  # fmt: skip
# Settings for the number of positions. Some classes have a table with a row for each position.
_POSITIONS = ("max_position_embeddings", "max_seq_len")
# Settings for the hidden size of an MLP. All units run the same code, so the probe needs only some units.
_MLP_SIZES = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size",
)  # fmt: skip
# Attributes that `_kind` ignores, because they may differ between layers of one kind.
_DIFFERS_WITHIN_A_KIND = {"layer_idx", "layer_id", "layer_number", *vars(nn.Module())}
# Widths of a probe, from narrow to wide. "stream": fewer heads, and a hidden size that is smaller than with "heads". "heads": fewer
# heads, and a hidden size that is smaller by the same factor. "whole": the width of the model.
Width = Literal["stream", "heads", "whole"]
WIDTHS: tuple[Width, ...] = get_args(Width)
_SIMPLE_TYPES = (bool, int, str, type(None))  # of the settings that `_kind` compares
_SMALL_MLP = 64
_SMALL_HIDDEN = 64
_NOISE = 0.2  # standard deviation
_SEED = 0


def build_probe(
    module: PreTrainedModel, device: torch.device | str = "cpu", *, width: Width = "whole", long_rows: bool = False
) -> PreTrainedModel:
    """A small float32 model of the class of `module`, in eval mode. If `module` is on the meta device, the weights are random.

    long_rows: whether rows of the run exceed the original context of rotary frequencies that depend on the length (rotary.py). If
    true, the original context of the probe is `CONTEXT` tokens.

    Does not change torch's global random state. Errors: any exception of the class, if it cannot be built at this width.
    """
    generator = torch.Generator().manual_seed(_SEED)
    probe = _build(module, width, long_rows)
    head = probe.get_output_embeddings()
    with torch.no_grad():
        # For each parameter, and each buffer that a checkpoint has: copies the first values of each dimension.
        for name, target in probe.state_dict(keep_vars=True).items():
            source = _find_tensor(module, name)
            if source is not None and _fits(source, target):
                target.copy_(source[tuple(slice(size) for size in target.shape)])
        for name, parameter in probe.named_parameters():
            # An embedding that is also the head is scaled like other matrices.
            is_head = head is not None and parameter is head.weight
            _make_visible(parameter, "embed" in name and not is_head, generator)
    nn.Module.to(probe, torch.device(device))
    probe.eval()
    return probe


def max_positions(config: PretrainedConfig) -> int | None:
    """The number of positions in the configuration, or None if the configuration has no such setting."""
    text = config.get_text_config()
    limits = [value for name in _POSITIONS if isinstance(value := getattr(text, name, None), int) and value > 0]
    return min(limits, default=None)


@torch.no_grad()
def position_limit(module: PreTrainedModel, longest: int, *, width: Width = "whole") -> int | None:
    """None if the model can run a row of `longest` tokens; `max_positions` if not, for example because of a table of positions.
    Runs a probe with `CONTEXT` positions on the host. Errors: any exception of the class, if it cannot be built at this width."""
    limit = max_positions(module.config)
    if limit is None or longest <= limit:
        return None
    probe = _build(module, width, False, positions=CONTEXT).eval()
    row = torch.zeros(1, CONTEXT + 1, dtype=torch.int64)
    probe(input_ids=row[:, :CONTEXT], use_cache=False)
    try:
        probe(input_ids=row, use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return limit
    return None


def _build(module: PreTrainedModel, width: Width, long_rows: bool, *, positions: int | None = None) -> PreTrainedModel:
    """A probe without the model's weights. Some classes need two layers of each kind (Zamba ties the second to the first), so a
    second try has twice the layers. `positions`: `max_positions` of the probe; None: that of the model."""
    fewest = _layers_with_all_kinds(module)
    total = int(module.config.get_text_config().num_hidden_layers)
    for layers in (fewest, min(2 * fewest, total)):
        config = _probe_config(module, layers)
        if width != "whole":
            _narrow(config.get_text_config(), stream=width == "stream")
        if long_rows:
            _shrink_original_contexts(config.get_text_config())
        for name in () if positions is None else _POSITIONS:
            if isinstance(getattr(config.get_text_config(), name, None), int):
                setattr(config.get_text_config(), name, positions)
        try:
            return _of_config(module, config)
        except (ValueError, IndexError, KeyError):
            if layers == total or layers > fewest:
                raise
    raise AssertionError("unreachable: the last number of layers returns or raises")


def _of_config(module: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """A model of the class of `module`. Weights are drawn only if some cannot be copied from `module`, because drawing is slow."""
    with no_init_weights():
        probe = _from_config(module, config)
    probe.tie_weights()
    if all(_fits(_find_tensor(module, name), parameter) for name, parameter in probe.named_parameters()):
        return probe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return _from_config(module, config)


def _from_config(module: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    probe: PreTrainedModel = type(module)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    return probe


def _probe_config(module: PreTrainedModel, layers: int) -> PretrainedConfig:
    """A copy of the configuration of `module` with `layers` layers, a small vocabulary, small windows, and small original contexts
    of rotary frequencies that do not depend on the length of a row (the others: see `_shrink_original_contexts`)."""
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    # A list whose length is the number of layers has a value for each layer.
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == module.config.get_text_config().num_hidden_layers:
            setattr(text, name, type(value)(value[:layers]))
    if int(text.vocab_size) > VOCABULARY:
        text.vocab_size = VOCABULARY
        for part in (text, config):
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                value = getattr(part, name, None)
                if value is not None and not (isinstance(value, int) and 0 <= value < VOCABULARY):
                    setattr(part, name, None if name != "pad_token_id" else VOCABULARY - 1)
    for name in _WINDOWS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > WINDOW:
            setattr(text, name, WINDOW)
    for rope in rope_parts(text):
        context = int(rope.get("original_max_position_embeddings") or 0)
        if not depends_on_length(rope["rope_type"]) and context > CONTEXT:
            rope["original_max_position_embeddings"] = CONTEXT
    return config


def _shrink_original_contexts(text: PretrainedConfig) -> None:
    """Shrinks the original contexts of rotary frequencies that depend on the length of a row."""
    # Phi-3 reads this setting, and ignores the original context in its rotary parameters.
    has_own_context = getattr(text, "original_max_position_embeddings", None) is not None
    for part in rope_parts(text):
        if "dynamic" in part["rope_type"]:
            text.max_position_embeddings = CONTEXT
        elif depends_on_length(part["rope_type"]):
            part["original_max_position_embeddings"] = CONTEXT
            if has_own_context:
                text.original_max_position_embeddings = CONTEXT


def _narrow(text: PretrainedConfig, *, stream: bool) -> None:
    """Reduces the number of heads, the hidden size and the size of MLPs. `stream`: reduces the hidden size further, if the
    configuration has a head size that is independent of the hidden size."""
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(key_heads, int) and isinstance(hidden, int):
        text.num_attention_heads, fewer_key_heads, text.hidden_size = _fewer_heads(heads, key_heads, hidden)
        if getattr(text, "num_key_value_heads", None) is not None:
            text.num_key_value_heads = fewer_key_heads
        if stream and isinstance(getattr(text, "head_dim", None), int):
            # Many classes require a multiple of the number of heads. The remainder modulo `SIMD_WIDTH` stays (see `_fewer_heads`).
            heads, hidden = text.num_attention_heads, text.hidden_size
            fitting = (n for n in range(_SMALL_HIDDEN, hidden) if not (n % heads or (hidden - n) % native.SIMD_WIDTH))
            text.hidden_size = next(fitting, hidden)
    for name in _MLP_SIZES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value >= 2 * _SMALL_MLP:
            setattr(text, name, _SMALL_MLP + value % _SMALL_MLP)


def _fewer_heads(heads: int, key_heads: int, hidden: int) -> tuple[int, int, int]:
    """(query heads, key heads, hidden size) of the probe: two key heads, or one if the model has one.

    The native kernels compute four query heads of one key head at once, and 16 values of a row at once. Remainders take other code,
    so the probe keeps both remainders. Up to eight query heads per key head are kept. More become 5 to 8. If no such numbers exist,
    the model's numbers are divided by the largest common divisor that keeps `hidden`'s remainder and two key heads.
    """
    per_key_head, remainder = divmod(heads, key_heads)
    fewer_heads = min(key_heads, 2) * (per_key_head if per_key_head <= 8 else 5 + (per_key_head - 1) % 4)
    smaller_hidden, hidden_remainder = divmod(hidden * fewer_heads, heads)
    if not remainder and not hidden_remainder and smaller_hidden % native.SIMD_WIDTH == hidden % native.SIMD_WIDTH:
        return fewer_heads, min(key_heads, 2), smaller_hidden
    divisors = (n for n in range(2, key_heads // 2 + 1) if not (heads % n or key_heads % n or hidden % n))
    divisor = max((n for n in divisors if hidden // n % native.SIMD_WIDTH == hidden % native.SIMD_WIDTH), default=1)
    return heads // divisor, key_heads // divisor, hidden // divisor


def _layers_with_all_kinds(module: PreTrainedModel) -> int:
    """The number of first layers that contain every kind of layer, and at least two, if the model has two. If `_stacks` finds no
    list of layers: the number of all layers."""
    text = module.config.get_text_config()
    total = int(text.num_hidden_layers)
    stacks = list(_stacks(module, total))
    if not stacks:
        return total
    settings = [v for v in vars(text).values() if isinstance(v, (list, tuple)) and len(v) == total]
    first_of_kind: dict[Any, int] = {}
    for number in range(total):
        kind = tuple(_kind(stack[number]) for stack in stacks), tuple(str(values[number]) for values in settings)
        first_of_kind.setdefault(kind, number)
    return max([min(2, total), *(number + 1 for number in first_of_kind.values())])


def _stacks(module: nn.Module, total: int) -> Iterator[nn.ModuleList]:
    """The outermost module lists of `total` modules: the layers."""
    for part in module.children():
        if isinstance(part, nn.ModuleList) and len(part) == total:
            yield part
        else:
            yield from _stacks(part, total)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Classes, shapes and settings in a layer, without floats, which some classes compute from the layer's index."""
    parts: list[Any] = []
    for name, part in block.named_modules():
        settings = sorted(
            (key, value)
            for key, value in vars(part).items()
            if isinstance(value, _SIMPLE_TYPES) and key not in _DIFFERS_WITHIN_A_KIND
        )
        shapes = tuple((key, value.shape) for key, value in part._parameters.items() if value is not None)
        parts.append((name, type(part).__qualname__, tuple(settings), shapes))
    return tuple(parts)


def _find_tensor(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer with this name, or None."""
    path, _, last = name.rpartition(".")
    try:
        tensor = getattr(module.get_submodule(path), last)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, Tensor) else None


def _fits(source: Tensor | None, target: Tensor) -> bool:
    if source is None or source.device.type == "meta" or source.ndim != target.ndim:
        return False
    return all(target_size <= size for target_size, size in zip(target.shape, source.shape, strict=True))


def _make_visible(parameter: Tensor, embedding: bool, generator: torch.Generator) -> None:
    """Scales up matrices whose values are small, fills zero matrices with noise, and adds noise to constant vectors."""
    if not parameter.is_floating_point() or not parameter.numel():
        return
    if parameter.ndim >= 2:
        wanted_rms = (1.0 if embedding else float(parameter.shape[-1])) ** -0.5
        rms = float(parameter.square().mean().sqrt())
        if rms == 0:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * wanted_rms)
        elif rms < 0.5 * wanted_rms:
            parameter.mul_(wanted_rms / rms)
    elif float(parameter.std(correction=0)) < 0.05:
        parameter.add_(torch.randn(parameter.shape, generator=generator) * _NOISE)
