"""The opt-in second gradient buffer, for a loss with two sums that are divided by different normalisers, in a streamed step.

While a step is streamed, both normalisers are unknown, so the gradients of the two sums stay separate. Modules, head and
optimizer hold views of one flat buffer, so the contents of the two buffers are swapped, not the buffers:

    gradient of `total` adds up in flat.grad        gradient of `extra` adds up in the second buffer
    extra.backward(): swap, backward, swap          finish: flat.grad / N_total + second / N_extra
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.models.parameters.flat import FlatParameters

# Elements that are swapped at a time: 1 MiB of float32 stays in cache.
_BLOCK = 1 << 18


class SecondBuffer:
    """A second buffer with device, dtype and size of the flat gradient."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._buffer = torch.zeros_like(flat.grad)

    def zero_(self) -> None:
        """Zeros the second buffer. To be called before a step, and after an aborted step."""
        self._buffer.zero_()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the block, gradients are added to the second buffer. An error in the block also swaps back."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def join_(self, scale: float) -> None:
        """`flat.grad += scale x second`, for a `flat.grad` that is divided already."""
        self._flat.grad.add_(self._buffer, alpha=scale)

    def _swap(self) -> None:
        first, second = self._flat.grad, self._buffer
        scratch: Tensor = torch.empty(min(_BLOCK, first.numel()), dtype=first.dtype, device=first.device)
        for start in range(0, first.numel(), _BLOCK):
            first_block, second_block = first[start : start + _BLOCK], second[start : start + _BLOCK]
            copy = scratch[: first_block.numel()].copy_(first_block)
            first_block.copy_(second_block)
            second_block.copy_(copy)
