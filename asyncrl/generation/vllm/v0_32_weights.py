"""vLLM 0.32, the weights of a model: each version is taken up between two steps.

On a CPU vLLM packs every linear layer for oneDNN and the experts of a layer for a kernel of its own. Linear layers read copies of
ours here, in the same layout (models/parameters/packed.py). Experts are packed by vLLM, one by one.

    a parameter that is read as it is     lies on the board, or has memory of its own, into which its pieces are copied
    one that is only packed               has no plain form beside: whatever wrote into that would change nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from asyncrl.models.parameters.packed import pack as packed_copy
from asyncrl.models.parameters.packed import packing_works, product

from .recording import Recorded
from .v0_32_layers import is_product, kernel_of, linear_layers

_EXPERTS = ("w13_weight", "w2_weight")
_BIASES = ("w13_bias", "w2_bias")
Places = Sequence[tuple[nn.Module, str]]  # that a parameter stands at: modules, and its name in each


class Weights:
    """Of the recorded model. Between two steps."""

    def __init__(
        self,
        model: nn.Module,
        recorded: Mapping[str, Recorded],
        places: Mapping[str, Places],
        dtype: torch.dtype,
        *,
        pack: bool,
    ) -> None:
        """`pack`: linear layers read packed copies, where torch packs this dtype here; else the weights as they lie."""
        linear = linear_layers(model)
        packed: set[tuple[nn.Module, str]] = set()
        if pack and packing_works(dtype, torch.device("cpu")):
            packed = {(module, "weight") for module, is_linear in linear.items() if is_linear}
        experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        packed_experts = {(module, name) for module in experts for name in _EXPERTS}
        self._parameters = {
            name: _Parameter(each, places[name], not packed.union(packed_experts).issuperset(places[name]))
            for name, each in recorded.items()
        }
        source = {place: self._parameters[name] for name, found in places.items() for place in found}
        self._packed: list[_Experts | _Linear] = []
        for module in experts:
            self._packed.append(_Experts(module, [source[module, name] for name in _EXPERTS]))
        for module in linear:
            module.cpu_linear = F.linear  # type: ignore[assignment]  # an attribute of Module: Tensor or Module
            if packed:
                self._packed.append(_Linear(module, source[module, "weight"]))

    @torch.no_grad()
    def read(self, buffer: Tensor) -> None:
        """The model reads the weights in `buffer` from here on."""
        for parameter in self._parameters.values():
            parameter.read(buffer)
        for each in self._packed:
            each.pack()


class _Parameter:
    """`is_read`: somebody reads it as it is; else it is only packed."""

    def __init__(self, recorded: Recorded, places: Places, is_read: bool) -> None:
        self.recorded = recorded
        self.laid_out = torch.empty(0, dtype=recorded.dtype)
        self._places = places
        self._is_read = is_read

    def read(self, buffer: Tensor) -> None:
        view = self.recorded.view(buffer)
        if view is not None:
            self.laid_out = view
        else:
            if not self.laid_out.numel():
                self.laid_out = self.recorded.empty(buffer.device)
            self.recorded.fill(buffer, self.laid_out)
        data = self.laid_out if self._is_read else self.laid_out.new_empty(0)
        for module, name in self._places:
            module._parameters[name].data = data  # type: ignore[union-attr]  # it had one when it was recorded


class _Linear:
    """A linear layer that reads a packed copy."""

    def __init__(self, layer: nn.Module, weight: _Parameter) -> None:
        self._weight = weight
        self._packed: Tensor | None = None
        module: Any = layer  # its attributes are no tensors and modules alone, as the type of Module says
        module.cpu_linear = lambda x, _, bias: self._product(x, bias)
        if is_product(module):  # in the place of four calls, for every product of a step
            if module.return_bias:
                module.forward = lambda x: (self._product(x, module.bias), None)
            else:
                module.forward = lambda x: self._product(x, module.bias)

    def pack(self) -> None:
        self._packed = None  # there is memory for one
        self._packed = packed_copy(self._weight.laid_out)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._packed is not None
        return product(x, self._packed, bias)


class _Experts:
    """The stacked experts of a layer, packed by vLLM's own kernel. It may make them larger."""

    def __init__(self, module: RoutedExperts, weights: Sequence[_Parameter]) -> None:
        self._module, self._weights = module, weights
        self._kernel = kernel_of(module)
        self._memory: dict[str, Tensor] = {}
        self._biases = [name for name in _BIASES if hasattr(module, name)]
        # With biases, which it makes larger too, all at once.
        self._step = weights[0].recorded.shape[0] if self._biases else 1

    def pack(self) -> None:
        whole = dict(zip(_EXPERTS, (each.laid_out for each in self._weights), strict=True))
        whole |= {name: getattr(self._module, name).data for name in self._biases}
        count, memory = self._weights[0].recorded.shape[0], self._memory
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
        for name, packed in memory.items():
            getattr(self._module, name).data = packed
