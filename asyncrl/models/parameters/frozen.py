"""Weights that a run does not train: weights that are frozen in the loaded model, and weights that no text reaches.

A frozen weight has no optimizer state, no weight decay and no part in the gradient norm, so every checkpoint has its loaded value.
Text does not reach the weights of a vision tower, for example. To find such weights, the gate (runtime/gate.py) looks for weights
without a gradient in a small copy of the model. The copy has only a few layers, so a parameter is identified by its family: its
name without the indices of layers and experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import nn

from asyncrl.errors import ConfigError

_UNREACHED = "_asyncrl_unreached"


def family(name: str) -> str:
    """The name of a parameter, with `*` instead of the indices of layers and experts."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def unreached_families(gradients: Mapping[str, torch.Tensor | None]) -> frozenset[str]:
    """The families in which no parameter has a gradient. A family of experts is reached if a token was routed to any expert."""
    reached = {family(name) for name, gradient in gradients.items() if gradient is not None}
    return frozenset(map(family, gradients)) - reached


def mark_unreached(module: nn.Module, families: Collection[str]) -> None:
    """Stores the unreached families in the module, for `unreached_names` and `frozen_names`. Copies of the module have them too."""
    module.__dict__[_UNREACHED] = frozenset(families)


def unreached_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that `mark_unreached` marked."""
    families = module.__dict__.get(_UNREACHED, frozenset())
    return frozenset(name for name, _ in module.named_parameters() if family(name) in families)


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that are not trained. Call this before `prepare`, which sets `requires_grad` of all parameters."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return unreached_names(module) | frozen


def require_trained(module: nn.Module, frozen: frozenset[str]) -> frozenset[str]:
    """Returns `frozen`. Errors: ConfigError if every parameter of the module is frozen."""
    if len(frozen) == len(list(module.named_parameters())):
        raise ConfigError(
            "model.path: every weight of the model is frozen (requires_grad is False, or no text reaches it), so there is nothing "
            "to train; leave some weights trainable, or set model.lora.rank"
        )
    return frozen


def describe_frozen(module: nn.Module, frozen: Collection[str]) -> list[str]:
    """A line for the user on the unreached weights, and a line on the other frozen weights, each only if there are any."""
    unreached = unreached_names(module)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    lines = []
    reasons = {"no text reaches them": unreached, "the loaded model has them frozen": set(frozen) - unreached}
    for reason, names in reasons.items():
        if names:
            share = sum(sizes[name] for name in names) / sum(sizes.values())
            lines.append(
                f"note: {len(names)} parameters ({share:.1%} of the weights) are not trained: {reason}, like {min(names)}"
            )
    return lines
