"""Handles: small frozen values that name an array in a slab. Processes send handles instead of arrays."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import StaleHandle

_FIXED = struct.Struct("<16sQB8s")  # run, offset, dimensions, dtype
_MAX_DIMENSIONS = 8
BFLOAT16 = "bfloat16"  # numpy lacks bfloat16 and views such arrays as uint16


@dataclass(frozen=True, slots=True)
class Handle:
    """An array of `dtype` and `shape`, `offset` bytes after the start of a slab. `run`: the slab's id, 16 random bytes."""

    run: bytes
    offset: int
    dtype: str  # numpy's short form ("<f4"), or "bfloat16"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def encode(self) -> bytes:
        """The handle as at most 97 bytes, without pickle, for `decode`."""
        head = _FIXED.pack(self.run, self.offset, len(self.shape), self.dtype.encode().ljust(8, b"\0"))
        return head + struct.pack(f"<{len(self.shape)}Q", *self.shape)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> Handle:
        """The handle of `encode`'s bytes. Errors: StaleHandle for other bytes."""
        try:
            run, offset, dimensions, dtype = _FIXED.unpack_from(raw)
            if dimensions > _MAX_DIMENSIONS or len(raw) != _FIXED.size + 8 * dimensions:
                raise ValueError(f"{dimensions} dimensions in {len(raw)} bytes")
            shape = struct.unpack_from(f"<{dimensions}Q", raw, _FIXED.size)
            handle = cls(run, offset, dtype.rstrip(b"\0").decode("ascii"), shape)
            numpy_dtype(handle.dtype)
        except (struct.error, ValueError, TypeError) as error:
            raise StaleHandle(f"these {len(raw)} bytes are no handle: {error}; use those of Handle.encode") from error
        return handle


def dtype_name(dtype: Any) -> str:
    """The short name of a dtype of numpy or torch, or of "bfloat16". Errors: ValueError for a dtype without numbers."""
    text = str(dtype).removeprefix("torch.")
    if text == BFLOAT16:
        return BFLOAT16
    is_torch = text != str(dtype)
    numpy_form = np.dtype(text if is_torch else dtype)
    if numpy_form.kind not in "biufc" or len(numpy_form.str) > 8:
        raise ValueError(f"arrays of {numpy_form} have no place in shared memory; use numbers or booleans")
    return numpy_form.str


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a short name; uint16 for bfloat16, which numpy lacks. Errors: ValueError for other dtypes."""
    dtype: np.dtype[Any] = np.dtype("<u2") if name == BFLOAT16 else np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name!r} is no number; expected a dtype such as '<f4' or {BFLOAT16!r}")
    return dtype
