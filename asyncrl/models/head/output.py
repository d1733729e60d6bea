"""What a model does around its head: which product gives its logits, and what becomes of them after it.

    z = h W' + b,   logits = scale z,   or, with a soft cap (Gemma 2, arXiv:2408.00118, section 2),
    logits = softcap tanh(scale z / softcap)

`h` is the decoder's last hidden state. Names in a configuration only propose: `logits_scaling` divides logits in Granite,
multiplies them in HyperCLOVA X and divides the hidden states in MiniCPM3, and a key may be there that nobody reads. So the
model's own forward is asked. It runs once over a few tokens; hooks see what its decoder gave and what its head took and
gave, and put numbers in the place of the head's output that are large enough for any of the proposed transforms to show. What
comes out is what the proposal says, or the model is refused.

Shape legend: L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
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
# Arguments of tanh up to here: beyond it float32 tells caps apart no better.
_WIDEST = 3.0


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """`scale` is above 0; `softcap` too, where there is one."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """In place, in the dtype of `logits`, without a graph."""
        if self.softcap is None:
            return logits if self.scale == 1 else logits.mul_(self.scale)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)

    def derivative_(self, transformed: Tensor) -> Tensor:
        """What `apply_` gave becomes, in place, its derivative: scale (1 - (logits / softcap)^2)."""
        if self.softcap is None:
            return transformed.fill_(self.scale)
        return transformed.div_(self.softcap).square_().neg_().add_(1).mul_(self.scale)


PLAIN_HEAD = HeadTransform()


def head_transform(module: PreTrainedModel) -> HeadTransform:
    """What the own forward of `module` does. Leaves the module in eval mode.
    Errors: ConfigError for a model without decoder or linear head, and for one that does anything else."""
    name = type(module).__name__
    head = linear_head(module)
    found = _watch(module, head, _proposals(module))
    if not (found.decoder and found.inputs) or len(found.inputs) > 1:
        raise ConfigError(
            f"model.path: the forward of {name} calls its head {len(found.inputs)} times and its decoder "
            f"{len(found.decoder)} times; its logits are not those of one product with the last hidden states"
        )
    hidden, given, out = found.decoder[-1], found.inputs[0], found.outputs[0]
    if not (torch.isfinite(given).all() and torch.isfinite(out).all()):
        raise ConfigError(f"model.path: {name} gives logits that are not finite; are its weights?")
    if not _near(out, F.linear(given, head.weight, head.bias)):
        raise ConfigError(f"model.path: the head of {name} ({type(head).__name__}) is no plain linear layer")
    before = [scale for scale in found.scales if _near(given, hidden * scale)]
    if not before or (before[0] != 1 and head.bias is not None):
        raise ConfigError(
            f"model.path: {name} transforms its last hidden states before the head; only a factor that its configuration "
            f"names ({', '.join(SCALES)}) is supported, and that in a model without bias in the head"
        )
    after = [each for each in found.transforms if _near(found.logits, each.apply_(found.planted.double()))]
    if not after:
        said = {key: value for key in (*SCALES, *SOFTCAPS) if (value := _number(module, key)) is not None}
        raise ConfigError(
            f"model.path: {name} transforms its logits after the head, by none of: nothing, a factor, a soft cap of its "
            f"configuration ({said or 'which names none'})"
        )
    return replace(after[0], scale=after[0].scale * before[0])


def linear_head(module: PreTrainedModel) -> nn.Linear:
    """Errors: ConfigError where the model has none."""
    head = module.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"model.path: {type(module).__name__} is not a causal language model with a decoder and a head"
        )
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"model.path: the head of {type(module).__name__} is {type(head).__name__}, no linear layer")
    return head


def decoder_of(module: PreTrainedModel) -> nn.Module:
    """What gives `module` its last hidden states. For Llama 4 and Mllama transformers' own `get_decoder` gives the whole model:
    their `base_model_prefix` names no part of it. Errors: ConfigError where there is no such part."""
    decoder: nn.Module = module.get_decoder()
    if decoder is not module:
        return decoder
    parts = [part for part in module.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ConfigError(
            f"model.path: {type(module).__name__} is not a causal language model with a decoder and a head"
        )
    return parts[0]


@dataclass(slots=True)
class _Found:
    """`planted` went on in the place of the head's output, and `logits` came of it: [1, L, V] each."""

    scales: list[float]
    transforms: list[HeadTransform]
    decoder: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    planted: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def plant(self, output: Tensor) -> Tensor:
        """Numbers of all sizes up to those at which the caps saturate, in the place of `output`."""
        reach = max((t.softcap or 1.0) / min(t.scale, 1.0) for t in self.transforms) * _WIDEST
        generator = torch.Generator().manual_seed(0)
        planted = torch.rand(output.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).pow_(3).mul_(reach)
        self.planted = planted.to(output.device, output.dtype)
        return self.planted.clone()


def _proposals(module: PreTrainedModel) -> _Found:
    """Nothing, and what the configuration may mean. The first that fits is taken."""
    scales = [1.0]
    for value in (_number(module, key) for key in SCALES):
        scales += [] if value is None else [value, 1 / value]
    caps = [None, *(value for key in SOFTCAPS if (value := _number(module, key)) is not None)]
    return _Found(scales, [HeadTransform(scale, cap) for cap in caps for scale in scales])


def _number(module: PreTrainedModel, key: str) -> float | None:
    value = getattr(module.config.get_text_config(), key, None)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    return None


@torch.no_grad()
def _watch(module: PreTrainedModel, head: nn.Linear, found: _Found) -> _Found:
    """One forward of a few tokens with hooks at decoder and head."""
    module.eval()
    embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[assignment]  # a Module, to its annotation
    vocabulary = embedding.weight.shape[0]
    tokens = torch.linspace(min(1, vocabulary - 1), vocabulary - 1, _TOKENS).long()
    arguments: dict[str, Any] = {"input_ids": tokens[None].to(head.weight.device), "use_cache": False}
    if module.config._attn_implementation == IMPLEMENTATION:  # it was a policy's before
        arguments[PLAN_ARGUMENT] = TreePlan([0], [_TOKENS])
    with _hooks(module, head, found):
        try:
            found.logits = module(**arguments).logits
        except Exception as error:  # whatever a model raises that wants to be called otherwise
            raise ConfigError(
                f"model.path: the forward of {type(module).__name__} does not run on {_TOKENS} tokens "
                f"({type(error).__name__}: {error})"
            ) from error
    return found


@contextmanager
def _hooks(module: PreTrainedModel, head: nn.Linear, found: _Found) -> Iterator[None]:
    def at_decoder(part: nn.Module, arguments: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        found.decoder.append(output[0] if hidden is None else hidden)

    def at_head(part: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        found.inputs.append(arguments[0])
        found.outputs.append(output)
        return found.plant(output)

    handles = [decoder_of(module).register_forward_hook(at_decoder), head.register_forward_hook(at_head)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _near(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the rounding of a few operations in the dtype of `found`."""
    if found.shape != expected.shape:
        return False
    tolerance = min(64 * torch.finfo(found.dtype).eps, 0.02)
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())
