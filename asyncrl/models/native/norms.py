"""RMS normalisation as one autograd node, which saves its input and no copies.

transformers' norm modules compute in float32 even for a float64 model, and autograd saves several copies of their activations.
`replace_norms` changes the class of each module that computes `(offset + weight) * x / sqrt(mean(x^2) + eps)`. The offset is 0, or
1 in Gemma. A module keeps its class if its output for a test input differs from the formula.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .kernels import fuses


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., E], weight [E] -> [..., E] in the dtype of x. All intermediate values are float32 or wider."""
    if fuses(x, weight, offset):
        return F.rms_norm(x, weight.shape, weight, eps)
    result: Tensor = _RMSNorm.apply(x, weight, eps, offset)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        rows_NE = x.reshape(-1, x.shape[-1])
        return kernels.rms_norm(rows_NE, weight, eps, torch.empty_like(rows_NE), offset)[0].view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        total = None
        if ctx.needs_input_grad[1]:
            total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        grad_NE, x_NE = (part.reshape(-1, x.shape[-1]) for part in (grad, x))
        grad_x = kernels.rms_norm_backward(grad_NE, x_NE, weight, ctx.eps, total, offset=ctx.offset)
        return grad_x.view(x.shape), None if total is None else total.to(weight.dtype), None, None


class FusedRMSNorm(nn.Module):
    """The class that `replace_norms` gives to a module of transformers. The module keeps its parameters, name and hooks."""

    weight: Tensor
    eps: float
    offset: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] in the dtype of the input, with gradient."""
        return rms_norm(hidden_states, self.weight, self.eps, self.offset)


def replace_norms(module: nn.Module) -> int:
    """Changes each `*RMSNorm*` module that computes the formula into a `FusedRMSNorm`. Returns the number of changed modules."""
    count = 0
    for part in module.modules():
        eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        if "RMSNorm" not in type(part).__name__ or not isinstance(eps, float) or not _takes_one_tensor(part):
            continue
        for offset in (0.0, 1.0):
            if _computes_rms_norm(part, eps, offset):
                part.__class__ = FusedRMSNorm
                part.eps, part.offset = eps, offset  # type: ignore[assignment]  # now a FusedRMSNorm
                count += 1
                break
    return count


def _takes_one_tensor(part: nn.Module) -> bool:
    """Whether forward has exactly one parameter. Some norms also take a gate or a residual, which may be optional."""
    arguments = list(inspect.signature(part.forward).parameters.values())
    return len(arguments) == 1 and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@torch.no_grad()
def _computes_rms_norm(part: nn.Module, eps: float, offset: float) -> bool:
    """Whether the module has one weight and its output is that of `rms_norm`."""
    weight = getattr(part, "weight", None)
    names = {name for name, _ in part.named_parameters()} | {name for name, _ in part.named_buffers()}
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.device.type == "meta" or names != {"weight"}:
        return False
    # The outputs are compared in float32 or wider, whatever the dtype of the loaded weight.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    # Half of the values are so small that `eps` has an effect.
    x = torch.linspace(-2.0, 3.0, 2 * weight.numel(), dtype=dtype, device=weight.device).view(2, -1)
    x = torch.cat([x, x * eps**0.5])
    # If all weights were equal, two different formulas could give the same output.
    weight = torch.linspace(0.5, 1.5, weight.numel(), dtype=dtype, device=weight.device)
    try:
        out = torch.func.functional_call(part, {"weight": weight}, (x,))
    except Exception:  # unknown modules may raise any exception
        return False
    if not isinstance(out, Tensor) or out.shape != x.shape:
        return False
    return torch.allclose(out, rms_norm(x, weight, eps, offset), rtol=1e-4, atol=1e-5)
