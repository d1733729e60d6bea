"""Linear layers that read the same input, as one product over a packed copy of their weights (in oneDNN's own layout).

On a CPU, `F.linear` reaches half of the GEMM rate for batches of decoding, because every call reorders the weight. So the first
product with new weights makes a packed copy by oneDNN. Backward products read the original weights, whose layout suits them.

An old copy would give wrong results, so every product compares the copy's stamp with `FlatWeights.stamp()`. `F.linear` is used if
oneDNN is missing or does not pack the dtype, and while the modules read another buffer than `flat.working`.

Shape legend: N rows, I input features, O output features of all members together.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .flat import FlatWeights, add_product_

# Rows that `pack` tells oneDNN to expect. oneDNN chooses the same layout for any number from 16 to 1,024 (measured).
_ROWS_HINT = 64


@cache
def packing_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch can pack weights of `dtype` on `device`. Packs a small weight to find out."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.linspace(-1, 1, 32 * 64).view(32, 64).to(dtype)
    x = torch.linspace(1, -2, 4 * 64).view(4, 64).to(dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        out = product(x, pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):  # private operators may be missing
        return False
    return torch.allclose(out.float(), F.linear(x, weight).float(), rtol=2e-2, atol=2e-1)


def pack(weight_OI: Tensor) -> Tensor:
    """A copy of the weight in the layout of oneDNN's products. Only `product` can read the copy."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x W' + bias` [N, O] for x [N, I] and `packed`, the result of `pack(W)`. Has no gradient."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


class JoinedLinear:
    """`x @ cat(weights).T + cat(biases)` of linear layers that share their input. Use it only on the lane (the device's thread)."""

    def __init__(self, flat: FlatWeights, members: list[nn.Linear], index: dict[int, int], pack: bool) -> None:
        """`index`: id of a parameter -> the parameter's index in `flat`. `pack`: whether to use packed copies."""
        self.flat = flat
        self.weight_indices = [index[id(member.weight)] for member in members]
        self.bias_indices = [index[id(member.bias)] for member in members if member.bias is not None]
        self._indices = (*self.weight_indices, *self.bias_indices)
        self.sizes = [member.out_features for member in members]
        self.inputs = members[0].in_features
        self.adapters = [getattr(member, "adapter", None) for member in members]  # lora.Adapter or None
        self._pack = pack
        pairs = pairwise(self.weight_indices)
        self._adjacent = all(
            flat.offsets[a] + flat.shapes[a][0] * flat.shapes[a][1] == flat.offsets[b] for a, b in pairs
        )
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self._stamp: Any = None

    def weight(self) -> Tensor:
        """The current weights [O, I]: a view if the members are adjacent in the flat buffer, a copy if they are not."""
        return self._join(self.flat.bound, self.weight_indices)

    def _join(self, buffer: Tensor, indices: list[int]) -> Tensor:
        parts = [self.flat.view(buffer, i) for i in indices]
        if len(parts) == 1:
            return parts[0]
        # `_adjacent` says nothing about the biases, which have one dimension.
        if not self._adjacent or parts[0].ndim < 2:
            return torch.cat(parts)
        start = self.flat.offsets[indices[0]]
        return buffer[start : start + sum(self.sizes) * self.inputs].view(-1, self.inputs)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [N, O], a new tensor."""
        # `renew` makes the same comparison. This comparison is faster than a call of `renew` for every product.
        if self.flat.stamp(self._indices) != self._stamp:
            self.renew()
        if self._packed is None:
            return F.linear(x_NI, self.weight(), self._bias)
        return product(x_NI, self._packed, self._bias)

    def renew(self) -> None:
        """Packs the weights and joins the biases again, if the stamp shows that they may have changed."""
        stamp = self.flat.stamp(self._indices)
        if stamp == self._stamp:
            return
        # Frees the old copy first: the memory may not suffice for two copies.
        self._packed = None
        buffer = self.flat.bound  # the buffer that the modules read
        bias = self._join(buffer, self.bias_indices) if self.bias_indices else None
        if len(self.bias_indices) > 1 and bias is not None and self._bias is not None:
            # A captured CUDA graph reads the joined biases at this address, so they must not move.
            self._bias.copy_(bias)
        else:
            self._bias = bias
        if self._pack and buffer is self.flat.working:
            self._packed = pack(self.weight())
        self._stamp = stamp

    def backward(self, grad_NO: Tensor, x_NI: Tensor, out_NI: Tensor) -> None:
        """Writes the gradient of the input to `out_NI`, and calls `add_gradient`."""
        torch.mm(grad_NO, self.weight(), out=out_NI)
        self.add_gradient(grad_NO, x_NI)

    def add_gradient(self, grad_NO: Tensor, x_NI: Tensor) -> None:
        """Adds the gradients of weights and biases to the flat gradient. Without a flat gradient (LoRA): those of the adapters."""
        flat = self.flat
        if flat.grad is None:
            for adapter, part in zip(self.adapters, grad_NO.split(self.sizes, 1), strict=True):
                if adapter is not None:
                    adapter.add_gradient(part, x_NI)
            return
        if self._adjacent:
            add_product_(self._join(flat.grad, self.weight_indices), grad_NO.t(), x_NI)
        else:
            for i, part in zip(self.weight_indices, grad_NO.split(self.sizes, 1), strict=True):
                add_product_(flat.view(flat.grad, i), part.t(), x_NI)
        if self.bias_indices:
            total = grad_NO.sum(0, dtype=flat.grad.dtype)
            for i, part in zip(self.bias_indices, total.split(self.sizes), strict=True):
                flat.view(flat.grad, i).add_(part)
