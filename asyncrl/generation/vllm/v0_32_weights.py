"""vLLM 0.32, the weights of a model: each version is laid out beside the one in use, in pieces between steps, and taken up at once.

On a CPU vLLM packs every linear layer for oneDNN and the experts of a layer for a kernel of its own, whole and into fresh memory: a
head alone is a tenth of a second in which nobody is served. So linear layers read copies of ours here, in the same layout: those of
the trainer, which packs the same matrices for itself (weights/copies.py), and where it has none of a layer, copies that are written
in place and a little at a time (models/parameters/reordered.py). Experts are packed by vLLM, one by one.

    a parameter that is read as it is     lies on the board, or has memory of its own, into which its pieces are copied
    one that is only packed               has no plain form beside: whatever wrote into that would change nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from asyncrl.models.parameters.packed import packing_works, product
from asyncrl.models.parameters.placed import Placed
from asyncrl.models.parameters.reordered import Reordered

from .recording import Recorded
from .v0_32_layers import is_product, kernel_of, linear_layers

_EXPERTS = ("w13_weight", "w2_weight")
_BIASES = ("w13_bias", "w2_bias")
Places = Sequence[tuple[nn.Module, str]]  # that a parameter stands at: modules, and its name in each
CopiesOf = Mapping[int, Mapping[int, Placed]]  # address of a buffer -> copies, by where in it their weight begins


class Weights:
    """Of the recorded model. Between two steps. The memory of a version, or of two where they are laid out ahead."""

    def __init__(
        self,
        model: nn.Module,
        recorded: Mapping[str, Recorded],
        places: Mapping[str, Places],
        dtype: torch.dtype,
        *,
        pack: bool,
        ahead: bool,
        copies: CopiesOf,
    ) -> None:
        """`pack`: linear layers read packed copies, where torch packs this dtype here; else the weights as they lie. `ahead`: what
        is in use stays as it is while the next version is laid out. `copies`: those that others make."""
        linear = linear_layers(model)
        packed: set[tuple[nn.Module, str]] = set()
        if pack and packing_works(dtype, torch.device("cpu")):
            packed = {(module, "weight") for module, is_linear in linear.items() if is_linear}
        experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        packed_experts = {(module, name) for module in experts for name in _EXPERTS}
        self._parameters = {
            name: _Parameter(each, places[name], not packed.union(packed_experts).issuperset(places[name]), ahead)
            for name, each in recorded.items()
        }
        source = {place: self._parameters[name] for name, found in places.items() for place in found}
        self._experts = [_Experts(module, [source[module, name] for name in _EXPERTS], ahead) for module in experts]
        self._linear: list[_Linear] = []
        if packed:
            self._linear = [_Linear(module, source[module, "weight"], ahead) for module in linear]
        self._packed: list[_Experts | _Linear] = [*self._experts, *self._linear]
        self._copies = copies  # their memory lasts as long as this does
        for module in linear:
            module.cpu_linear = F.linear  # type: ignore[assignment]  # an attribute of Module: Tensor or Module

    @property
    def pieces(self) -> int:
        """About how many the next `lay_out` takes."""
        copies = sum(each.recorded.copies for each in self._parameters.values())
        return 1 + copies + sum(each.pieces for each in self._packed)

    @torch.no_grad()
    def lay_out(self, buffer: Tensor) -> Iterator[None]:
        """What `take_up` takes up, made of the weights in `buffer`, in pieces. Begun again, or left: no harm, if ahead; else the
        model may not run until it has come to its end."""
        for parameter in self._parameters.values():
            yield from parameter.lay_out(buffer)
        yield
        for experts in self._experts:
            yield from experts.lay_out()
        copies = self._copies.get(buffer.data_ptr(), {})
        for linear in self._linear:
            yield from linear.lay_out(copies)

    def take_up(self) -> None:
        """The model reads what `lay_out` has made, to its end, from here on."""
        for parameter in self._parameters.values():
            parameter.take_up()
        for each in self._packed:
            each.take_up()


class _Parameter:
    """`is_read`: somebody reads it as it is; else it is only packed."""

    def __init__(self, recorded: Recorded, places: Places, is_read: bool, ahead: bool) -> None:
        self.recorded = recorded
        self.laid_out = torch.empty(0, dtype=recorded.dtype)
        self._places = places
        self._is_read = is_read
        self._count = 2 if ahead and is_read else 1
        self._memory: list[Tensor] = []  # of its own; the last one is written next

    def lay_out(self, buffer: Tensor) -> Iterator[None]:
        view = self.recorded.view(buffer)
        if view is not None:
            self.laid_out = view
            return
        while len(self._memory) < self._count:
            self._memory.append(self.recorded.empty(buffer.device))
        self.laid_out = self._memory[-1]
        yield from self.recorded.fill(buffer, self.laid_out)

    def take_up(self) -> None:
        data = self.laid_out if self._is_read else self.laid_out.new_empty(0)
        for module, name in self._places:
            module._parameters[name].data = data  # type: ignore[union-attr]  # it had one when it was recorded
        self._memory.reverse()


class _Linear:
    """A linear layer that reads a packed copy."""

    def __init__(self, module: nn.Module, weight: _Parameter, ahead: bool) -> None:
        self._module: Any = module  # its attributes are no tensors and modules alone, as the type of Module says
        self._weight = weight
        self._count = 2 if ahead else 1
        self._copies: list[Reordered] = []  # of its own; the last one is written next
        self._placed: Placed | None = None  # what is taken up in the place of that
        self._is_product = is_product(module)

    @property
    def pieces(self) -> int:
        """Those of its own copies: it has none where it takes up others', from the first time on."""
        return self._copies[-1].pieces if self._copies else 0 if self._placed else self._count

    def lay_out(self, copies: Mapping[int, Placed]) -> Iterator[None]:
        weight, origin = self._weight.laid_out, self._weight.recorded.alias
        placed = None if origin is None else copies.get(origin)
        if placed is not None and placed.tensor.shape == weight.shape:
            self._placed, self._copies = placed, []
            return
        self._placed = None
        if self._copies:
            yield from self._copies[-1].write_in_pieces(weight)
            return
        for _ in range(self._count):  # nobody is served yet: no later version has to allocate
            self._copies.append(Reordered(weight))
            yield

    def take_up(self) -> None:
        packed = self._copies[-1].tensor if self._placed is None else self._placed.tensor
        module = self._module

        def linear(x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
            return product(x, packed, bias)

        module.cpu_linear = linear
        if self._is_product:  # in the place of four calls, for every product of a step
            bias = module.bias
            if module.return_bias:
                module.forward = lambda x: (product(x, packed, bias), None)
            else:
                module.forward = lambda x: product(x, packed, bias)
        self._copies.reverse()


class _Experts:
    """The stacked experts of a layer, packed by vLLM's own kernel. It may make them larger."""

    def __init__(self, module: RoutedExperts, weights: Sequence[_Parameter], ahead: bool) -> None:
        self._module, self._weights = module, weights
        self._kernel = kernel_of(module)
        self._memory: list[dict[str, Tensor]] = [{} for _ in range(2 if ahead else 1)]  # the last one is written next
        self._biases = [name for name in _BIASES if hasattr(module, name)]
        # With biases, which it makes larger too, all at once.
        self._step = weights[0].recorded.shape[0] if self._biases else 1

    @property
    def pieces(self) -> int:
        return -(-self._weights[0].recorded.shape[0] // self._step)

    def lay_out(self) -> Iterator[None]:
        whole = dict(zip(_EXPERTS, (each.laid_out for each in self._weights), strict=True))
        whole |= {name: getattr(self._module, name).data for name in self._biases}
        count, memory = self._weights[0].recorded.shape[0], self._memory[-1]
        for first in range(0, count, self._step):
            part: Any = nn.Module()
            for name, stacked in whole.items():
                own = stacked[first : first + self._step]
                part.register_parameter(name, nn.Parameter(own, requires_grad=False))
            self._kernel.process_weights_after_loading(part)
            for name in whole:
                made = getattr(part, name).data
                if name not in memory:
                    memory[name] = made.new_empty((count, *made.shape[1:]))
                memory[name][first : first + self._step].copy_(made)
            yield

    def take_up(self) -> None:
        for name, packed in self._memory[-1].items():
            getattr(self._module, name).data = packed
        self._memory.reverse()
