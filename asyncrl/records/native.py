"""The extension of `native.c`, if it was built: `plan`, `write`, `read` and `rows` for records of the usual form, `publish` and
`take` for those in a ring.

`records` is None where it was not built (no compiler, another platform) or is turned off (`ASYNCRL_NATIVE=0`).
"""

from __future__ import annotations

import zlib
from pathlib import Path
from types import ModuleType

from ..builds import of_this_source, wanted
from .layout import CODES, DTYPES, SPECS, Axis, Spec

SOURCES = ("native.c", "native_read.c", "native_slot.c", "native_write.c", "native.h")
USER_BYTES = Spec(Axis.BYTES, (DTYPES[1],))  # of a user's own section


def _load() -> ModuleType | None:
    if not wanted():
        return None
    try:
        from . import _native
    except ImportError:
        return None
    here = Path(__file__).parent
    if not of_this_source(Path(_native.__file__).name, _native.SOURCE, [here / name for name in SOURCES]):
        return None
    forms = ((0, USER_BYTES), *SPECS.items())
    _native.set_forms(
        (None, *(DTYPES[code] for code in range(1, len(DTYPES) + 1))),
        tuple(
            (
                int(section),
                spec,
                int(spec.axis),
                spec.inner,
                CODES[spec.dtypes[0]],
                sum(1 << CODES[d] for d in spec.dtypes),
            )
            for section, spec in forms
        ),
        zlib.crc32,
    )
    return _native


records = _load()
