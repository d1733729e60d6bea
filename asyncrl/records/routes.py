"""Expert routes: an array [L, layers, k] with the experts of each token in each layer that has experts.

The k numbers of a token and layer are either different experts, or all -1: the route is not known. The dtype is signed
because of -1.

Shapes: L tokens, k experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError

MISSING = -1


def narrowest(experts: int) -> np.dtype[Any]:
    """The narrowest signed integer dtype for the numbers -1 to `experts - 1`."""
    return np.dtype(next(dtype for dtype in (np.int8, np.int16, np.int32) if experts - 1 <= np.iinfo(dtype).max))


def check_routes(routes: npt.NDArray[Any], experts: int) -> None:
    """Errors: DataError with token and layer, for an expert out of range, a route that is partly -1, or a repeated expert.

    This function runs on the event loop for every trajectory, so it is written for speed. Only `_refuse` searches for the position
    of an error.
    """
    rows, layers, k = routes.shape
    columns = np.ascontiguousarray(routes.reshape(rows * layers, k).T)  # [k, rows x layers]
    if not columns.size:
        return
    known = columns[0] != MISSING  # [rows x layers], as the two masks below
    twice = np.zeros(known.size, np.bool_)
    mixed = np.zeros(known.size, np.bool_)
    for index, column in enumerate(columns[1:], 1):
        mixed |= (column != MISSING) != known
        for other in columns[:index]:
            twice |= column == other
    if columns.min() < MISSING or columns.max() >= experts or mixed.any() or (twice & known).any():
        _refuse(routes.reshape(rows * layers, k), layers, experts)


def _refuse(flat: npt.NDArray[Any], layers: int, experts: int) -> None:
    missing = flat == MISSING
    known = ~missing.all(1)
    ordered = np.sort(flat, 1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1) & known
    for bad, complaint in (
        ((missing.any(1) & known), "is partly missing: give all experts, or -1 for each if they are not known"),
        (((flat < MISSING) | (flat >= experts)).any(1), f"is out of range: experts are 0 to {experts - 1}"),
        (twice, "names an expert twice: give different experts"),
    ):
        if bad.any():
            token, layer = divmod(index := int(bad.argmax()), layers)
            raise DataError(f"token {token}, layer {layer}: the choice {flat[index].tolist()} {complaint}")
    raise AssertionError("check_routes found an error that _refuse does not find")
