"""Offsets of parameters in a flat buffer. Two processes that share a buffer must have the same layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

# In elements. Every parameter starts on a cache line, in every dtype of at least one byte.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters in the order of the buffer. Tied parameters have one entry. Offsets and `size` are in elements."""

    names: tuple[str, ...]  # as in transformers; of adapters: as in peft's files
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Parameter]]) -> Self:
        """Places parameters one after another at multiples of `ALIGNMENT`. `named` must list tied parameters once."""
        names, shapes, offsets, size = list[str](), list[tuple[int, ...]](), list[int](), 0
        for name, parameter in named:
            names.append(name)
            shapes.append(tuple(parameter.shape))
            offsets.append(size)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(names), tuple(shapes), tuple(offsets), size)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, also after a round trip through JSON."""
        shapes = tuple(tuple(shape) for shape in message["shapes"])
        return cls(tuple(message["names"]), shapes, tuple(message["offsets"]), int(message["size"]))

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of each parameter in `buffer`, which has this layout."""
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            yield name, buffer[offset : offset + torch.Size(shape).numel()].view(shape)

    def digest(self, dtype: torch.dtype) -> str:
        """A hash of names, shapes, offsets, size and dtype. Processes with equal digests can read each other's buffers."""
        entries = list(zip(self.names, self.shapes, self.offsets, strict=True))
        return hashlib.sha256(repr((dtype, self.size, entries)).encode()).hexdigest()[:32]
