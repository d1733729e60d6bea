"""Bytes of the tensors that are alive while operations run, whoever allocated them, and the most of them at one time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts each storage that an operation gives while this is entered, until nobody holds it. Not seen: what an operation takes
    and gives back inside of itself, and opaque tensors (packed weights).

    `peaks`: the most that was alive at one time, by `account`, which whoever uses this sets; None: nobody's. `with_apart`: the
    same of times at which a tensor shaped like one of `apart` was alive, itself left out.
    """

    def __init__(self, known: Iterable[Tensor], apart: Iterable[Tensor] = ()) -> None:
        """`known`: not counted, nor are views of them. `apart`: what has their shape, transposed or not, is not counted where an
        account is set: gradients of these."""
        super().__init__()
        self.total = 0
        self.account: int | None = None
        self.peaks: dict[int, int] = {}
        self.with_apart: dict[int, int] = {}
        self._apart, self._apart_alive = {_shape(tensor) for tensor in apart}, 0
        self._numbers = WeakIdKeyDictionary()
        self._next = 0
        for tensor in known:
            self._numbers[tensor.untyped_storage()] = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put.default and self.account is not None:
            func = torch.ops.aten.index_put_.default  # what a backward does by itself, where nobody looks on
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.layout == torch.strided:
                self._count(each)
        if self.account is not None:
            for peaks in (self.peaks, self.with_apart) if self._apart_alive else (self.peaks,):
                peaks[self.account] = max(self.total, peaks.get(self.account, 0))
        return found

    def number(self, tensor: Tensor) -> int | None:
        """Of its storage, which no other one gets; None where it is not counted."""
        found: int = self._numbers.get(tensor.untyped_storage(), -1)
        return None if found < 0 else found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return
        size, apart = storage.nbytes(), self.account is not None and _shape(tensor) in self._apart
        self._numbers[storage] = self._next
        self._next += 1
        self._change(size, apart, 1)
        weakref.finalize(storage, self._change, size, apart, -1)

    def _change(self, size: int, apart: bool, sign: int) -> None:
        if apart:
            self._apart_alive += sign
        else:
            self.total += sign * size


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))
