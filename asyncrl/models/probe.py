"""A few layers of a model with its own weights: small enough to be compared with itself whenever a run starts.

    kinds of layers    as many of the first layers as it takes to have one of each kind
    vocabulary         its first tokens
    width              the first heads, the first units of the MLPs, and a part of the stream between the layers, where the class
                       can be built so
    windows, contexts  the numbers in the configuration from which on a model behaves differently, made small, so that a
                       short row passes them
    weights            the model's own; scaled up where they are so small that a lost term would not show, and moved off
                       constants (a norm's 1, a bias's 0), which hide a term as well

What is compared is what the class of the model computes under this configuration: code, not sizes.
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

WINDOW = 8  # tokens that a window of the probe spans
CONTEXT = 16  # "original" context of the probe's rotary scaling
VOCABULARY = 256
# And the chunks in which layers with a state go through a row.
_WINDOWS = (
    "sliding_window", "window_size", "attention_window", "attention_chunk_size", "attention_window_size",
    "chunk_size", "mamba_chunk_size", "block_size",
)  # fmt: skip
_POSITIONS = ("max_position_embeddings", "max_seq_len")  # rows of a table of positions, where a class has one
# Of an MLP's hidden layer: a number of equal units, of which a part computes what all do.
_WIDTHS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size",
)  # fmt: skip
# Of a layer, what says nothing of its kind: its own number, and the workings of nn.Module, which are many.
_DIFFERS_WITHIN_A_KIND = {"layer_idx", "layer_id", "layer_number", *vars(nn.Module())}
# Of a probe, the narrowest first: fewer heads over a narrow stream; fewer heads over a stream as much narrower; as the model is.
Width = Literal["stream", "heads", "whole"]
WIDTHS: tuple[Width, ...] = get_args(Width)
_SIMPLE = (bool, int, str, type(None))
_NARROW = 64
_STREAM = 64
_NOISE = 0.2
_SEED = 0


def build_probe(
    module: PreTrainedModel, device: torch.device | str = "cpu", *, width: Width = "whole", outgrown: bool = False
) -> PreTrainedModel:
    """A small float32 model of the class of `module`, whose weights may lie on the meta device: then the probe's are random.

    `width`: with fewer heads and units its size hardly depends on that of the model; not every class can be built so.
    `outgrown`: rows of the run pass the original context of rotary frequencies that follow their length (rotary.py); those of the
    probe do so too, if they have more than CONTEXT tokens.

    Leaves torch's global random state alone. Errors: whatever the class raises where it cannot be built so.
    """
    generator = torch.Generator().manual_seed(_SEED)
    probe = _build(module, width, outgrown)
    parameters = list(probe.named_parameters())
    with torch.no_grad():
        for name, target in [*parameters, *_saved_buffers(probe)]:
            _copy(_named(module, name), target)
        head = probe.get_output_embeddings()
        for name, parameter in parameters:
            tied = head is not None and parameter is head.weight  # of a size for logits, not for a residual stream
            _enliven(parameter, "embed" in name and not tied, generator)
    nn.Module.to(probe, torch.device(device))
    probe.eval()
    return probe


def most_positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest row that the model is made for, as its configuration says; None: it does not."""
    text = config.get_text_config()
    known = [value for name in _POSITIONS if isinstance(value := getattr(text, name, None), int) and value > 0]
    return min(known, default=None)


@torch.no_grad()
def positions_end(module: PreTrainedModel, longest: int, *, width: Width = "whole") -> int | None:
    """`most_positions` where a row of `longest` tokens goes beyond them and the model does not, as one that looks them up in a
    table; None: it goes on.

    Asked of a probe on the host whose table has CONTEXT rows. Errors: whatever the class raises where it cannot be built so.
    """
    most = most_positions(module.config)
    if most is None or longest <= most:
        return None
    probe = _build(module, width, False, positions=CONTEXT).eval()
    row = torch.zeros(1, CONTEXT + 1, dtype=torch.int64)
    probe(input_ids=row[:, :CONTEXT], use_cache=False)
    try:
        probe(input_ids=row, use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return most
    return None


def _build(module: PreTrainedModel, width: Width, outgrown: bool, *, positions: int | None = None) -> PreTrainedModel:
    """With its own random weights. Of some classes a few layers alone are none (Zamba ties the second of a kind to the first):
    then twice as many."""
    few = layer_kinds(module)
    total = int(module.config.get_text_config().num_hidden_layers)
    for layers in (few, min(2 * few, total)):
        config = _probe_config(module, layers)
        if width != "whole":
            _narrow(config.get_text_config(), stream=width == "stream")
        if outgrown:
            _shrink_original(config.get_text_config())
        if positions is not None:
            _set_positions(config.get_text_config(), positions)
        try:
            return _of_config(module, config)
        except (ValueError, IndexError, KeyError):
            if layers == total or layers > few:
                raise
    raise AssertionError("the second number of layers returns or raises")


def _of_config(module: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """With random weights only where those of `module` cannot be copied: to draw them takes longer than all else."""
    with no_init_weights():
        probe = _empty(module, config)
    probe.tie_weights()
    if all(_fits(_named(module, name), parameter) for name, parameter in probe.named_parameters()):
        return probe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return _empty(module, config)


def _empty(module: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    probe: PreTrainedModel = type(module)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    return probe


def _probe_config(module: PreTrainedModel, layers: int) -> PretrainedConfig:
    """The configuration of the probe of `module`: small windows and contexts too."""
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
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
    _shrink_contexts(text)
    return config


def _shrink_contexts(text: PretrainedConfig) -> None:
    for name in _WINDOWS:
        value = getattr(text, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > WINDOW:
            setattr(text, name, WINDOW)
    for part in rope_parts(text):
        if (
            not depends_on_length(part["rope_type"])
            and int(part.get("original_max_position_embeddings") or 0) > CONTEXT
        ):
            part["original_max_position_embeddings"] = CONTEXT


def _shrink_original(text: PretrainedConfig) -> None:
    of_the_model = (
        getattr(text, "original_max_position_embeddings", None) is not None
    )  # Phi-3's goes before that of the part
    for part in rope_parts(text):
        if "dynamic" in part["rope_type"]:
            text.max_position_embeddings = CONTEXT
        elif depends_on_length(part["rope_type"]):
            part["original_max_position_embeddings"] = CONTEXT
            if of_the_model:
                text.original_max_position_embeddings = CONTEXT


def _set_positions(text: PretrainedConfig, positions: int) -> None:
    for name in _POSITIONS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, positions)


def _narrow(text: PretrainedConfig, *, stream: bool) -> None:
    """Fewer heads of the same size over a stream as much narrower, and narrower MLPs: what a layer computes does not depend on
    how many of equal parts it has. `stream`: narrower still, where the configuration gives heads a size of their own."""
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    keys = getattr(text, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(keys, int) and isinstance(hidden, int):
        text.num_attention_heads, kept_keys, text.hidden_size = _fewer_heads(heads, keys, hidden)
        if getattr(text, "num_key_value_heads", None) is not None:
            text.num_key_value_heads = kept_keys
        if stream and isinstance(getattr(text, "head_dim", None), int):
            text.hidden_size = _narrow_stream(text.num_attention_heads, text.hidden_size)
    for name in _WIDTHS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value >= 2 * _NARROW:
            setattr(text, name, _NARROW + value % _NARROW)


def _narrow_stream(heads: int, hidden: int) -> int:
    """A multiple of the heads, which many classes ask for, that leaves the same rest to our kernels' sixteen numbers; `hidden`
    where no smaller one is both."""
    fits = (size for size in range(_STREAM, hidden) if not size % heads and not (hidden - size) % native.LANES)
    return next(fits, hidden)


def _fewer_heads(heads: int, keys: int, hidden: int) -> tuple[int, int, int]:
    """(query heads, key heads, hidden size) of the probe: two key heads, or one where the model has one.

    Our kernels take up to four query heads of a group at once and the rest after them, and sixteen numbers of a row at once: a
    group of up to eight stays as it is, a larger one leaves the same rest, and so does the hidden size. Where no such size is a
    whole number, all three are divided by the largest number that divides them so.
    """
    group, rest = divmod(heads, keys)
    kept = min(keys, 2) * (group if group <= 8 else 5 + (group - 1) % 4)
    narrow, fraction = divmod(hidden * kept, heads)
    if not rest and not fraction and narrow % native.LANES == hidden % native.LANES:
        return kept, min(keys, 2), narrow
    parts = (n for n in range(2, keys // 2 + 1) if not (heads % n or keys % n or hidden % n))
    part = max((n for n in parts if hidden // n % native.LANES == hidden % native.LANES), default=1)
    return heads // part, keys // part, hidden // part


def layer_kinds(module: PreTrainedModel) -> int:
    """How many of the first layers hold one of each kind; at least two where there are two."""
    first = first_of_kind(module)
    return max(min(2, len(first)), *(number + 1 for number in first)) if first else 0


def first_of_kind(module: PreTrainedModel) -> list[int]:
    """Of each layer, the number of the first one of its kind."""
    text = module.config.get_text_config()
    total = int(text.num_hidden_layers)
    stacks = list(_stacks(module, total))
    if not stacks:
        return list(range(total))
    lists = [v for v in vars(text).values() if isinstance(v, (list, tuple)) and len(v) == total]
    seen: dict[Any, int] = {}
    return [
        seen.setdefault(
            (tuple(_kind(stack[number]) for stack in stacks), tuple(str(values[number]) for values in lists)), number
        )
        for number in range(total)
    ]


def _stacks(module: nn.Module, total: int) -> Iterator[nn.ModuleList]:
    """Lists of `total` modules, but for those inside of one."""
    for part in module.children():
        if isinstance(part, nn.ModuleList) and len(part) == total:
            yield part
        else:
            yield from _stacks(part, total)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Classes, shapes and settings of everything in a layer. Floats are left out: some count the layer's own number."""
    parts: list[Any] = []
    for name, part in block.named_modules():
        settings = sorted(
            (key, value)
            for key, value in vars(part).items()
            if isinstance(value, _SIMPLE) and key not in _DIFFERS_WITHIN_A_KIND
        )
        shapes = tuple((key, value.shape) for key, value in part._parameters.items() if value is not None)
        parts.append((name, type(part).__qualname__, tuple(settings), shapes))
    return tuple(parts)


def _saved_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    saved = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def _named(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of that name: asked one by one, as a model has many more than its probe."""
    path, _, last = name.rpartition(".")
    try:
        found = getattr(module.get_submodule(path), last)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _copy(source: Tensor | None, target: Tensor) -> None:
    """The values of `source`, the first ones of a dimension that is shorter in the target; nothing where they do not fit."""
    if source is not None and _fits(source, target):
        target.copy_(source[tuple(slice(size) for size in target.shape)])


def _fits(source: Tensor | None, target: Tensor) -> bool:
    if source is None or source.device.type == "meta" or source.ndim != target.ndim:
        return False
    return all(own <= size for own, size in zip(target.shape, source.shape, strict=True))


def _enliven(parameter: Tensor, embedding: bool, generator: torch.Generator) -> None:
    """Nothing so small, or so constant, that a term with it would not show."""
    if not parameter.is_floating_point() or not parameter.numel():
        return
    if parameter.ndim >= 2:
        wanted = (1.0 if embedding else float(parameter.shape[-1])) ** -0.5
        size = float(parameter.square().mean().sqrt())
        if size == 0:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * wanted)
        elif size < 0.5 * wanted:
            parameter.mul_(wanted / size)
    elif float(parameter.std(correction=0)) < 0.05:
        parameter.add_(torch.randn(parameter.shape, generator=generator) * _NOISE)
