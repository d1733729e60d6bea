"""The proof that a fused layer computes what transformers' own does: heard in the model, repeated on a copy.

`listen` runs the model's own decoder once, on a few tokens, and notes how each layer is called and what it gives to
attention, which answers zeros. `prove` takes a layer, copies it in float64 with its weights scaled so that every term shows
(scores of some tens, no constant norms), and compares, at positions beyond any context that the configuration names, what
both add to the residual stream. The copy lives on the CPU, whatever device the model is on; in it something small stands in
the place of experts, which are gigabytes, and which a fused layer calls as they are. `repeats` asks every layer, as it is,
its experts included, for what was heard of it.

A term that only a later layer of a kind has, or that needs more than these tokens to show, is found by the gate, which
compares whole models (runtime/gate.py).

Shape legend: T tokens, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

from ..attention.interface import PLAIN, PLAN_ARGUMENT, AttentionPlan, AttentionTerms, Routed
from ..attention.tree import TreePlan
from ..copying import copy_module
from ..head.output import decoder_of
from ..parameters.flat import FlatWeights
from ..parameters.lora import AdaptedLinear
from ..rotary import original_context
from .layers import Heard, Layer, RotaryCall, Rotation, RotationKind, experts_of, make_rotation, read_layer

Compute = Callable[[Layer, Tensor, AttentionPlan, Rotation], Tensor]

_TOKENS = 24
_GAIN = 4.0  # standard deviation of what a product gives for a normed input
_NOISE = 0.3
_TOLERANCE = 1e-6  # of what a layer adds; transformers computes single factors in float32 even here
_TENSORS = {"position_ids", "position_embeddings", "cache_position"}  # that a layer may be handed beside its input


@dataclass(frozen=True, slots=True)
class Listening:
    """What was heard of a model's decoder."""

    layers: list[Heard]
    positions_T: Tensor
    multiplier: float  # of the embedded tokens, by the decoder


class _Ear(Routed):
    """Attention that notes what it is given."""

    def __init__(self, plan: TreePlan | None = None) -> None:
        """`plan`: what attends; None: nothing does."""
        self.plan = plan
        self.heard: dict[int, tuple[float, AttentionTerms]] = {}
        self.calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = PLAIN
    ) -> Tensor:
        self.heard[layer] = float(scaling), terms
        self.calls += 1
        return (
            torch.zeros_like(query) if self.plan is None else self.plan.attend(layer, query, key, value, scaling, terms)
        )


@torch.no_grad()
def listen(module: PreTrainedModel) -> Listening | None:
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
    ear = _Ear()
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
        last = decoder(**arguments, **{PLAN_ARGUMENT: ear}).last_hidden_state
        calls = [(_rotary_call(decoder.rotary_emb, call, positions_T), call[2]) for call in list(rotations)]
        layers = [
            _heard(call, out, calls, ear.heard[number])
            for number, (call, out) in enumerate(zip(inputs, outputs, strict=True))
        ]
    except Exception:  # another architecture: whatever it raises when it is called like this, it is not one of ours
        return None
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
    chain = [(embedding(tokens_T) * multiplier)[None], *(layer.out for layer in layers if layer is not None)]
    if (
        [number for number, _, _ in inputs] != list(range(len(blocks)))
        or ear.calls != len(blocks)
        or any(layer is None or not torch.equal(layer.x, x) for layer, x in zip(layers, chain, strict=False))
        or not torch.equal(decoder.norm(chain[-1]), last)
    ):
        return None
    return Listening(cast(list[Heard], layers), positions_T, multiplier)


def _positions(config: Any) -> Tensor:
    """[T] from 0 to beyond all contexts, each a constant factor after the one before, where the model allows that."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = [part.get("original_max_position_embeddings") for part in (rope, *rope.values()) if isinstance(part, dict)]
    contexts = [int(length) for length in (*known, getattr(config, "max_position_embeddings", None)) if length]
    end = original_context(config) or 4 * max(contexts, default=1024)
    return torch.linspace(0, math.log(end), _TOKENS, dtype=torch.float64).exp().sub_(1).round_().long()


def _rotary_call(rotary: Any, call: tuple[tuple[Any, ...], dict[str, Any], Any], positions_T: Tensor) -> RotaryCall:
    """Errors: ValueError where the same call, as the fused decoder makes it, gives something else; TypeError for arguments that
    cannot be told apart by their values: rotations are kept by them."""
    arguments, named, given = call
    rest = {name: value for name, value in named.items() if name not in ("x", "position_ids")}
    half = given[0].shape[-1] // 2
    doubled = all(torch.equal(table[..., :half], table[..., half:]) for table in given)
    found = RotaryCall(tuple(arguments[2:]), tuple(sorted(rest.items())), doubled)
    cos, sin = rotary(arguments[0] if arguments else named["x"], positions_T[None], *found.arguments, **rest)
    hash(found)
    if not (torch.equal(cos, given[0]) and torch.equal(sin, given[1])):
        raise ValueError("the model turns its positions before it hands them to its rotary embedding")
    return found


def _heard(
    call: tuple[int, tuple[Any, ...], dict[str, Any]],
    out: Any,
    rotations: list[tuple[RotaryCall, Any]],
    attention: tuple[float, AttentionTerms],
) -> Heard | None:
    _, arguments, named = call
    rotary = next((own for own, given in rotations if any(value is given for value in named.values())), None)
    strange = [name for name, value in named.items() if isinstance(value, Tensor) and name not in _TENSORS]
    if len(arguments) != 1 or strange or not isinstance(out, Tensor):
        return None
    scaling, terms = attention
    return Heard(arguments[0], named, out, rotary, scaling, terms)


@torch.no_grad()
def prove(block: nn.Module, layer: Layer, heard: Heard, positions_T: Tensor, compute: Compute) -> RotationKind | None:
    """How `compute` has to turn queries and keys so that it gives what `block` does; None where it never does.

    `compute(layer, x [T, E], plan, rotation) -> [T, E]`. Errors of ours that say that the parts do not fit are taken for no.
    """
    named = {name: _on_cpu(value) for name, value in heard.named.items() if name != PLAN_ARGUMENT}
    positions_T = positions_T.cpu()
    plan = TreePlan([0], [_TOKENS])
    ear = _Ear(plan)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, heard.x.shape[-1], dtype=torch.float64, generator=generator)
    try:
        copied, flat = _copy(block, heard.x)
        index = {id(parameter): place for place, parameter in enumerate(flat.parameters)}
        expected = copied(x[None], **named, **{PLAN_ARGUMENT: ear})[0]
        scaling, terms = ear.heard[layer.number]
        again = read_layer(layer.number, copied, replace(heard, scaling=scaling, terms=terms), flat, index, pack=False)
    except Exception:  # as in `listen`
        return None
    if again is None:
        return None
    rotary = named.get("position_embeddings")
    for rotation in dict.fromkeys((layer.rotation, layer.rotation._replace(rotary=None))):
        turned = make_rotation(rotation, None if rotation.rotary is None else rotary, positions_T, x)
        if turned.cos is not None and 2 * turned.cos.shape[1] > layer.head_size:
            continue
        try:
            found = compute(replace(again, rotation=rotation), x, plan, turned)
        except (RuntimeError, ValueError, ConfigError):  # sizes that do not fit; terms that nobody computes
            continue
        if float((found - expected).norm()) <= _TOLERANCE * float((expected - x).norm()):
            return rotation
    return None


@torch.no_grad()
def repeats(layer: Layer, heard: Heard, rotation: Rotation, compute: Compute) -> bool:
    """Whether `layer` adds to its input what was heard, in the dtype and with the weights of the model, attention being none:
    coarse in a narrow dtype, but asked of every layer."""
    x, expected = heard.x[0], heard.out[0]
    found = compute(layer, x, _Ear(), rotation)
    unit = torch.finfo(x.dtype).eps
    error, added, whole = (float(part.double().norm()) for part in (found - expected, expected - x, expected))
    return bool(error <= unit**0.5 * added + 2 * unit * whole)


class _InPlaceOfExperts(nn.Module):
    """Answers in their form, and otherwise for every input."""

    def __init__(self, experts: nn.Module, x: Tensor) -> None:
        """`x` [1, T, E]: what they take."""
        super().__init__()
        self.experts = nn.Identity()  # by this name a layer is known to have some
        found = experts(x)
        self.others = found[1:] if isinstance(found, tuple) else None

    def forward(self, x: Tensor) -> Any:
        """[1, T, E] -> [1, T, E], or a tuple that begins with that."""
        return torch.sin(x) if self.others is None else (torch.sin(x), *self.others)


def _copy(block: nn.Module, x: Tensor) -> tuple[nn.Module, FlatWeights]:
    """`block` in float64 on the CPU, its weights enlivened. `x` [1, T, E]: what it was given. Errors: whatever experts raise that
    are called otherwise."""
    kept: dict[int, Any] = {
        id(part.adapter): part.adapter for part in block.modules() if isinstance(part, AdaptedLinear)
    }
    experts = experts_of(block)
    if experts is not None:
        kept[id(experts)] = _InPlaceOfExperts(experts, x[:, :1])
    copied = copy_module(block, kept).to("cpu", torch.float64)
    flat = FlatWeights(copied, torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in flat.parameters:
        size = float(parameter.square().mean().sqrt()) if parameter.ndim >= 2 else 0.0
        wanted = _GAIN * parameter.shape[-1] ** -0.5
        if size:
            parameter.mul_(wanted / size)
            continue
        noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=_NOISE)
        else:
            parameter.copy_(noise * wanted)
    return copied, flat


def _on_cpu(value: Any) -> Any:
    """Tensors on the CPU, those of floating point in float64."""
    if isinstance(value, Tensor):
        return value.to("cpu", torch.float64 if value.is_floating_point() else value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)(_on_cpu(part) for part in value)
    return value
