"""Making many frozen values in little time.

The constructor of a frozen dataclass stores each field through `object.__setattr__`. These fill a twin that is not frozen
and has the same slots, then let it be what it is meant to be: a sixth of the time for 15 fields.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from .native import records

T = TypeVar("T")


def quick(cls: type[T]) -> Callable[..., T]:
    """A constructor of the frozen dataclass `cls` that takes every field by position. Errors: as `quick_rows`."""
    twin = _twin(cls)

    def one(*values: Any) -> T:
        made = twin(*values)
        made.__class__ = cls
        return made

    return one


def quick_rows(cls: type[T]) -> Callable[[tuple[int, ...], tuple[Any, ...], bool], list[T]]:
    """A constructor of many: `rows(bounds, columns, copy)` makes n instances for n + 1 `bounds`, with a column for each field:

    * a jagged array [bounds[n]] is cut: instance i gets `array[bounds[i] : bounds[i + 1]]`, or with `copy` a copy of it;
    * a list has a value for each instance; the type `dict` stands for an empty one of its own for each;
    * anything else is the same for all. The same column (but `dict`) twice in succession: its values are shared.

    Errors: ValueError for a column that does not fit; here TypeError, for a class that is no dataclass with slots or has
    bases other than Generic or a `__post_init__`.
    """
    twin = _twin(cls)

    def rows(bounds: tuple[int, ...], columns: tuple[Any, ...], copy: bool) -> list[T]:
        if records is not None:
            found: list[T] = records.rows(cls, bounds, columns, copy)
            return found
        pieces = list(itertools.starmap(slice, itertools.pairwise(bounds)))
        full: list[list[Any]] = []
        for place, column in enumerate(columns):
            again = place and column is columns[place - 1] and column is not dict
            full.append(full[-1] if again else _spread(place, column, pieces, copy))
        made = list(map(twin, *full))
        for one in made:
            one.__class__ = cls
        return made

    return rows


def _spread(place: int, column: Any, pieces: list[slice], copy: bool) -> list[Any]:
    n = len(pieces)
    if isinstance(column, list):
        if len(column) != n:
            raise ValueError(f"{n} rows, but column {place} has {len(column)}")
        return column
    if isinstance(column, np.ndarray):
        parts = list(map(column.__getitem__, pieces))
        return [part.copy() for part in parts] if copy else parts
    return [{} for _ in range(n)] if column is dict else [column] * n


def _twin(cls: type[T]) -> Callable[..., T]:
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # fields() itself refuses what is no dataclass
    plain = cls.__bases__ in ((object,), (Generic,)) and not hasattr(cls, "__post_init__")
    if getattr(cls, "__slots__", None) != tuple(names) or not plain:
        raise TypeError(
            f"{cls.__name__}: a dataclass with slots, without bases (but Generic) and __post_init__ is needed"
        )
    bases = getattr(cls, "__orig_bases__", ())
    return dataclasses.make_dataclass(f"_{cls.__name__}", names, bases=bases, slots=True, eq=False)
