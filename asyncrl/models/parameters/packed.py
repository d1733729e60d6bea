"""Linear layers that read the same input, as one product over a packed copy of their weights.

On a CPU a plain `F.linear` reaches half of the GEMM rate for the batches of decoding: the weight is laid out anew in every
call. oneDNN can do that once (`mkldnn._reorder_linear_weight`, what torch's own freezing uses), so the copy is made once per
version of the weights, at their first use: the first step with new weights takes that much longer. Backward products read the plain
weights: their layout suits the GEMM as it is.

The copy must never outlive the weights. `FlatWeights.stamp()` changes with everything that changes them; each product
compares. Where oneDNN is not there, or the dtype is not its own, or a swapped buffer is bound, the plain product runs.

Shape legend: N rows, I input features, O output features of all members together.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .flat import FlatWeights, add_wider_

# The layout does not depend on it between 16 and 1,024 rows (measured).
_ROWS_HINT = 64


@cache
def packing_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch packs weights of `dtype` here, tried on a small one."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.linspace(-1, 1, 32 * 64).view(32, 64).to(dtype)
    x = torch.linspace(1, -2, 4 * 64).view(4, 64).to(dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = product(x, pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):  # private operators: another torch may lack them
        return False
    return torch.allclose(packed.float(), F.linear(x, weight).float(), rtol=2e-2, atol=2e-1)


def pack(weight_OI: Tensor) -> Tensor:
    """A fresh copy in the layout of oneDNN's products, opaque."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return found


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x W' + bias` [N, O] with a packed W; no gradient."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


class JoinedLinear:
    """`x @ cat(weights).T + cat(biases)` of linear layers that share their input. Lives on the lane."""

    def __init__(self, flat: FlatWeights, members: list[nn.Linear], index: dict[int, int], pack: bool) -> None:
        """`index`: id of a parameter -> its place in `flat`."""
        self.flat = flat
        self.weights = [index[id(member.weight)] for member in members]
        self.biases = [index[id(member.bias)] for member in members if member.bias is not None]
        self._copied = (*self.weights, *self.biases)
        self.sizes = [member.out_features for member in members]
        self.inputs = members[0].in_features
        self.adapters = [getattr(member, "adapter", None) for member in members]  # lora.Adapter
        self._pack = pack
        self._adjacent = all(
            flat.offsets[a] + flat.shapes[a][0] * flat.shapes[a][1] == flat.offsets[b]
            for a, b in pairwise(self.weights)
        )
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self._stamp: Any = None

    def weight(self) -> Tensor:
        """[O, I] as the modules read it now: a view where the members are neighbours in the flat buffer, else a copy."""
        return self._join(self.flat.bound, self.weights)

    def _join(self, buffer: Tensor, places: list[int]) -> Tensor:
        parts = [self.flat.view(buffer, i) for i in places]
        if len(parts) == 1:
            return parts[0]
        if not self._adjacent or parts[0].ndim < 2:
            return torch.cat(parts)
        start = self.flat.offsets[places[0]]
        return buffer[start : start + sum(self.sizes) * self.inputs].view(-1, self.inputs)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [N, O], a fresh tensor."""
        if self.flat.stamp(self._copied) != self._stamp:  # asked here: a call less for every product
            self.renew()
        if self._packed is None:
            return F.linear(x_NI, self.weight(), self._bias)
        return product(x_NI, self._packed, self._bias)

    def renew(self) -> None:
        """Make the copies, where they are older than the weights, as every product does."""
        stamp = self.flat.stamp(self._copied)
        if stamp == self._stamp:
            return
        # The old one goes first: there is memory for one.
        self._packed = None
        bound = self.flat.bound
        bias = self._join(bound, self.biases) if self.biases else None
        if len(self.biases) > 1 and bias is not None and self._bias is not None:
            self._bias.copy_(bias)  # where it is: a captured graph has its address
        else:
            self._bias = bias
        if self._pack and bound is self.flat.working:
            self._packed = pack(self.weight())
        self._stamp = stamp

    def backward(self, grad_NO: Tensor, x_NI: Tensor, out_NI: Tensor) -> None:
        """Adds the gradients of weights and biases to the flat gradient; `out_NI` becomes that of the input."""
        torch.mm(grad_NO, self.weight(), out=out_NI)
        self.add_gradient(grad_NO, x_NI)

    def add_gradient(self, grad_NO: Tensor, x_NI: Tensor) -> None:
        """Those of weights and biases alone; of frozen ones, those of their adapters."""
        flat = self.flat
        if flat.grad is None:
            for adapter, part in zip(self.adapters, grad_NO.split(self.sizes, 1), strict=True):
                if adapter is not None:
                    adapter.add_gradient(part, x_NI)
            return
        if self._adjacent:
            accumulate(self._join(flat.grad, self.weights), grad_NO, x_NI)
        else:
            for place, part in zip(self.weights, grad_NO.split(self.sizes, 1), strict=True):
                accumulate(flat.view(flat.grad, place), part, x_NI)
        if self.biases:
            total = grad_NO.sum(0, dtype=flat.grad.dtype)
            for place, part in zip(self.biases, total.split(self.sizes), strict=True):
                flat.view(flat.grad, place).add_(part)


def accumulate(buffer_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """`buffer += grad.T @ x`: in place in one dtype, through a product in the narrower one else."""
    if buffer_OI.dtype == x_NI.dtype:
        buffer_OI.addmm_(grad_NO.t(), x_NI)
    else:
        add_wider_(buffer_OI, torch.mm(grad_NO.t(), x_NI))
