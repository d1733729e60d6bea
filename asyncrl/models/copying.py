"""Copies of modules, and of arrays to a device."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array as a tensor there. On a CPU it is the same memory. To a GPU it goes by way of pinned memory: a copy from any
    other makes the host wait for the device."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def copy_module(module: Module) -> Module:
    """`copy.deepcopy` in a part of its time, most of which goes into the dozen empty dictionaries of hooks of every module."""
    hooks = [value for part in module.modules() for value in vars(part).values() if type(value) is OrderedDict]
    return copy.deepcopy(module, {id(each): OrderedDict() for each in hooks if not each})
