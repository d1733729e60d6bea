"""The opt-in second gradient buffer: terms of one loss that are divided by different numbers, in a streamed step.

While a step streams in, neither number is known, so the gradients of the two sums must not be mixed. Modules, head and
optimizer all hold views of one flat buffer; so the contents change places, not the buffers:

    gradient of `total` adds up in flat.grad        gradient of `extra` adds up in the second buffer
    extra.backward(): swap, backward, swap          finish: flat.grad / N_total + second / N_extra
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.models.parameters.flat import FlatParameters

# Elements that change places at a time: 1 MiB of float32 stays in cache.
_BLOCK = 1 << 18


class SecondBuffer:
    """Lives on the device of the flat gradient, in its dtype and of its size."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._buffer = torch.zeros_like(flat.grad)

    def zero_(self) -> None:
        """Zero the gradients: before a step, and after it was aborted."""
        self._buffer.zero_()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block gradients add to the second buffer. Swapped back whatever happens."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def join_(self, scale: float) -> None:
        """`flat.grad += scale x second`."""
        self._flat.grad.add_(self._buffer, alpha=scale)

    def _swap(self) -> None:
        first, second = self._flat.grad, self._buffer
        scratch: Tensor = torch.empty(min(_BLOCK, first.numel()), dtype=first.dtype, device=first.device)
        for start in range(0, first.numel(), _BLOCK):
            one, two = first[start : start + _BLOCK], second[start : start + _BLOCK]
            held = scratch[: one.numel()].copy_(one)
            one.copy_(two)
            two.copy_(held)
