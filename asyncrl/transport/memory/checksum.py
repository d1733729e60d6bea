"""The checksum of the weight board: two numbers modulo 2^64 over the 32-bit words x_1 ... x_n of a bucket.

    sum of x_i                 sum of i * x_i

One changed bit changes the first. Two words that change places change the second, as |i - j| * |x_i - x_j| is below 2^64,
and so do two halves of words (bfloat16), or the first; words that move together change it by the shift times their sum.
Weights of another version agree by chance alone. It guards against mistakes, not against malice.

Sums, because they run as fast as memory is read, in any order, and numpy computes the same numbers. `checksum.c` does copy and
checksum in one pass, where it was built (`ASYNCRL_NATIVE=0` turns it off); else the copy goes bucket by bucket, through the cache.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...builds import of_this_source, wanted

STEP = 64  # bytes: every size is a multiple
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


def _load() -> ctypes.CDLL | None:
    if not wanted():
        return None
    here = Path(__file__).parent
    for path in sorted(here.glob("_checksum.*so")):
        try:
            library = ctypes.CDLL(str(path))
            library.asyncrl_source.restype = ctypes.c_uint32
            pointer, size = ctypes.c_void_p, ctypes.c_long
            library.asyncrl_sums.argtypes, library.asyncrl_sums.restype = (pointer, size, pointer), None
            library.asyncrl_copy.argtypes = (pointer, pointer, size, size, pointer, ctypes.c_int)
            library.asyncrl_copy.restype = None
            library.asyncrl_narrow.argtypes, library.asyncrl_narrow.restype = library.asyncrl_copy.argtypes, None
        except (OSError, AttributeError):  # built for another machine
            continue
        if of_this_source(path.name, library.asyncrl_source(), [here / "checksum.c"]) and library.asyncrl_runs():
            return library
    return None


_library = _load()


def build() -> str:
    """What computes: avx2, or numpy."""
    return "numpy" if _library is None else "avx2"


def sums_of(data: Bytes) -> tuple[int, int]:
    """The checksum of `data`, contiguous, a multiple of 64 bytes."""
    if _library is None:
        return _sums(data)
    found = (ctypes.c_uint64 * 2)()
    _library.asyncrl_sums(data.ctypes.data, data.nbytes, found)
    return found[0], found[1]


def copy(source: Bytes, target: Bytes, size: int, threads: int = 1) -> Sums:
    """Copy `source` to `target`, both contiguous, `target` at a multiple of 64 bytes; the checksum of what was read, for each
    `size` bytes: [buckets, 2]. `size` and the whole are multiples of 64. Whoever sees a later store sees the whole copy."""
    return _through(source, target, size, threads)


def narrow(source: npt.NDArray[np.float32], target: Bytes, size: int, threads: int = 1) -> Sums:
    """As `copy`, of bfloat16 made of `source`: rounded to nearest, ties to even, as torch does; NaN stays NaN. The checksum is that
    of what was written. Native code alone."""
    assert _library is not None
    found = np.empty((-(-target.nbytes // size), 2), np.uint64)
    _library.asyncrl_narrow(source.ctypes.data, target.ctypes.data, target.nbytes, size, found.ctypes.data, threads)
    return found


def sums(data: Bytes, size: int, threads: int = 1) -> Sums:
    """As `copy`, of what lies there already."""
    return _through(data, None, size, threads)


def _through(source: Bytes, target: Bytes | None, size: int, threads: int) -> Sums:
    buckets = -(-source.nbytes // size)
    found = np.empty((buckets, 2), np.uint64)
    if _library is not None:
        into = None if target is None else target.ctypes.data
        _library.asyncrl_copy(source.ctypes.data, into, source.nbytes, size, found.ctypes.data, threads)
        return found
    for bucket in range(buckets):
        part = source[bucket * size : (bucket + 1) * size]
        found[bucket] = _sums(part)
        if target is not None:
            target[bucket * size : (bucket + 1) * size] = part
    return found


def _sums(data: Bytes) -> tuple[int, int]:
    words = data.view(np.uint32).astype(np.uint64)
    return int(words.sum()), int(np.dot(words, _places(len(words))))


@cache
def _places(count: int) -> Sums:
    return np.arange(1, count + 1, dtype=np.uint64)
