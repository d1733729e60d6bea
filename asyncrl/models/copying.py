"""Copying host arrays to a device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array as a tensor on `device`. If `device` is a CPU, the tensor shares the memory of the array."""
    host = torch.from_numpy(values)
    # Without pinned memory the host would wait until the GPU has the copy.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
