"""Copies of modules."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def copy_module(module: Module, instead: dict[int, Any] | None = None) -> Module:
    """`copy.deepcopy` in a part of its time, most of which goes into the dozen empty dictionaries of hooks that every module has.
    `instead`: id of an object in the module -> what the copy has in its place."""
    hooks = [value for part in module.modules() for value in vars(part).values() if type(value) is OrderedDict]
    return copy.deepcopy(module, {id(each): OrderedDict() for each in hooks if not each} | (instead or {}))
