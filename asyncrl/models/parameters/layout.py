"""Where each parameter lies in a flat buffer: what two processes have to agree on before one reads what the other writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

# Elements: every parameter starts on a cache line in every dtype.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters by transformers' names, in the order of the buffer; tied ones once. Offsets and `size` in elements."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Parameter]]) -> Self:
        """One after the other, each from a multiple of `ALIGNMENT` on. Tied parameters appear once in `named`."""
        names, shapes, offsets, size = list[str](), list[tuple[int, ...]](), list[int](), 0
        for name, parameter in named:
            names.append(name)
            shapes.append(tuple(parameter.shape))
            offsets.append(size)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(names), tuple(shapes), tuple(offsets), size)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """What `dataclasses.asdict` and JSON made of one."""
        shapes = tuple(tuple(shape) for shape in message["shapes"])
        return cls(tuple(message["names"]), shapes, tuple(message["offsets"]), int(message["size"]))

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, parameter) for each, views of a buffer of this layout."""
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            yield name, buffer[offset : offset + torch.Size(shape).numel()].view(shape)

    def digest(self, dtype: torch.dtype) -> str:
        """Of names, shapes, places and dtype: two processes with the same one may read each other's buffers."""
        places = list(zip(self.names, self.shapes, self.offsets, strict=True))
        return hashlib.sha256(repr((dtype, self.size, places)).encode()).hexdigest()[:32]
