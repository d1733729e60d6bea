"""Elementwise parts of a decoder layer, forward and backward, over blocks of rows that stay in cache.

Results go to preallocated buffers, because the page faults of a fresh buffer of some megabytes cost more than the computation.
Results have the dtype of the inputs; norms and their gradients are computed in float32 or wider. Native kernels (on a CPU, if they
were built) and Triton's kernels (on a GPU) pass over the memory once. On a GPU a norm may be torch's fused operator (`fuses`).

Shape legend: N rows, E hidden size, F size of the MLP, X heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import gpu
from . import library as native

_norm, _norm_backward = torch.ops.aten._fused_rms_norm, torch.ops.aten._fused_rms_norm_backward
_BLOCK_BYTES = 1 << 20  # in one block of the tensor that `blocks` gets

_silu = torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input
_gelu = torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input
# Name -> forward, backward and their options. silu(x) = x sigmoid(x) (Hendrycks and Gimpel, arXiv:1606.08415, section 2).
ACTIVATIONS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "silu": (*_silu, {}),
    "gelu": (*_gelu, {"approximate": "none"}),
    "gelu_tanh": (*_gelu, {"approximate": "tanh"}),
}


class Scratch:
    """Named buffers that later calls use again. They grow if needed. Only the lane (the device's thread) may use them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """A contiguous, uninitialised [rows, columns], valid until the next `take` of this name and of the dtype of `like`."""
        size = rows * columns
        buffer = self._buffers.get((name, like.dtype))
        if buffer is None or buffer.numel() < size or buffer.device != like.device:
            buffer = self._buffers[name, like.dtype] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(rows, columns)

    def buffers(self) -> list[Tensor]:
        """All current buffers, for a caller that must keep their memory alive."""
        return list(self._buffers.values())


def blocks(tensor: Tensor) -> Iterator[slice]:
    """Row ranges of about `_BLOCK_BYTES` each (at least 16 rows) on a CPU; all rows at once elsewhere."""
    rows = tensor.shape[0]
    size = rows
    if tensor.device.type == "cpu":
        size = max(16, _BLOCK_BYTES // max(tensor.shape[1:].numel() * tensor.element_size(), 1))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def fuses(x: Tensor, weight: Tensor, offset: float) -> bool:
    """Whether torch's fused norm is used: on a GPU, for a weight in the dtype of x, without an offset. The fused norm takes no
    offset, and adding the offset to the weight first would round the sum to the dtype of the weight."""
    return x.device.type != "cpu" and not offset and weight.dtype == x.dtype


def _add_offset(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """`offset + weight` in `dtype`, because a sum in bfloat16 would lose small weights. Offset 0: the weight, unconverted."""
    return weight.to(dtype) + offset if offset else weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps): [N, E] -> [N, 1]."""
    result: Tensor = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """x [N, E], weight [E] -> [N, E] = (offset + weight) * x / sqrt(mean(x^2) + eps), in `out` or in a fresh tensor (Zhang and
    Sennrich, arXiv:1910.07467, eq. 4). An offset of 1 is Gemma's. The second result is for `rms_norm_backward`, or None."""
    if native.takes(x, weight, out, size=x.shape[-1]):
        native.rms_norm(x, weight, eps, out, offset)
        return out, None
    if fuses(x, weight, offset):
        fused: tuple[Tensor, Tensor] = _norm(x, [x.shape[-1]], weight, eps)
        return fused
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = _add_offset(weight, offset, dtype)
    for rows in blocks(x):
        values = x[rows].to(dtype)
        scale = _inverse_rms(values, eps)
        if values.dtype == x.dtype:
            torch.mul(values, scale, out=out[rows]).mul_(weight)
        else:
            out[rows].copy_(values.mul_(scale).mul_(weight))
    return out, None


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_weight: Tensor | None, out: Tensor | None = None,
    offset: float = 0.0, *, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Adds the gradient of the input to `out` [N, E], or to new zeros, and returns the sum. Adds the gradient of the weight to
    `grad_weight` [E], float32 or wider, if given. `scale`: the second result of `rms_norm`; None: it is computed again."""
    if fuses(x, weight, offset):
        scale = _norm(x, [x.shape[-1]], weight, eps)[1] if scale is None else scale
        grad_x, new_grad_weight = _norm_backward(grad, x, [x.shape[-1]], scale, weight, [True, grad_weight is not None])
        if grad_weight is not None:
            grad_weight.add_(new_grad_weight)
        return grad_x if out is None else out.add_(grad_x)
    out = torch.zeros_like(x) if out is None else out
    if native.takes(grad, x, weight, out, size=x.shape[-1]):
        native.rms_norm_backward(grad, x, weight, eps, grad_weight, out, offset)
        return out
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros_like(weight, dtype=dtype)
    wide_weight = _add_offset(weight.to(dtype), offset, dtype)
    for rows in blocks(x):
        values = x[rows].to(dtype)
        scale = _inverse_rms(values, eps)
        normed = values * scale
        inner = grad[rows].to(dtype, copy=True)
        if grad_weight is not None:
            total.add_((inner * normed).sum(0))
        inner.mul_(wide_weight)
        mean = torch.linalg.vecdot(inner, normed).div_(x.shape[-1]).unsqueeze(-1)
        out[rows].add_(inner.sub_(normed.mul_(mean)).mul_(scale))
    if grad_weight is not None:
        grad_weight.add_(total)
    return out


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> None:
    """Rotary embedding in place: heads [N, X, D], cos [N, D / 2], sin [2, N, D / 2], where sin[0] is -sin[1]. `inverse` applies the
    transpose (backward).

    Su et al., "RoFormer" (arXiv:2104.09864), in the layout of the two halves: (a, b) -> (a cos - b sin, b cos + a sin).
    """
    half = heads.shape[-1] // 2
    sign = -1.0 if inverse else 1.0
    # Wrong shapes go to torch, which raises an error.
    fits = cos.shape == sin.shape[1:] == (heads.shape[0], half) and cos.is_contiguous() and sin.is_contiguous()
    if fits and heads.stride(1) == heads.shape[-1] and native.takes(heads, cos, sin, size=half):
        native.rotate_(heads, cos, sin[1], sign)
        return
    if fits and gpu.PRESENT and gpu.takes(heads, cos, sin):
        gpu.rotate_(heads, cos, sin[1], sign)
        return
    for rows in blocks(heads):
        halves = heads[rows].unflatten(-1, (2, half))
        swapped = halves.flip(2)
        halves.mul_(cos[rows, None, None]).addcmul_(swapped, sin[:, rows].transpose(0, 1).unsqueeze(1), value=sign)


def gated(gate_up: Tensor, out: Tensor, activation: str) -> Tensor:
    """gate_up [N, 2F] -> out [N, F] = activation(gate) * up (Shazeer, arXiv:2002.05202). `activation`: one of ACTIVATIONS."""
    size = out.shape[1]
    if activation == "silu" and native.takes(gate_up, out, size=size):
        native.swiglu(gate_up, out)
        return out
    if activation == "silu" and gpu.PRESENT and gate_up.is_contiguous() and gpu.takes(gate_up, out):
        gpu.swiglu(gate_up, out)
        return out
    activate, _, options = ACTIVATIONS[activation]
    for rows in blocks(gate_up):
        gate, up = gate_up[rows, :size], gate_up[rows, size:]
        activate(gate, **options, out=out[rows])
        out[rows].mul_(up)
    return out


def gated_backward_(gate_up: Tensor, grad: Tensor, product: Tensor, scratch: Scratch, activation: str) -> None:
    """Overwrites `gate_up` [N, 2F] with its gradient, and `product` [N, F] with the forward's result. `grad` is [N, F]."""
    size = grad.shape[1]
    if activation == "silu" and native.takes(gate_up, grad, product, size=size):
        native.swiglu_backward_(gate_up, grad, product)
        return
    contiguous = gate_up.is_contiguous() and grad.is_contiguous()
    if activation == "silu" and gpu.PRESENT and contiguous and gpu.takes(gate_up, grad, product):
        gpu.swiglu_backward_(gate_up, grad, product)
        return
    activate, activate_backward, options = ACTIVATIONS[activation]
    for rows in blocks(gate_up):
        gate, up, grad_rows = gate_up[rows, :size], gate_up[rows, size:], grad[rows]
        active = scratch.take("active gate", grad_rows.shape[0], size, grad_rows)
        activate(gate, **options, out=active)
        torch.mul(active, up, out=product[rows])
        activate_backward(up.mul_(grad_rows), gate, **options, grad_input=gate)
        torch.mul(active, grad_rows, out=up)
