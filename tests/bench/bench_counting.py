"""Counting work instead of timing it: FLOP of matrix products, bytes copied, fresh storage, calls of Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::index_select", "aten::repeat"}


@dataclass(slots=True)
class Work:
    product_flop: float = 0.0  # products of a matrix of rows with a weight, forward and backward; attention is not here
    copied_bytes: int = 0
    allocations: int = 0  # results that lie in storage of their own
    allocated_bytes: int = 0


class Counting(TorchDispatchMode):
    """`with Counting() as counting: ...; counting.work`. Sees every operator that this thread runs, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage(tensor) for tensor in tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.work.product_flop += product_flop(name, args, result)
        for tensor in tensors(result):
            size = tensor.numel() * tensor.element_size()
            if name in _COPIES:
                self.work.copied_bytes += size
            if size and storage(tensor) not in before:
                self.work.allocations += 1
                self.work.allocated_bytes += size
        return result


def product_flop(name: str, args: Any, result: Any) -> float:
    """2 per multiply-add. Batched products are attention's (or a row sum's) and count nothing."""
    if name in ("aten::mm", "aten::linear", "mkldnn::_linear_pointwise", "mkl::_mkl_linear"):
        return float(2 * result.numel() * args[0].shape[-1])
    if name in ("aten::addmm", "aten::addmm_"):
        return float(2 * result.numel() * args[1].shape[-1])
    return 0.0


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):  # not a storage: that one would be gone through byte by byte
        for item in value:
            yield from tensors(item)


def storage(tensor: Tensor) -> int:
    """What tells two storages apart; a packed weight has none that could be asked for, and is its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def count(call: Callable[[], object]) -> Work:
    with Counting() as counting:
        call()
    return counting.work


def python_calls(call: Callable[[], object]) -> int:
    """Calls of Python functions (not of built-in ones) while `call` runs on this thread."""
    calls = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return calls
