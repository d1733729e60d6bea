"""Copying modules, and copying host arrays to a device."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array as a tensor on `device`. On a CPU the tensor shares the memory of the array."""
    host = torch.from_numpy(values)
    # A copy from memory that is not pinned would make the host wait for the GPU.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def copy_module(module: Module) -> Module:
    """`copy.deepcopy` of a module, but faster: copies of the dozen empty dictionaries of hooks in every module are slow."""
    dictionaries = [value for part in module.modules() for value in vars(part).values() if type(value) is OrderedDict]
    # deepcopy takes an entry of its memo as a copy that exists already.
    return copy.deepcopy(module, {id(hooks): OrderedDict() for hooks in dictionaries if not hooks})
