"""Flat parameters: float32 masters and gradients in one buffer each; the modules hold views or a working copy.

* master dtype: float32, or float64 where the matmul dtype is float64.
* matmul dtype == master dtype: module parameters are views of the master buffer and their `.grad` are views of the
  gradient buffer, so autograd accumulates in place.
* matmul dtype narrower (bfloat16): module parameters are views of one working buffer, refreshed once per version; a hook
  adds each gradient to the float32 buffer as soon as autograd has accumulated it, and frees it. Where other processes read
  the working copy, each refresh may go to another place (`target`).

Parameters lie in registration order, so q/k/v and gate/up are adjacent and can be read as one matrix each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..native import library as native
from .layout import Layout

# Elements converted at a time: 1 MiB of float32 stays in cache.
_BLOCK = 1 << 18


def add_wider_(target: Tensor, source: Tensor) -> None:
    """`target += source` where `source` is narrower. On a CPU torch's mixed addition runs at a fifth of the rate of a
    conversion in cache followed by a plain addition; the two need not have the same shape, only the same contiguous order.
    """
    if target.device.type != "cpu" or target.dtype == source.dtype:
        target.add_(source)
        return
    into, values = target.view(-1), source.contiguous().view(-1)
    if native.takes(values) and target.dtype == torch.float32:
        native.add_widened(into, values)
        return
    scratch = torch.empty(min(_BLOCK, values.numel()), dtype=target.dtype)
    for start in range(0, values.numel(), _BLOCK):
        block = values[start : start + _BLOCK]
        into[start : start + _BLOCK].add_(scratch[: block.numel()].copy_(block))


class FlatWeights:
    """One buffer, in one dtype, that a module reads its weights from. Without gradients: what a LoRA run freezes."""

    grad: Tensor | None = None

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._lay_out(list(module.named_parameters()))
        self.working = torch.zeros(self.size, dtype=dtype, device=self.parameters[0].device)
        self.bound = self.working
        for index, parameter in enumerate(self.parameters):
            self.view(self.working, index).copy_(parameter.data)
            parameter.grad = None
            parameter.data = self.view(self.working, index)
            parameter.requires_grad_(False)

    def _lay_out(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Tied parameters appear once in `named`."""
        layout = Layout.of(named)
        self.parameters = [p for _, p in named]
        self.names, self.shapes, self.offsets = list(layout.names), list(layout.shapes), list(layout.offsets)
        self.numel = sum(p.numel() for p in self.parameters)
        self.size = layout.size  # elements of the buffer, padding included
        self._generation = 0

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """Parameter number `index` as a view of a buffer of this layout."""
        start, shape = self.offsets[index], self.shapes[index]
        return buffer[start : start + torch.Size(shape).numel()].view(shape)

    def stamp(self, places: Iterable[int]) -> tuple[int, int, int]:
        """Changes with everything that changes the parameters at `places` as the modules read them: copies compare it.

        `refresh` and `bind` count; the rest are torch's own counters of writes, so that a hand that writes into a
        parameter is noticed too (a write through `.data` is not). Every product of a decode step asks: were all
        parameters looked at, a step would cost the square of the number of layers.
        """
        writes = 0
        for place in places:
            writes += self.parameters[place]._version
        return self._generation, self.bound._version, writes

    def bind(self, buffer: Tensor) -> None:
        """Let the modules read their weights from `buffer`, laid out and typed like the working copy."""
        for index, parameter in enumerate(self.parameters):
            parameter.data = self.view(buffer, index)
        self.bound = buffer
        self._generation += 1

    def move_to(self, buffer: Tensor) -> None:
        """From now on the modules read `buffer`, of this layout and dtype, where it lies; the storage that they had is let go.
        Errors: ValueError for a buffer of another size, dtype or device."""
        if (buffer.shape, buffer.dtype, buffer.device) != (self.working.shape, self.working.dtype, self.working.device):
            raise ValueError(
                f"the modules read {self.size} x {self.working.dtype} on {self.working.device}; found {tuple(buffer.shape)} x "
                f"{buffer.dtype} on {buffer.device}"
            )
        self.working = buffer
        self.bind(buffer)

    def layout(self) -> Layout:
        """Where each parameter lies, for another process."""
        return Layout(tuple(self.names), tuple(self.shapes), tuple(self.offsets), self.size)

    def layout_digest(self) -> str:
        """As `Layout.digest`, of what the modules read."""
        return self.layout().digest(self.working.dtype)

    def strays(self) -> list[str]:
        """Names of parameters that do not read `working` at their place; all, while another buffer is bound."""
        start, size = self.working.data_ptr(), self.working.element_size()
        if self.bound is not self.working:
            return list(self.names)
        return [
            name
            for name, parameter, offset, shape in zip(
                self.names, self.parameters, self.offsets, self.shapes, strict=True
            )
            if parameter.data_ptr() != start + offset * size
            or parameter.dtype != self.working.dtype
            or parameter.shape != shape
            or not parameter.is_contiguous()
        ]


class FlatParameters(FlatWeights):
    """Owns the storage of a module's trainable parameters. Lives on one device; only its lane may touch it."""

    grad: Tensor
    frozen: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module | Sequence[tuple[str, nn.Parameter]],
        matmul_dtype: torch.dtype,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """`module`, or its parameters by name. `frozen`: names of those that are not trained (frozen.py)."""
        self.frozen = frozen
        self._lay_out(list(module.named_parameters() if isinstance(module, nn.Module) else module))
        size, device = self.size, self.parameters[0].device
        self.master_dtype = torch.float64 if matmul_dtype == torch.float64 else torch.float32
        self.master = torch.zeros(size, dtype=self.master_dtype, device=device)
        self.grad = torch.zeros(size, dtype=self.master_dtype, device=device)
        self.has_working_copy = matmul_dtype != self.master_dtype
        self.working = torch.zeros(size, dtype=matmul_dtype, device=device) if self.has_working_copy else self.master
        # The buffer that the modules read now.
        self.bound = self.working
        # Where the next refresh puts the working copy, and the modules read it from then on. None: memory of its own.
        self.target: Tensor | None = self.working
        self._own: Tensor | None = None
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter.data)
        self.refresh()
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None
            parameter.data = self.view(self.working, index)
            if self.has_working_copy:
                parameter.register_post_accumulate_grad_hook(self._accumulator(index))
            else:
                parameter.grad = self.view(self.grad, index)

    def _accumulator(self, index: int) -> Callable[[Tensor], None]:
        target = self.view(self.grad, index)

        def accumulate(parameter: Tensor) -> None:
            # Its user has added to the buffer itself and reports nothing (head, embedding).
            if parameter.grad is None:
                return
            add_wider_(target, parameter.grad)
            parameter.grad = None

        return accumulate

    def refresh(self) -> None:
        """Master -> working copy. Nothing to do where the modules hold the masters themselves."""
        if self.has_working_copy:
            target = self.target
            if target is None:
                self._own = target = torch.empty_like(self.working) if self._own is None else self._own
            else:
                self._own = None
            target.copy_(self.master)
            if target is not self.working:
                self.move_to(target)
        self._generation += 1

    def zero_grad(self) -> None:
        """Zero the buffer; where the modules hold the masters, bind their `.grad` to it again."""
        self.grad.zero_()
        if not self.has_working_copy:  # somebody may have set .grad to None: bind the views again
            for index, parameter in enumerate(self.parameters):
                parameter.grad = self.view(self.grad, index)
        else:
            for parameter in self.parameters:
                parameter.grad = None

    def zero_frozen(self) -> None:
        """Drop the gradients of frozen weights: layers write them, since q, k and v are one product, whichever is trained."""
        for index, name in enumerate(self.names) if self.frozen else ():
            if name in self.frozen:
                self.view(self.grad, index).zero_()

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the master) for every parameter."""
        for index, name in enumerate(self.names):
            yield name, self.view(self.master, index)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the gradient buffer) for every parameter."""
        for index, name in enumerate(self.names):
            yield name, self.view(self.grad, index)

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """Copy named tensors into the masters and refresh. KeyError names what is missing."""
        missing = [name for name in self.names if name not in state]
        if missing:
            raise KeyError(
                f"state holds no parameter named {missing[:3]} ({len(missing)} missing of {len(self.names)})"
            )
        for name, master in self.named_masters():
            master.copy_(state[name])
        self.refresh()


class ServedParameters(FlatParameters):
    """All weights, in the matmul dtype, that modules only read: their masters lie cut over the ranks, somewhere else.

    Whoever owns those writes new values through `write` and calls `refresh`. There is no gradient.
    """

    grad: Tensor | None = None  # type: ignore[assignment]  # as in FlatWeights; FlatParameters narrows it

    def __init__(self, module: nn.Module, matmul_dtype: torch.dtype) -> None:
        FlatWeights.__init__(self, module, matmul_dtype)
        self.master_dtype = matmul_dtype
        self.master = self.working
        self.has_working_copy = False
        self._index = {name: index for index, name in enumerate(self.names)}

    def named(self, name: str) -> Tensor:
        """The parameter of that name, as the modules read it."""
        return self.view(self.working, self._index[name])

    def move_to(self, buffer: Tensor) -> None:
        super().move_to(buffer)
        self.master = buffer

    def write(self, name: str, values: Tensor) -> None:
        """Overwrite one parameter, cast to the matmul dtype. Call `refresh` after the last one."""
        self.named(name).copy_(values)

    def zero_grad(self) -> None:
        """Nothing: there is no gradient."""
        return None
