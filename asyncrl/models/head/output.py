"""Finds how a model computes its logits from its last hidden states `h`: head, scale, soft cap.

    z = h W' + b,   logits = scale z,   or, with a soft cap (Gemma 2, arXiv:2408.00118, section 2),
    logits = softcap tanh(scale z / softcap)

A configuration's keys prove nothing. `logits_scaling` divides the logits in Granite, multiplies the logits in HyperCLOVA X, and
divides the hidden states in MiniCPM3. Other models have such a key and never read it. So the keys give candidates, which one
forward over a few tokens tests. A hook replaces the output of the head by test values, which are large enough to show every
scale and soft cap. The first candidate that explains the logits is used. A model that no candidate explains is refused.

Shape legend: L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

from ..attention.interface import IMPLEMENTATION, PLAN_ARGUMENT
from ..attention.tree import TreePlan

SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_TOKENS = 3
# Largest test value = this * the largest softcap / min(scale, 1). tanh is near 1 there. A larger factor separates caps no better.
_LARGEST_TANH_ARGUMENT = 3.0


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """The scale and the soft cap of logits, both above 0. `softcap` None: no soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Overwrites `logits` with the transformed logits, in the same dtype. Not for autograd."""
        if self.softcap is None:
            return logits if self.scale == 1 else logits.mul_(self.scale)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)

    def derivative_(self, transformed: Tensor) -> Tensor:
        """Overwrites `transformed`, a result of `apply_`, with the derivative scale (1 - (transformed / softcap)^2)."""
        if self.softcap is None:
            return transformed.fill_(self.scale)
        return transformed.div_(self.softcap).square_().neg_().add_(1).mul_(self.scale)


NO_TRANSFORM = HeadTransform()


def head_transform(module: PreTrainedModel, device: torch.device | None = None) -> HeadTransform:
    """The transform that the forward of `module` applies, found in float32 or wider on `device`; None: the device of the weights.
    Leaves the module in eval mode. Errors: ConfigError if the model lacks a decoder or linear head, if its forward fails, or if no
    candidate explains the logits."""
    layers = list(dict.fromkeys(_layers(module)))
    try:
        with _wide_weights(module, device, layers):
            return _find_transform(module)
    except ConfigError:
        if all(parameter.dtype.itemsize >= 4 for parameter in module.parameters()):
            raise
    # A class may read weights of a layer outside of the layer's forward. So the second try widens all weights at once.
    with _wide_weights(module, device, []):
        return _find_transform(module)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists."""
    for part in module.children():
        yield from part if isinstance(part, nn.ModuleList) else _layers(part)


@contextmanager
def _wide_weights(module: nn.Module, device: torch.device | None, layers: list[nn.Module]) -> Iterator[None]:
    """Inside the context, weights are float32 or wider, and on `device`. Weights of `layers` are widened and moved only
    while their layer runs, because all weights in float32 may need too much memory."""
    changed: list[tuple[nn.Parameter, Tensor]] = []  # (parameter, loaded tensor) of the weights changed now

    def widen(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            loaded = parameter.data
            wide = loaded if device is None else loaded.to(device)
            wide = wide.float() if wide.is_floating_point() and wide.dtype.itemsize < 4 else wide
            if wide is not loaded:
                parameter.data = wide
                changed.append((parameter, loaded))

    def restore(first: int) -> None:
        for parameter, loaded in reversed(changed[first:]):
            parameter.data = loaded
        del changed[first:]

    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    widen(parameter for parameter in module.parameters() if id(parameter) not in inside)
    changed_outside = len(changed)
    handles = [layer.register_forward_pre_hook(lambda layer, _: widen(layer.parameters())) for layer in layers]
    handles += [layer.register_forward_hook(lambda *_: restore(changed_outside), always_call=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        restore(0)


def _find_transform(module: PreTrainedModel) -> HeadTransform:
    name = type(module).__name__
    head = linear_head(module)
    trial = _run_trial(module, head)
    if not trial.decoder_outputs or len(trial.head_inputs) != 1:
        raise ConfigError(
            f"model.path: the forward of {name} calls its head {len(trial.head_inputs)} times and its decoder "
            f"{len(trial.decoder_outputs)} times; a supported model calls the head once, after the decoder"
        )
    hidden, head_input, head_output = trial.decoder_outputs[-1], trial.head_inputs[0], trial.head_outputs[0]
    if not (torch.isfinite(head_input).all() and torch.isfinite(head_output).all()):
        raise ConfigError(f"model.path: {name} gives logits that are not finite; check that its weights are finite")
    if not _near(head_output, F.linear(head_input, head.weight, head.bias)):
        raise ConfigError(f"model.path: the head of {name} ({type(head).__name__}) is not a plain linear layer")
    input_scales = [scale for scale in trial.scales if _near(head_input, hidden * scale)]
    # With a bias, a scale before the head is not the same as a scale of the logits.
    if not input_scales or (input_scales[0] != 1 and head.bias is not None):
        raise ConfigError(
            f"model.path: {name} transforms its last hidden states before the head; only a factor is supported: the "
            f"configuration must have it as one of {', '.join(SCALES)}, and the head must have no bias"
        )
    test_values = trial.test_values.double()
    matching = [
        candidate for candidate in trial.transforms if _near(trial.logits, candidate.apply_(test_values.clone()))
    ]
    if not matching:
        keys = {key: value for key in (*SCALES, *SOFTCAPS) if (value := _number(module, key)) is not None}
        raise ConfigError(
            f"model.path: {name} transforms its logits after the head by something other than a factor or a soft cap from its "
            f"configuration ({keys or 'which names none'}); such a model is not supported"
        )
    return replace(matching[0], scale=matching[0].scale * input_scales[0])


def linear_head(module: PreTrainedModel) -> nn.Linear:
    """The head of `module`. Errors: ConfigError if the head is missing or not a linear layer."""
    head = module.get_output_embeddings()
    if head is None:
        raise ConfigError(_no_causal_model(module))
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.path: the head of {type(module).__name__} is {type(head).__name__}, which is not a linear layer"
        )
    return head


def decoder_of(module: PreTrainedModel) -> nn.Module:
    """The part of `module` that computes the last hidden states. Errors: ConfigError if `module` has no such part."""
    decoder: nn.Module = module.get_decoder()
    # `get_decoder` of Llama 4 and Mllama returns the model itself, because their `base_model_prefix` names no part of the model.
    if decoder is not module:
        return decoder
    parts = [part for part in module.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ConfigError(_no_causal_model(module))
    return parts[0]


def _no_causal_model(module: PreTrainedModel) -> str:
    return f"model.path: {type(module).__name__} is not a causal language model with a decoder and a head"


@dataclass(slots=True)
class _Trial:
    """The candidates (no transform; every scale, inverse scale and soft cap in the configuration), and the record of one forward.
    `test_values` replaced the output of the head, and `logits` are the result of the forward: [1, L, V] each."""

    scales: list[float]
    transforms: list[HeadTransform]
    decoder_outputs: list[Tensor] = field(default_factory=list)
    head_inputs: list[Tensor] = field(default_factory=list)
    head_outputs: list[Tensor] = field(default_factory=list)
    test_values: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def make_test_values(self, like: Tensor) -> Tensor:
        """Values of many magnitudes, with the shape, dtype and device of `like`. The largest values saturate the soft caps."""
        largest = max((t.softcap or 1.0) / min(t.scale, 1.0) for t in self.transforms) * _LARGEST_TANH_ARGUMENT
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(like.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).pow_(3).mul_(largest)
        self.test_values = values.to(like.device, like.dtype)
        return self.test_values.clone()  # a copy, because the forward may change the tensor


def _number(module: PreTrainedModel, key: str) -> float | None:
    value = getattr(module.config.get_text_config(), key, None)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    return None


@torch.no_grad()
def _run_trial(module: PreTrainedModel, head: nn.Linear) -> _Trial:
    scales = [1.0]
    for value in (_number(module, key) for key in SCALES):
        if value is not None:
            scales += [value, 1 / value]
    caps = [None, *(value for key in SOFTCAPS if (value := _number(module, key)) is not None)]
    trial = _Trial(scales, [HeadTransform(scale, cap) for cap in caps for scale in scales])

    def at_decoder(part: nn.Module, arguments: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        trial.decoder_outputs.append(output[0] if hidden is None else hidden)

    def at_head(part: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        trial.head_inputs.append(arguments[0])
        trial.head_outputs.append(output)
        return trial.make_test_values(output)

    module.eval()
    embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[assignment]  # annotated as a Module
    vocabulary = embedding.weight.shape[0]
    tokens = torch.linspace(min(1, vocabulary - 1), vocabulary - 1, _TOKENS).long()
    arguments: dict[str, Any] = {"input_ids": tokens[None].to(head.weight.device), "use_cache": False}
    if module.config._attn_implementation == IMPLEMENTATION:  # `prepare` (policy.py) has installed asyncrl's attention
        arguments[PLAN_ARGUMENT] = TreePlan([_TOKENS])
    handles = [decoder_of(module).register_forward_hook(at_decoder), head.register_forward_hook(at_head)]
    try:
        trial.logits = module(**arguments).logits
    except Exception as error:  # a model may raise any exception
        raise ConfigError(
            f"model.path: the forward of {type(module).__name__} does not run on {_TOKENS} tokens alone "
            f"({type(error).__name__}: {error}); choose a model that needs only token ids"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return trial


def _near(actual: Tensor, expected: Tensor) -> bool:
    """Whether the tensors are equal, up to the rounding of a few operations in the dtype of `actual`."""
    if actual.shape != expected.shape:
        return False
    tolerance = min(64 * torch.finfo(actual.dtype).eps, 0.02)
    difference = (actual.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())
