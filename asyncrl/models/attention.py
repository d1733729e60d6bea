"""Our attention, registered through transformers' own interface.

A forward of the model carries an `AttentionPlan` in its keyword arguments; every attention layer hands its rotated
queries, keys and values to `plan.attend(...)`. The plan knows the layout (a packed prefix tree, a decode batch over a
cache); the model code knows none of it. So any architecture that uses transformers' attention interface is served.

Shape legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

IMPLEMENTATION = "asyncrl"
PLAN_ARGUMENT = "attention_plan"


class AttentionPlan(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] (rotary applied) -> [T, H, D]. Differentiable where asked."""
        ...


def _attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    plan: AttentionPlan = kwargs[PLAN_ARGUMENT]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
    )
    return out.unsqueeze(0), None  # [1, T, H, D]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan masks by itself; without this transformers would build a [T, T] mask."""
    return None


def register() -> None:
    """Idempotent; called when a policy model is loaded."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
