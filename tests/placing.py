"""For tests of packed copies that one process makes and others read."""

from __future__ import annotations

import pytest
import torch

from asyncrl.models.native import library as native
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.parameters.placed import placing_works


def needs_placing(dtype: torch.dtype) -> None:
    """Skips where there can be none."""
    packs = native.available() and packing_works(dtype, torch.device("cpu"))
    if not packs or not placing_works(dtype):
        pytest.skip(
            f"no native code, or this torch packs no {dtype} weights here, or reads none that others have packed"
        )
