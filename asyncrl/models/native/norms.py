"""RMS normalisation as one autograd node that keeps its input and one number a row.

transformers' own modules compute it in float32 even for a float64 model (which would spoil every exactness test) and let
autograd keep several copies of the activations. `replace_norms` swaps the class of each module that provably computes
`(offset + weight) * x / sqrt(mean(x^2) + eps)` with an offset of 0, or of 1 as Gemma's have it; others stay as they are.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), eq. 4.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., E], weight [E] -> [..., E] in the dtype of x; computed in float32 or wider, `offset + weight` too."""
    if fuses(x, weight, offset):
        return F.rms_norm(x, weight.shape, weight, eps)
    result: Tensor = _RMSNorm.apply(x, weight, eps, offset)
    return result


def fuses(x: Tensor, weight: Tensor, offset: float) -> bool:
    """Whether torch's fused norm computes this: on a GPU, with a weight in the dtype of x. It adds no offset, and a sum made before
    would be rounded (`shifted`)."""
    return x.device.type != "cpu" and not offset and weight.dtype == x.dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        wide = x.to(_wide(x.dtype))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        out: Tensor = (wide * scale).mul_(shifted(weight, offset, wide.dtype)).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = wide * shifted(weight, ctx.offset, wide.dtype)
        mean = torch.linalg.vecdot(inner, normed).div_(x.shape[-1]).unsqueeze(-1)
        return inner.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), grad_weight, None, None


def shifted(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """`offset + weight` in `dtype`: in bfloat16 a small weight would be lost in the sum. Without an offset, the weight itself."""
    return weight.to(dtype) + offset if offset else weight


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class FusedRMSNorm(nn.Module):
    """Takes the place of a module's class, not of the module: parameters, names and hooks stay where they are."""

    weight: Tensor
    eps: float
    offset: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] in the dtype of the input, with gradient."""
        return rms_norm(hidden_states, self.weight, self.eps, self.offset)


def replace_norms(module: nn.Module) -> int:
    """Swap every RMS norm inside that is a plain one; returns how many. Call while the weights are float32 or wider."""
    count = 0
    for part in module.modules():
        eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        if "RMSNorm" not in type(part).__name__ or not isinstance(eps, float) or not _takes_one_tensor(part):
            continue
        for offset in (0.0, 1.0):
            if _computes(part, eps, offset):
                part.__class__ = FusedRMSNorm
                part.eps, part.offset = eps, offset  # type: ignore[assignment]  # its class was changed in the line above
                count += 1
                break
    return count


def _takes_one_tensor(part: nn.Module) -> bool:
    """Norms with a gate or a residual beside their input have more arguments, optional ones too: they are never called."""
    arguments = list(inspect.signature(part.forward).parameters.values())
    return len(arguments) == 1 and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@torch.no_grad()
def _computes(part: nn.Module, eps: float, offset: float) -> bool:
    """Compare with what the module itself gives, for values of about 1 and for some so small that `eps` shows.

    The weights of the comparison differ from each other: with equal ones two formulas that differ would give the same.
    """
    weight = getattr(part, "weight", None)
    own = {name for name, _ in part.named_parameters()} | {name for name, _ in part.named_buffers()}
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.device.type == "meta" or own != {"weight"}:
        return False
    x = torch.linspace(-2.0, 3.0, 2 * weight.numel(), dtype=weight.dtype, device=weight.device).view(2, -1)
    x = torch.cat([x, x * eps**0.5])
    weight = torch.linspace(0.5, 1.5, weight.numel(), dtype=weight.dtype, device=weight.device)
    try:
        found = torch.func.functional_call(part, {"weight": weight}, (x,))
    except Exception:
        # Somebody else's module, called outside of its model: whatever it raises, it is not a plain one.
        return False
    return (
        isinstance(found, Tensor)
        and found.shape == x.shape
        and torch.allclose(found, rms_norm(x, weight, eps, offset), rtol=1e-4, atol=1e-5)
    )
