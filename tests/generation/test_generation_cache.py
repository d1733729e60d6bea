"""Memory of the key/value cache."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from asyncrl.generation.embedded.cache import CacheShape, KVCache

SHAPE = CacheShape(layers=3, rows=64, heads=2, positions=2048, head_size=33)  # rows end within pages


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_no_longer_used_give_their_memory_back(dtype: torch.dtype) -> None:
    cache = KVCache(SHAPE, dtype, torch.device("cpu"))
    before = resident()
    cache.use(64)
    cache.data.fill_(1.0)
    size = SHAPE.nbytes(dtype)
    assert resident() - before > 0.9 * size
    cache.use(40)  # not many fewer: they may come back
    assert cache.resident_rows == 64 and bool((cache.data == 1).all())
    cache.use(16)
    assert cache.resident_rows == 20 and resident() - before < 0.5 * size
    assert bool((cache.data[:, :, :20] == 1).all()), "rows in use are untouched, in every layer"
    assert float(cache.data[:, :, 22:].abs().max()) <= 1.0, (
        "what was given back is zero or was never touched, not garbage"
    )
    cache.use(64)
    assert cache.resident_rows == 64


def test_pages_are_touched_where_they_are_used_only() -> None:
    before = resident()
    cache = KVCache(
        CacheShape(layers=4, rows=256, heads=4, positions=1024, head_size=64), torch.float32, torch.device("cpu")
    )
    cache.data[0, 0, 0] = 1.0
    assert resident() - before < 16 << 20 < cache.shape.nbytes(torch.float32)
