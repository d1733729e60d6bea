"""Weights that a run does not train: those that whoever built the model has frozen, and those that no text reaches.

A frozen weight has no gradient, no optimizer state and no part in the gradient's norm, it is not decayed, and it is in every
checkpoint as it was loaded. The gate finds what no text reaches (a vision tower, its projector) by the gradients of the untouched
model; layers are told by their names without their numbers, since it looks at a few of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import nn

from asyncrl.errors import ConfigError

_UNREACHED = "_asyncrl_unreached"


def family(name: str) -> str:
    """The name of a parameter without the numbers of layers and experts."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def unreached_families(gradients: Mapping[str, torch.Tensor | None]) -> frozenset[str]:
    """Those of which no parameter got a gradient: one expert that was not chosen is reached all the same."""
    reached = {family(name) for name, gradient in gradients.items() if gradient is not None}
    return frozenset(map(family, gradients)) - reached


def mark_unreached(module: nn.Module, families: Collection[str]) -> None:
    """From now on `frozen_names` and `unreached_names` of the module, and of its copies, know them."""
    module.__dict__[_UNREACHED] = frozenset(families)


def unreached_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that no text reaches, as far as `mark_unreached` has said."""
    families = module.__dict__.get(_UNREACHED, frozenset())
    return frozenset(name for name, _ in module.named_parameters() if family(name) in families)


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Of the parameters that are not trained. Ask before the module is prepared: that makes all of them trainable, because our
    layers write gradients themselves; those of frozen weights are dropped (`zero_frozen`)."""
    return unreached_names(module) | {name for name, each in module.named_parameters() if not each.requires_grad}


def require_trained(module: nn.Module, frozen: frozenset[str]) -> frozenset[str]:
    """`frozen` as it is. Errors: ConfigError where nothing is left to train."""
    if len(frozen) == len(list(module.named_parameters())):
        raise ConfigError(
            "model.path: every weight of the model is frozen (requires_grad is False): there is nothing to train; leave some of "
            "them trainable, or set model.lora.rank"
        )
    return frozen


def describe_frozen(module: nn.Module, frozen: Collection[str]) -> list[str]:
    """Lines for people on what is not trained, and why."""
    unreached = unreached_names(module)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    lines = []
    for names, why in (
        (unreached, "no text reaches them"),
        (set(frozen) - unreached, "whoever built the model has frozen them"),
    ):
        if names:
            share = sum(sizes[name] for name in names) / sum(sizes.values())
            lines.append(
                f"note: {len(names)} parameters ({share:.1%} of the weights) are not trained: {why}, like {min(names)}"
            )
    return lines
