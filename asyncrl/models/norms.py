"""RMS normalisation as one autograd node that keeps its input and one number a row.

transformers' own modules compute it in float32 even for a float64 model (which would spoil every exactness test) and let
autograd keep several copies of the activations. `replace_norms` swaps the class of each module that provably computes
`weight * x / sqrt(mean(x^2) + eps)`, whatever its architecture; others stay as they are.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), eq. 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E], weight [E] -> [..., E] in the dtype of x; computed in float32 or wider."""
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(_wide(x.dtype))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = wide * weight
        mean = torch.linalg.vecdot(inner, normed).div_(x.shape[-1]).unsqueeze(-1)
        return inner.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), grad_weight, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class FusedRMSNorm(nn.Module):
    """Takes the place of a module's class, not of the module: parameters, names and hooks stay where they are."""

    weight: Tensor
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


def replace_norms(module: nn.Module) -> int:
    """Swap every RMS norm inside that is a plain one; returns how many. Call while the weights are float32 or wider."""
    count = 0
    for part in module.modules():
        eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        if "RMSNorm" in type(part).__name__ and isinstance(eps, float) and _is_plain(part, eps):
            part.__class__ = FusedRMSNorm
            part.eps = eps  # type: ignore[assignment]
            count += 1
    return count


@torch.no_grad()
def _is_plain(part: nn.Module, eps: float) -> bool:
    """Compare with what the module itself computes: some architectures scale by `1 + weight`, or not at all."""
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.device.type == "meta":
        return False
    x = torch.linspace(-2.0, 3.0, 2 * weight.numel(), dtype=weight.dtype, device=weight.device).view(2, -1)
    return torch.allclose(part(x), rms_norm(x, weight, eps), rtol=1e-4, atol=1e-5)
