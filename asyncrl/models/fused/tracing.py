"""How transformers runs a decoder: one forward over a few tokens, in which the call of each layer is recorded.

The calls say what names cannot: how attention scales its scores, which window, softcap and sinks it has, which arguments the rotary
embedding takes, and which layers turn no query. `matches` then computes a recorded call with a fused layer. It compares the queries
and keys that reach attention, and the output of the layer where attention gives zeros.

What so few tokens do not show is found by the gate (runtime/gate.py), which compares whole models.

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

from ..attention.interface import PLAIN, PLAN_ARGUMENT, AttentionPlan, AttentionTerms, PlanWithRoutes
from ..head.output import decoder_of
from ..rotary import original_context
from .layers import Layer, LayerCall, RotaryCall, Rotation

Compute = Callable[[Layer, Tensor, AttentionPlan, Rotation], Tensor]

_TOKENS = 24
# What a layer may be handed beside its input.
_TENSORS = {"position_ids", "position_embeddings", "cache_position"}


@dataclass(frozen=True, slots=True)
class DecoderCalls:
    """What was recorded of a decoder. `multiplier`: by which it scales the embedded tokens."""

    layers: list[LayerCall]
    positions_T: Tensor
    multiplier: float


class _ZeroAttention(PlanWithRoutes):
    """Attention that records what it is given, and gives zeros."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Tensor, Tensor, float, AttentionTerms]] = {}
        self.calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = PLAIN
    ) -> Tensor:
        self.given[layer] = query, key, float(scaling), terms
        self.calls += 1
        return torch.zeros_like(query)


@torch.no_grad()
def trace(module: PreTrainedModel) -> DecoderCalls | None:
    """One forward of the decoder of `module`. None where it is more than embedding, layers in a row, and a norm."""
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
        last = decoder(**arguments, **{PLAN_ARGUMENT: attention}).last_hidden_state
        calls = [(_rotary_call(call), call[2]) for call in list(rotations)]
        layers = [
            _layer_call(call, out, calls, attention.given[number])
            for number, (call, out) in enumerate(zip(inputs, outputs, strict=True))
        ]
    except Exception:  # another architecture, which raises whatever it likes
        return None
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
    chain = [(embedding(tokens_T) * multiplier)[None], *(layer.out for layer in layers if layer is not None)]
    if (
        [number for number, _, _ in inputs] != list(range(len(blocks)))
        or attention.calls != len(blocks)
        or any(layer is None or not torch.equal(layer.x, x) for layer, x in zip(layers, chain, strict=False))
        or not torch.equal(decoder.norm(chain[-1]), last)
    ):
        return None
    return DecoderCalls(cast(list[LayerCall], layers), positions_T, multiplier)


def _positions(config: Any) -> Tensor:
    """[T] from 0 to beyond all contexts, each a constant factor after the one before, where the model allows that."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = [part.get("original_max_position_embeddings") for part in (rope, *rope.values()) if isinstance(part, dict)]
    contexts = [int(length) for length in (*known, getattr(config, "max_position_embeddings", None)) if length]
    end = original_context(config) or 4 * max(contexts, default=1024)
    return torch.linspace(0, math.log(end), _TOKENS, dtype=torch.float64).exp().sub_(1).round_().long()


def _rotary_call(call: tuple[tuple[Any, ...], dict[str, Any], Any]) -> RotaryCall:
    """Errors: TypeError for arguments that cannot be told apart by their values: rotations are kept by them."""
    arguments, named, given = call
    rest = {name: value for name, value in named.items() if name not in ("x", "position_ids")}
    half = given[0].shape[-1] // 2
    doubled = all(torch.equal(table[..., :half], table[..., half:]) for table in given)
    found = RotaryCall(tuple(arguments[2:]), tuple(sorted(rest.items())), doubled)
    hash(found)
    return found


def _layer_call(
    call: tuple[int, tuple[Any, ...], dict[str, Any]],
    out: Any,
    rotations: list[tuple[RotaryCall, Any]],
    attention: tuple[Tensor, Tensor, float, AttentionTerms],
) -> LayerCall | None:
    _, arguments, named = call
    rotary = next((own for own, given in rotations if any(value is given for value in named.values())), None)
    strange = [name for name, value in named.items() if isinstance(value, Tensor) and name not in _TENSORS]
    if len(arguments) != 1 or strange or not isinstance(out, Tensor):
        return None
    return LayerCall(arguments[0], out, rotary, *attention)


@torch.no_grad()
def matches(layer: Layer, call: LayerCall, rotation: Rotation, compute: Compute) -> bool:
    """Whether `layer`, as `compute(layer, x [T, E], plan, rotation) -> [T, E]` runs it, gives attention the recorded queries and
    keys, and adds to its input what was recorded. Within half the digits of the model's dtype."""
    x, expected, attention = call.x[0], call.out[0], _ZeroAttention()
    if rotation.cos is not None and 2 * rotation.cos.shape[1] > layer.head_size:
        return False
    found = compute(layer, x, attention, rotation)
    unit = float(torch.finfo(x.dtype).eps)
    query, key, *_ = attention.given[layer.number]
    for own, given in ((query, call.query), (key, call.key)):
        if own.shape != given.shape or not _distance(own, given) <= math.sqrt(unit) * _size(given):
            return False
    return _distance(found, expected) <= math.sqrt(unit) * _distance(expected, x) + 2 * unit * _size(expected)


def _distance(a: Tensor, b: Tensor) -> float:
    return _size(a - b)


def _size(a: Tensor) -> float:
    return float(a.double().norm())
