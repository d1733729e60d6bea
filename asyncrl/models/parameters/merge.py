"""Merges adapters into weights: `W = W0 + s B A` (lora.py). All processes use this code, so equal processors compute equal bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where an adapted weight and its adapter are. Offsets are in elements, and all fields are of JSON types."""

    shape: Sequence[int]  # [O, I]; experts: [E, O, I], or [E, I, O] if `transposed`
    transposed: bool
    weight: int  # offset in the buffer of all weights
    a: int  # offset of A in the buffer of all adapters
    b: int  # offset of B in the buffer of all adapters


def sizes_of(shape: Sequence[int], transposed: bool) -> tuple[int, int, int]:
    """(E, O, I): experts, output features and input features of a weight."""
    experts, outputs, inputs = (1, *shape)[-3:]
    return (experts, inputs, outputs) if transposed else (experts, outputs, inputs)


def as_stack(weight: Tensor, transposed: bool) -> Tensor:
    """View [E, O, I] of a weight or its gradient."""
    stack = weight.view(-1, *weight.shape[-2:])
    return stack.transpose(1, 2) if transposed else stack


def factors(a: Tensor, b: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Views [E, r, I] and [E, O, r] of A [E r, I] and B [O, r E], which may be flat. `sizes`: (E, O, I)."""
    experts, outputs, inputs = sizes
    return a.view(experts, -1, inputs), b.view(outputs, -1, experts).permute(2, 0, 1)


class Merge:
    """Computes merged weights from adapters and W0 of every adapted weight. Does not change during a run: any thread may use it."""

    def __init__(self, places: Sequence[Place], rank: int, scale: float, weights: Tensor) -> None:
        """`weights`: all weights of the model, unmerged, in one buffer. `scale`: s."""
        self.places, self.rank, self.scale = places, rank, scale
        self.base = [self._part(weights, place).clone() for place in places]

    @classmethod
    def of(cls, description: Mapping[str, Any], weights: Tensor) -> Self:
        """The inverse of `describe`, also after a round trip through JSON."""
        places = [Place(*place) for place in description["places"]]
        return cls(places, description["rank"], description["scale"], weights)

    def describe(self) -> dict[str, Any]:
        """Everything but the weights, in JSON types."""
        return {"places": [[*place] for place in self.places], "rank": self.rank, "scale": self.scale}

    def merge(self, adapters: Tensor, weights: Tensor) -> None:
        """Writes the merged weights into `weights`, computed in the dtype of `adapters`."""
        for place, base in zip(self.places, self.base, strict=True):
            experts, outputs, inputs = sizes = sizes_of(place.shape, place.transposed)
            a = adapters[place.a :][: experts * self.rank * inputs]
            b = adapters[place.b :][: experts * self.rank * outputs]
            a_ErI, b_EOr = factors(a, b, sizes)
            wide_EOI = as_stack(base.view(*place.shape).to(adapters.dtype), place.transposed)
            merged_EOI = torch.baddbmm(wide_EOI, b_EOr, a_ErI, alpha=self.scale)
            as_stack(self._part(weights, place).view(*place.shape), place.transposed).copy_(merged_EOI)

    def unmerged(self, weights: Tensor, start: int, end: int) -> Tensor:
        """A copy of `weights[start:end]` with W0 in place of merged weights."""
        part = weights[start:end].clone()
        for place, base in zip(self.places, self.base, strict=True):
            first, last = max(start, place.weight), min(end, place.weight + base.numel())
            if first < last:
                part[first - start : last - start] = base[first - place.weight : last - place.weight]
        return part

    def _part(self, weights: Tensor, place: Place) -> Tensor:
        """The weight as a flat view."""
        return weights[place.weight :][: torch.Size(place.shape).numel()]
