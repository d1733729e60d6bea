"""Packed copies in memory of our own choice: one process makes them, others read them where they lie.

torch gives a packed weight as an opaque tensor over memory that oneDNN has allocated. Compiled models keep theirs in a file, and
torch's C interface for them (`aoti_torch_create_tensor_from_blob_v2`) makes such a tensor over any memory, from what one says of
its own layout (`mkldnn._get_mkldnn_serialized_md`). Where a torch has neither, or makes of it what computes something else,
nothing is placed and every process packs for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .reordered import Blocks, Reordered, reorder

_ALIGNMENT = 4096  # bytes: a copy begins with a page
_LAYOUT_MKLDNN = 3  # c10::Layout
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Form(NamedTuple):
    """How the copy of a weight [O, I] lies. `described`: by oneDNN, in hexadecimal."""

    shape: tuple[int, int]
    blocks: Blocks
    nbytes: int
    described: str


class Placed(NamedTuple):
    """An opaque tensor, and the memory that it lies in, which lasts as long as this does."""

    tensor: Tensor
    memory: Tensor


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the copies of all products lie, one after the other. `places`: of each product the number of its form and its first
    byte; None: it has no copy there. `origins`: where what it is a copy of begins in the flat buffer; None: it lies in parts."""

    forms: tuple[Form, ...]
    places: tuple[tuple[int, int] | None, ...]
    origins: tuple[int | None, ...]
    size: int

    @classmethod
    def of(cls, forms: Sequence[Form | None], origins: Sequence[int | None]) -> Self:
        """`forms`: of each product's copy; None: it has none that could lie elsewhere."""
        distinct = tuple(dict.fromkeys(form for form in forms if form is not None))
        places, size = list[tuple[int, int] | None](), 0
        for form in forms:
            places.append(None if form is None else (distinct.index(form), size))
            size += 0 if form is None else -(-form.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(distinct, tuple(places), tuple(origins), size)

    def message(self) -> dict[str, Any]:
        """For `from_message` in another process, as JSON takes it."""
        forms = [[*form.shape, *form.blocks, form.nbytes, form.described] for form in self.forms]
        return {"forms": forms, "places": self.places, "origins": self.origins, "size": self.size}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """What JSON made of a `message`."""
        forms = [
            Form((rows, columns), Blocks(tall, wide), nbytes, described)
            for rows, columns, tall, wide, nbytes, described in message["forms"]
        ]
        places = [None if place is None else (place[0], place[1]) for place in message["places"]]
        return cls(tuple(forms), tuple(places), tuple(message["origins"]), message["size"])

    def digest(self, dtype: torch.dtype) -> str:
        """Two processes with the same one may read each other's copies."""
        return hashlib.sha256(repr((dtype, self)).encode()).hexdigest()[:32]

    def is_native(self, dtype: torch.dtype) -> bool:
        """Whether oneDNN lays copies out so in this process, too: else its products would lay them out anew, every time."""
        return all(_describe(reorder(torch.zeros(form.shape, dtype=dtype))) == form.described for form in self.forms)

    def place(self, memory: Tensor, dtype: torch.dtype) -> list[Placed | None]:
        """The copies in `memory` [size] of bytes, whatever lies there now."""
        found = list[Placed | None]()
        for place in self.places:
            if place is None:
                found.append(None)
                continue
            form, start = self.forms[place[0]], place[1]
            part = memory[start : start + form.nbytes]
            found.append(Placed(_tensor_over(part, form, dtype), part))
        return found

    def by_origin(self, memory: Tensor, dtype: torch.dtype) -> dict[int, Placed]:
        """As `place`, by what they are copies of, where that lies in one part."""
        placed = zip(self.origins, self.place(memory, dtype), strict=True)
        return {origin: each for origin, each in placed if origin is not None and each is not None}


def form_of(copy: Reordered, weight_OI: Tensor) -> Form | None:
    """None: nobody but torch can write such a copy."""
    if copy.blocks is None or not placing_works(weight_OI.dtype):
        return None
    rows, columns = weight_OI.shape
    return Form((rows, columns), copy.blocks, weight_OI.nbytes, _describe(copy.tensor))


@cache
def placing_works(dtype: torch.dtype) -> bool:
    """Whether this torch reads a copy of `dtype` where we put it, tried on a small one."""
    weight = torch.linspace(-1, 1, 64 * 64).view(64, 64).to(dtype)
    x = torch.linspace(1, -2, 4 * 64).view(4, 64).to(dtype)
    try:
        packed = reorder(weight)
        size: int = torch.ops.mkldnn._nbytes(packed)
        memory = torch.zeros(size, dtype=torch.uint8)
        form = Form((64, 64), Blocks(0, 0), size, _describe(packed))
        placed = _tensor_over(memory, form, dtype)
        ctypes.memmove(memory.data_ptr(), torch.ops.mkldnn.data_ptr(packed), size)
        found, expected = (
            torch.ops.mkldnn._linear_pointwise(x, each, None, "none", [], "") for each in (placed, packed)
        )
        return torch.equal(found, expected) and torch.ops.mkldnn.data_ptr(placed) == memory.data_ptr()
    except (AttributeError, OSError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return False  # none of it is promised by torch


def _describe(packed: Tensor) -> str:
    found: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    return found.numpy().tobytes().hex()


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.aoti_torch_create_tensor_from_blob_v2.argtypes = [
        _POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT, _INT, _INT, _POINTER, _INT, ctypes.c_char_p, _LONG,
    ]  # fmt: skip
    library.aoti_torch_create_tensor_from_blob_v2.restype = _INT
    return library


def _tensor_over(memory: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """An opaque tensor that does not keep its memory. Errors: RuntimeError."""
    library = _library()
    code: int = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    sizes, strides = (_LONG * 2)(*form.shape), (_LONG * 2)(form.shape[1], 1)
    described, made = bytes.fromhex(form.described), _POINTER()
    wrong = library.aoti_torch_create_tensor_from_blob_v2(
        memory.data_ptr(), 2, sizes, strides, 0, code, library.aoti_torch_device_type_cpu(), 0, ctypes.byref(made),
        _LAYOUT_MKLDNN, described, len(described),
    )  # fmt: skip
    if wrong:
        raise RuntimeError(f"torch makes no packed tensor over given memory (error {wrong})")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [_POINTER, ctypes.c_char_p, _POINTER]
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(made, None, None))
    return tensor
