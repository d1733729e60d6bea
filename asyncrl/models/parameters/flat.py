"""Flat parameters: all masters (the weights that the optimizer updates) in one buffer, and all gradients in another.

The master dtype is float32, or float64 if the matmul dtype is float64. The matmul dtype decides what the modules read:
* Equal to the master dtype: parameters are views of the masters, and each `.grad` is a view of the gradient buffer, so autograd
  accumulates in place.
* Narrower (bfloat16): parameters are views of a working copy, which `refresh` writes once per version. A hook adds each gradient
  to the float32 buffer as soon as autograd has computed the gradient, and frees the gradient. If other processes read the working
  copy, `target` can move each refresh to another buffer.

Parameters are in registration order. If no padding separates them, the weights of q, k and v form one matrix, as do gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..native import library as native
from .layout import Layout

# Rows of a block in `add_product_`, where a product is rounded before it is added.
_PRODUCT_ROWS = 4096


def add_widened_(target: Tensor, source: Tensor) -> None:
    """`target += source` for a `source` of the same or a narrower dtype, and of the same shape. `target` is contiguous.

    On a CPU torch's addition of mixed dtypes has a fifth of the rate of the native kernel.
    """
    widens = source.dtype == torch.bfloat16 and target.dtype == torch.float32
    if widens and target.device.type == "cpu" and native.available():
        native.add_widened(target.view(-1), source.contiguous().view(-1))
    else:
        target.add_(source)


def add_product_(target: Tensor, left: Tensor, right: Tensor) -> None:
    """`target [O, I] += left [O, N] @ right [N, I]`, for a contiguous `target` of the factors' dtype or of a wider dtype.

    A GPU adds the unrounded product to a wider target, in one launch. Elsewhere the product is rounded first.
    """
    if target.dtype == right.dtype:
        target.addmm_(left, right)
    elif target.device.type == "cuda":
        torch.addmm(target, left, right, out_dtype=target.dtype, out=target)
    else:
        # In blocks, since the whole product of a large vocabulary can need more memory than is free.
        product = right.new_empty(min(_PRODUCT_ROWS, target.shape[0]), target.shape[1])
        for start in range(0, target.shape[0], _PRODUCT_ROWS):
            part = target[start : start + _PRODUCT_ROWS]
            torch.mm(left[start : start + _PRODUCT_ROWS], right, out=product[: part.shape[0]])
            add_widened_(part, product[: part.shape[0]])


class FlatWeights:
    """Weights without gradients, in one buffer of one dtype, such as the frozen weights of a LoRA run."""

    grad: Tensor | None = None

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """`device`: of the buffer. None: the device of the loaded weights."""
        self._set_layout(list(module.named_parameters()))
        self.working = torch.zeros(self.size, dtype=dtype, device=device or self.parameters[0].device)
        # The buffer that the modules read now.
        self.bound = self.working
        self._take_over(self.working)
        for parameter in self.parameters:
            parameter.grad = None
            parameter.requires_grad_(False)

    def _take_over(self, buffer: Tensor) -> None:
        """Copies each parameter into `buffer` and makes the parameter a view of `buffer`, no longer of the loaded tensor. The cast
        runs on the device of `buffer`: a copy between devices that also casts would cast on the host."""
        for index, parameter in enumerate(self.parameters):
            self.view(buffer, index).copy_(parameter.data.to(buffer.device))
            parameter.data = self.view(buffer, index)

    def _set_layout(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """`named` must list tied parameters once."""
        layout = Layout.of(named)
        self.parameters = [p for _, p in named]
        self.names, self.shapes, self.offsets = list(layout.names), list(layout.shapes), list(layout.offsets)
        self.size = layout.size  # elements of the buffer, padding included
        self._generation = 0

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """Parameter number `index` as a view of a buffer of this layout."""
        start, shape = self.offsets[index], self.shapes[index]
        return buffer[start : start + torch.Size(shape).numel()].view(shape)

    def stamp(self, indices: Iterable[int]) -> tuple[int, int, int]:
        """A value that changes when one of the parameters with these indices may have changed. Owners of copies compare stamps.

        `refresh`, `bind` and writes to a parameter change the stamp. A write through `.data` does not. Every matrix product of a
        decode step calls `stamp` with the indices of its own parameters, since a look at all parameters would be slow.
        """
        writes = 0
        for index in indices:
            writes += self.parameters[index]._version
        return self._generation, self.bound._version, writes

    def bind(self, buffer: Tensor) -> None:
        """Makes the modules read `buffer`, which must have the layout and the dtype of the working copy."""
        for index, parameter in enumerate(self.parameters):
            parameter.data = self.view(buffer, index)
        self.bound = buffer
        self._generation += 1

    def move_to(self, buffer: Tensor) -> None:
        """Makes `buffer` the working copy, without copying. The old working copy is released.

        Errors: ValueError for a buffer of another size, dtype or device."""
        if (buffer.shape, buffer.dtype, buffer.device) != (self.working.shape, self.working.dtype, self.working.device):
            raise ValueError(
                f"the modules read {self.size} x {self.working.dtype} on {self.working.device}; the new buffer must match, but "
                f"is {tuple(buffer.shape)} x {buffer.dtype} on {buffer.device}"
            )
        self.working = buffer
        self.bind(buffer)

    def layout(self) -> Layout:
        """Names, shapes and offsets of the parameters, for another process."""
        return Layout(tuple(self.names), tuple(self.shapes), tuple(self.offsets), self.size)

    def layout_digest(self) -> str:
        """`Layout.digest` for the dtype of the working copy."""
        return self.layout().digest(self.working.dtype)

    def misplaced_parameters(self) -> list[str]:
        """Names of parameters that are not the right view of `working`: all names while another buffer is bound."""
        if self.bound is not self.working:
            return list(self.names)
        misplaced = []
        for (name, view), parameter in zip(self.layout().views(self.working), self.parameters, strict=True):
            expected = view.data_ptr(), view.dtype, view.shape, True
            if (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.is_contiguous()) != expected:
                misplaced.append(name)
        return misplaced


class FlatParameters(FlatWeights):
    """Owns masters, gradients and working copy of trainable parameters. Not thread-safe: only the device's thread may use it."""

    grad: Tensor
    frozen: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module | Sequence[tuple[str, nn.Parameter]],
        matmul_dtype: torch.dtype,
        frozen: frozenset[str] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        """`module`: a module, or (name, parameter) pairs. `frozen`: names of parameters that are not trained. `device`: of the
        buffers. None: the device of the loaded weights."""
        self.frozen = frozen
        self._set_layout(list(module.named_parameters() if isinstance(module, nn.Module) else module))
        size, device = self.size, device or self.parameters[0].device
        self.master_dtype = torch.float64 if matmul_dtype == torch.float64 else torch.float32
        self.master = torch.zeros(size, dtype=self.master_dtype, device=device)
        self.grad = torch.zeros(size, dtype=self.master_dtype, device=device)
        self.has_working_copy = matmul_dtype != self.master_dtype
        self.working = torch.zeros(size, dtype=matmul_dtype, device=device) if self.has_working_copy else self.master
        self.bound = self.working
        # Only with a working copy: the next refresh writes this buffer and makes it the working copy. None: a private buffer.
        self.target: Tensor | None = self.working
        self._private: Tensor | None = None  # the buffer for `target` None, made when first needed
        self._take_over(self.master)
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
            # Head and embedding add to the buffer themselves and return no gradient to autograd.
            if parameter.grad is None:
                return
            add_widened_(target, parameter.grad)
            parameter.grad = None

        return accumulate

    def refresh(self) -> None:
        """Copies the masters to the working copy, if there is one. Changes all stamps (see `stamp`)."""
        if self.has_working_copy:
            target = self.target
            if target is None:
                if self._private is None:
                    self._private = torch.empty_like(self.working)
                target = self._private
            else:
                self._private = None
            target.copy_(self.master)
            if target is not self.working:
                self.move_to(target)
        self._generation += 1

    def zero_grad(self) -> None:
        """Zeros the gradient buffer and resets each parameter's `.grad`, which a user of the module may have changed."""
        self.grad.zero_()
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None if self.has_working_copy else self.view(self.grad, index)

    def zero_frozen(self) -> None:
        """Zeros the gradients of frozen weights. Backward computes these gradients, too."""
        for index, name in enumerate(self.names):
            if name in self.frozen:
                self.view(self.grad, index).zero_()

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the master) for every parameter."""
        return self.layout().views(self.master)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the gradient buffer) for every parameter."""
        return self.layout().views(self.grad)

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """Copies named tensors into the masters and refreshes. Errors: those of `copy_named`."""
        for name, master in self.named_masters():
            copy_named(state, name, master)
        self.refresh()


def copy_named(state: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copies `state[name]`. Errors: KeyError if it is missing or has another shape, to which `copy_` might broadcast."""
    if state[name].shape != target.shape:
        raise KeyError(f"{name} has shape {tuple(state[name].shape)} in the state, not {tuple(target.shape)}")
    target.copy_(state[name])


class ServedParameters(FlatParameters):
    """All weights in the matmul dtype, without gradients, for modules that only read. `master` is `working` here: another object or
    process has the masters. A trainer with sharded masters calls `write` for each weight, and `refresh`. Workers call `move_to`."""

    grad: Tensor | None = None  # type: ignore[assignment]  # FlatParameters narrows it to Tensor

    def __init__(self, module: nn.Module, matmul_dtype: torch.dtype, device: torch.device | None = None) -> None:
        FlatWeights.__init__(self, module, matmul_dtype, device)
        self.master_dtype = matmul_dtype
        self.master = self.working
        self.has_working_copy = False
        self._index = {name: index for index, name in enumerate(self.names)}

    def move_to(self, buffer: Tensor) -> None:
        super().move_to(buffer)
        self.master = buffer

    def write(self, name: str, values: Tensor) -> None:
        """Overwrites one parameter with `values`, cast to the matmul dtype. Call `refresh` after the last `write`."""
        self.view(self.working, self._index[name]).copy_(values)

    def zero_grad(self) -> None:
        """Does nothing, since there is no gradient."""
