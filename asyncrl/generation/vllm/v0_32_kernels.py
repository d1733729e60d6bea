"""vLLM 0.32, layers that are many small operators on a CPU: one operator each, and no detour on the way to it.

vLLM leaves norms and activations to torch.compile there, and without it each is five to nine operators, in all of which the threads
meet. Its kernels of norms for CPUs take rows that lie one after another (they do not look), of a whole number of vectors. That of
`silu(x) * y` takes twice the time of torch's two operators; ours is one.

Attention is an operator of vLLM's, for who compiles, around a function in Python: the function is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm

from asyncrl.models.native.kernels import swiglu

_VECTOR = 16  # elements; 8 of some kernels divide it


def use_kernels(model: nn.Module) -> None:
    """Of the layers of exactly these classes; what derives from them computes something else."""
    for module in model.modules():
        if type(module) is RMSNorm and module.has_weight and module.variance_size_override is None:
            if module.hidden_size % _VECTOR == 0:
                _run(module, _Norm(module))
        elif type(module) is SiluAndMul:
            _run(module, _silu_and_mul)
        elif type(module) is Attention:
            module.use_direct_call = True  # type: ignore[assignment]  # an attribute of Module: Tensor or Module


def _run(layer: CustomOp, forward: Callable[..., object]) -> None:
    layer._forward_method = forward


class _Norm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; with a residual: of `x + residual`, and that too. In place of
    what is given with a residual, as vLLM's models expect of it."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        norm = self._norm
        weight = norm.weight.data
        plain = not x.is_contiguous() or x.dtype != weight.dtype or x.shape[-1] != norm.hidden_size
        if plain or (residual is not None and not residual.is_contiguous()):
            result: Tensor | tuple[Tensor, Tensor] = norm.forward_native(x, residual)
            return result
        if residual is not None:
            torch.ops._C.fused_add_rms_norm(x, residual, weight, norm.variance_epsilon)
            return x, residual
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, norm.variance_epsilon)
        return out


def _silu_and_mul(x: Tensor) -> Tensor:
    """`silu(x[..., :d]) * x[..., d:]`"""
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    swiglu(x.reshape(-1, 2 * size), out.view(-1, size))
    return out
