"""Records how transformers runs a decoder: `trace` runs one forward over a few tokens and records the call of each layer.

The recorded calls show facts that names of modules do not prove: the scaling, window, softcap and sinks of attention, the
arguments of the rotary embedding, and the layers without rotary embedding. `matches` runs a fused layer on the input of a recorded
call, and compares the queries and keys that reach attention, and the output of the layer. Attention returns zeros in both runs.

A few tokens do not show every difference, so the gate (runtime/gate.py) also compares whole models.

Shape legend: T tokens, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.interface import NO_TERMS, PLAN_ARGUMENT, AttentionPlan, AttentionTerms
from ..head.output import decoder_of
from ..rotary import original_context
from .layers import Layer, LayerCall, RotaryCall, Rotation

Compute = Callable[[Layer, Tensor, AttentionPlan, Rotation], Tensor]

_TOKENS = 24  # of the recorded forward
# Tensors that a layer may get as keyword arguments. `trace` refuses a decoder that passes other tensors.
_KNOWN_TENSORS = {"position_ids", "position_embeddings", "cache_position"}


@dataclass(frozen=True, slots=True)
class DecoderCalls:
    """The recorded calls of a decoder's layers. The decoder multiplies the embedded tokens by `multiplier`."""

    layers: list[LayerCall]
    positions_T: Tensor
    multiplier: float


class _ZeroAttention(AttentionPlan):
    """Records the arguments of `attend` for each layer, and returns zeros."""

    def __init__(self) -> None:
        self.recorded: dict[int, tuple[Tensor, Tensor, float, AttentionTerms]] = {}
        self.calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        self.recorded[layer] = query, key, float(scaling), terms
        self.calls += 1
        return torch.zeros_like(query)


@torch.no_grad()
def trace(module: PreTrainedModel) -> DecoderCalls | None:
    """Records one forward of the decoder. None if the forward fails, or does more than embedding, chain of layers and norm."""
    decoder: Any = decoder_of(module)
    embedding: Any = module.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return None
    blocks = list(decoder.layers)
    device = embedding.weight.device
    tokens_T = torch.linspace(0, embedding.num_embeddings - 1, _TOKENS, device=device).long()
    positions_T = _positions(module.config.get_text_config()).to(device)
    inputs: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
    outputs: list[Any] = []
    rotations: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    attention = _ZeroAttention()
    hooks = [decoder.rotary_emb.register_forward_hook(lambda _, *call: rotations.append(call), with_kwargs=True)]
    for number, block in enumerate(blocks):
        hooks += [
            block.register_forward_pre_hook(
                lambda _, args, named, number=number: inputs.append((number, args, dict(named))), with_kwargs=True
            ),
            block.register_forward_hook(lambda _, args, out: outputs.append(out)),
        ]
    training = module.training
    module.eval()
    try:
        arguments = {"input_ids": tokens_T[None], "position_ids": positions_T[None], "use_cache": False}
        final = decoder(**arguments, **{PLAN_ARGUMENT: attention}).last_hidden_state
        rotary_calls = [(_rotary_call(call), call[2]) for call in rotations]
        layers = [
            _layer_call(call, out, rotary_calls, attention.recorded[number])
            for number, (call, out) in enumerate(zip(inputs, outputs, strict=True))
        ]
    except Exception:  # unknown architectures may raise any exception
        return None
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
    # In a chain each layer gets the output of the layer before it, and the norm gets the last output.
    chain = [(embedding(tokens_T) * multiplier)[None], *(layer.out for layer in layers if layer is not None)]
    in_order = [number for number, _, _ in inputs] == list(range(len(blocks))) and attention.calls == len(blocks)
    if not in_order or any(
        layer is None or not torch.equal(layer.x, x) for layer, x in zip(layers, chain, strict=False)
    ):
        return None
    if not torch.equal(decoder.norm(chain[-1]), final):
        return None
    return DecoderCalls(cast(list[LayerCall], layers), positions_T, multiplier)


def _positions(config: Any) -> Tensor:
    """Positions [T] int64 that grow exponentially from 0 to the original context (rotary.py). If rotary frequencies do not depend
    on the length: to four times the longest context of the configuration."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    lengths = [part.get("original_max_position_embeddings") for part in parts]
    contexts = [int(length) for length in (*lengths, getattr(config, "max_position_embeddings", None)) if length]
    end = original_context(config) or 4 * max(contexts, default=1024)
    return torch.linspace(0, math.log(end), _TOKENS, dtype=torch.float64).exp().sub_(1).round_().long()


def _rotary_call(call: tuple[tuple[Any, ...], dict[str, Any], Any]) -> RotaryCall:
    """Errors: TypeError for unhashable arguments, because `FusedDecoder` uses a `RotaryCall` as a key."""
    arguments, named, tables = call
    extra = {name: value for name, value in named.items() if name not in ("x", "position_ids")}
    half = tables[0].shape[-1] // 2
    doubled = all(torch.equal(table[..., :half], table[..., half:]) for table in tables)
    rotary_call = RotaryCall(tuple(arguments[2:]), tuple(sorted(extra.items())), doubled)
    hash(rotary_call)
    return rotary_call


def _layer_call(
    call: tuple[int, tuple[Any, ...], dict[str, Any]],
    out: Any,
    rotary_calls: list[tuple[RotaryCall, Any]],
    attention: tuple[Tensor, Tensor, float, AttentionTerms],
) -> LayerCall | None:
    _, arguments, named = call
    rotary = [rotary_call for rotary_call, tables in rotary_calls if any(value is tables for value in named.values())]
    unknown = [name for name, value in named.items() if isinstance(value, Tensor) and name not in _KNOWN_TENSORS]
    if len(arguments) != 1 or unknown or not isinstance(out, Tensor):
        return None
    return LayerCall(arguments[0], out, rotary[0] if rotary else None, *attention)


@torch.no_grad()
def matches(layer: Layer, call: LayerCall, rotation: Rotation, compute: Compute) -> bool:
    """Whether `layer` computes the recorded queries, keys and output, up to a relative error of sqrt(eps) of the model's dtype.
    `compute(layer, x [T, E], plan, rotation) -> [T, E]` runs the layer. Output errors are relative to output minus input."""
    x, expected, attention = call.x[0], call.out[0], _ZeroAttention()
    if rotation.cos is not None and 2 * rotation.cos.shape[1] > layer.head_size:
        return False
    out = compute(layer, x, attention, rotation)
    eps = float(torch.finfo(x.dtype).eps)
    query, key, *_ = attention.recorded[layer.number]
    for ours, recorded in ((query, call.query), (key, call.key)):
        # `not <=` also refuses NaN.
        if ours.shape != recorded.shape or not _norm(ours - recorded) <= math.sqrt(eps) * _norm(recorded):
            return False
    return _norm(out - expected) <= math.sqrt(eps) * _norm(expected - x) + 2 * eps * _norm(expected)


def _norm(a: Tensor) -> float:
    return float(a.double().norm())
