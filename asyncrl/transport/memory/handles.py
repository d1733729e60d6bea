"""Handles: small frozen values that name an array in a slab. They travel; the bytes stay where they are."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import StaleHandle

_FIXED = struct.Struct("<16sQB8s")  # run, offset, dimensions, dtype
_MAX_DIMENSIONS = 8
BFLOAT16 = "bfloat16"  # numpy has none: such arrays are seen as uint16


@dataclass(frozen=True, slots=True)
class Handle:
    """An array of `dtype` and `shape` at `offset` bytes into the memory of the slab whose run is `run`."""

    run: bytes
    offset: int
    dtype: str  # numpy's short form ("<f4"), or "bfloat16"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def encode(self) -> bytes:
        """At most 97 bytes; no pickle."""
        head = _FIXED.pack(self.run, self.offset, len(self.shape), self.dtype.encode().ljust(8, b"\0"))
        return head + struct.pack(f"<{len(self.shape)}Q", *self.shape)

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> Handle:
        """Errors: StaleHandle for bytes that are no handle."""
        try:
            run, offset, dimensions, dtype = _FIXED.unpack_from(raw)
            if dimensions > _MAX_DIMENSIONS or len(raw) != _FIXED.size + 8 * dimensions:
                raise ValueError(f"{dimensions} dimensions in {len(raw)} bytes")
            shape = struct.unpack_from(f"<{dimensions}Q", raw, _FIXED.size)
            handle = cls(run, offset, dtype.rstrip(b"\0").decode("ascii"), shape)
            numpy_dtype(handle.dtype)
        except (struct.error, ValueError, TypeError) as error:
            raise StaleHandle(f"these {len(raw)} bytes are no handle: {error}") from error
        return handle


def dtype_name(dtype: Any) -> str:
    """The short name of a numpy dtype, a torch dtype, or "bfloat16". Errors: ValueError for objects and other forms."""
    text = str(dtype).removeprefix("torch.")
    if text == BFLOAT16:
        return BFLOAT16
    found = np.dtype(text if text != str(dtype) else dtype)
    if found.kind not in "biufc" or len(found.str) > 8:
        raise ValueError(f"arrays of {found} have no place in shared memory; numbers and booleans have")
    return found.str


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name; bfloat16, which numpy lacks, as the 16 bits that it is. Errors: ValueError for what is no
    number."""
    found: np.dtype[Any] = np.dtype("<u2") if name == BFLOAT16 else np.dtype(name)
    if found.kind not in "biufc":
        raise ValueError(f"{name!r} is no number")
    return found
