"""Linear layers that read the same input, as one product over a packed copy of their weights.

On a CPU a plain `F.linear` reaches half of the GEMM rate for the batches of decoding: the weight is laid out anew in every
call. oneDNN can do that once (`mkldnn._reorder_linear_weight`, what torch's own freezing uses), so the copy is made once per
version of the weights (reordered.py): at their first use, or before it, beside the copy that is in use (`pack_ahead`), so that
nobody waits for it; or somebody else makes it (placed.py): a trainer for itself and all processes that read its weights.
Backward products read the plain weights: their layout suits the GEMM as it is.

The copy must never outlive the weights. `FlatWeights.stamp()` changes with everything that changes them; each product
compares. Where oneDNN is not there, or the dtype is not its own, or a swapped buffer is bound, the plain product runs.

Shape legend: N rows, I input features, O output features of all members together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..native.library import BlockSums
from .flat import FlatWeights, add_wider_
from .placed import Form, Placed, form_of
from .reordered import Reordered, reorder, write_blocks

_ROWS, _COLUMNS = 32, 16  # of each weight: a copy is known by them; a look costs what its cache misses cost


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
        packed = product(x, reorder(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):  # private operators: another torch may lack them
        return False
    return torch.allclose(packed.float(), F.linear(x, weight).float(), rtol=2e-2, atol=2e-1)


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x W' + bias` [N, O] with W packed by `mkldnn._reorder_linear_weight`; no gradient."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _spread(start: int, shape: tuple[int, ...]) -> Tensor:
    """Positions of some rows of a parameter that begins at `start`, and of a few columns in each."""
    rows, width = shape[0], torch.Size(shape[1:]).numel()
    chosen = torch.arange(0, rows, max(rows // _ROWS, 1)) * width
    return (start + chosen[:, None] + torch.arange(min(width, _COLUMNS))).flatten()


class _Ahead(NamedTuple):
    """Copies of what lies in a buffer that is not bound yet."""

    buffer: Tensor
    writes: int  # torch's counter, when they were made
    bias: Tensor | None
    sample: Tensor


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
        self._packed: Tensor | None = None  # what the products read: that of `_copy`, while it is one of the weights
        self._copy: Reordered | None = None
        self._other: Reordered | None = None  # where the next version's is made, while this one is in use
        self._ahead: _Ahead | None = None  # what `_other` is a copy of
        self._placed: Mapping[int, Placed] = {}  # copies that others make, by the address of what they are copies of
        self._written: Placed | None = None  # the one that we made for others last
        self._bias: Tensor | None = None
        self._sample: Tensor | None = None  # of the weights, when the copies were made
        positions = [_spread(flat.offsets[place], flat.shapes[place]) for place in self._copied]
        self._positions = torch.cat(positions).to(flat.bound.device)
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
        if stamp != self._stamp:
            self._renew()
            self._stamp = stamp

    def _renew(self) -> None:
        bound, ahead, self._ahead = self.flat.bound, self._ahead, None
        if self._placed and (placed := self._placed.get(bound.data_ptr())) is not None:
            self._copy = self._other = None
            self._packed, self._sample = placed.tensor, None  # who writes both says which version they are
            self._bias = self._join(bound, self.biases) if self.biases else None
            return
        if ahead is not None and ahead.buffer is bound and ahead.writes == bound._version:
            self._copy, self._other = self._other, self._copy
            assert self._copy is not None
            self._packed, self._bias, self._sample = self._copy.tensor, ahead.bias, ahead.sample
            return
        self._packed = None
        bias = self._join(bound, self.biases) if self.biases else None
        if len(self.biases) > 1 and bias is not None and self._bias is not None:
            self._bias.copy_(bias)  # where it is: a captured graph has its address
        else:
            self._bias = bias
        if self._pack and bound is self.flat.working:
            if self._copy is None:
                self._copy = Reordered(self.weight())
            else:
                self._copy.write(self.weight())
            self._packed = self._copy.tensor
        copied = self._packed is not None or len(self.biases) > 1
        self._sample = self._sampled(bound) if copied else None

    @property
    def origin(self) -> int | None:
        """Where its weights begin in the flat buffer; None: they are no neighbours there."""
        return self.flat.offsets[self.weights[0]] if self._adjacent else None

    def form(self) -> Form | None:
        """How its copy lies; None: it has none, or one that only torch can write."""
        self.renew()
        return None if self._packed is None or self._copy is None else form_of(self._copy, self.weight())

    def place(self, copies: Mapping[int, Placed]) -> None:
        """From now on the copies of what lies in the buffers that begin at these addresses are these, which are made by who writes
        the buffers, before the modules are bound to them."""
        self._placed = copies
        self._packed = self._copy = self._other = self._ahead = self._stamp = None

    def reads(self, placed: Placed) -> bool:
        """Whether the next product reads the copy in that place, of the weights as they are."""
        return self._packed is placed.tensor and self._stamp == self.flat.stamp(self._copied)

    def write_placed(self, placed: Placed, form: Form, into: BlockSums) -> None:
        """Make the copy of the weights, as the modules read them now, in that place, with its checksums; products read it until
        they change. Who calls knows that nobody reads it."""
        self._packed = self._copy = self._other = self._ahead = None  # of its own it has none any more
        bound = self.flat.bound
        write_blocks(self.weight(), placed.tensor, form.blocks, into)
        self._bias = self._join(bound, self.biases) if self.biases else None
        self._packed, self._written, self._sample = placed.tensor, placed, self._sampled(bound)
        self._stamp = self.flat.stamp(self._copied)

    def pack_ahead(self, buffer: Tensor) -> Iterator[None]:
        """Make the copies of what lies in `buffer`, laid out like the flat one, in pieces, beside those that are in use. Once the
        modules are bound to it, and nothing was written into it since, products begin with these. Begun again, or left: no harm."""
        self.renew()  # what was made ahead of the present version may not be in use yet
        self._ahead = None
        if not self._pack or buffer.data_ptr() in self._placed:
            return
        writes, bias = buffer._version, self._join(buffer, self.biases) if self.biases else None
        weight, sample = self._join(buffer, self.weights), self._sampled(buffer)
        if self._other is None:
            self._other = Reordered(weight)
            yield
        else:
            yield from self._other.write_in_pieces(weight)
        self._ahead = _Ahead(buffer, writes, bias, sample)

    def forget_ahead(self) -> None:
        """What `pack_ahead` made is not used."""
        self._ahead = None

    @property
    def pieces_ahead(self) -> int:
        """How many pieces the next `pack_ahead` takes."""
        return 0 if not self._pack or self._placed else 1 if self._other is None else self._other.pieces

    def is_fresh(self) -> bool:
        """Whether the copies, where there are any, were made of the weights as they are: sampled positions, exactly. (A product
        could not tell the weights of one version from those of the next.)"""
        if self._sample is None or self._stamp != self.flat.stamp(self._copied):
            return True  # they are made anew before the next product
        return torch.equal(self._sample, self._sampled(self.flat.bound))

    def _sampled(self, buffer: Tensor) -> Tensor:
        return buffer.index_select(0, self._positions)

    def agrees(self) -> bool:
        """Whether the product is that of the weights as they are: a proof by output, on one row."""
        x = torch.linspace(-1, 2, self.inputs, dtype=self.flat.bound.dtype, device=self.flat.bound.device).unsqueeze(0)
        got, expected = self(x).double(), F.linear(x, self.weight(), self._bias).double()
        tolerance = 2e-2 if x.dtype == torch.bfloat16 else 1e-4
        return bool((got - expected).norm() <= tolerance * expected.norm())

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
