"""Routes of experts as numbers: [L, layers, k], which experts a token went to in each layer that has any.

Signed, because -1 has to fit: a row of k times -1 says that nobody knows where this token went in this layer. Any other row
holds k different experts.

Shape legend: L tokens, k experts a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError

MISSING = -1


def narrowest(experts: int) -> np.dtype[Any]:
    """The narrowest signed integers that hold the experts 0 to `experts - 1`, and -1."""
    return np.dtype(next(kind for kind in (np.int8, np.int16, np.int32) if experts - 1 <= np.iinfo(kind).max))


def check_routes(routes: npt.NDArray[Any], experts: int) -> None:
    """Errors: DataError that names row and layer of a choice that no router makes: out of range, partly missing, or an expert
    twice.

    This runs on the event loop, for every trajectory: columns of a long row are compared in few passes, and where it is bad is
    looked for once something is.
    """
    rows, layers, k = routes.shape
    columns = np.ascontiguousarray(routes.reshape(rows * layers, k).T)  # [k, rows x layers]
    if not columns.size:
        return
    known = columns[0] != MISSING
    twice = np.zeros(known.size, np.bool_)
    mixed = np.zeros(known.size, np.bool_)
    for place, column in enumerate(columns[1:], 1):
        mixed |= (column != MISSING) != known
        for other in columns[:place]:
            twice |= column == other
    if columns.min() < MISSING or columns.max() >= experts or mixed.any() or (twice & known).any():
        _refuse(routes.reshape(rows * layers, k), layers, experts)


def _refuse(flat: npt.NDArray[Any], layers: int, experts: int) -> None:
    missing = flat == MISSING
    known = ~missing.all(1)
    ordered = np.sort(flat, 1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1) & known
    for bad, what in (
        ((missing.any(1) & known), "is partly missing: a row of -1 alone says that it is not known"),
        (((flat < MISSING) | (flat >= experts)).any(1), f"is out of range: experts are 0 to {experts - 1}"),
        (twice, "names an expert twice"),
    ):
        if bad.any():
            row, layer = divmod(int(bad.argmax()), layers)
            raise DataError(f"row {row}, layer {layer}: the choice {flat[row * layers + layer].tolist()} {what}")
    raise AssertionError("what check_routes found bad was good")
