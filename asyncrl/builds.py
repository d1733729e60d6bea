"""Whether an optional native build is of the source that lies beside it, and how what is optional is installed.

A build that was left over from another source text could take arguments that mean something else by now, so it is refused.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path


def wanted() -> bool:
    """`ASYNCRL_NATIVE=0` turns native code off, to compare."""
    return os.environ.get("ASYNCRL_NATIVE", "1") != "0"


def install(extra: str) -> str:
    """The command that brings an extra: to the checkout that this package lies in, or to the package that was installed."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").exists():
        return f"pip install 'asyncrl[{extra}]'"
    return f"pip install -e '{'.' if checkout == Path.cwd() else checkout}[{extra}]'"


def checksum(texts: Sequence[Path]) -> int:
    """CRC32 of the source files one after the other; setup.py gives it to the compiler."""
    return zlib.crc32(b"".join(text.read_bytes() for text in texts))


def of_this_source(build: str, stamp: int, texts: Sequence[Path]) -> bool:
    """`stamp`: what the compiler was given. Warns where the build is of another text. An editable installation has the source
    beside the build; an installed one has the build alone."""
    if not all(text.exists() for text in texts) or stamp == checksum(texts):
        return True
    names = ", ".join(text.name for text in texts)
    warnings.warn(
        f"{build} was built of another {names} and is not used: build it again (pip install -e .)",
        RuntimeWarning,
        stacklevel=3,
    )
    return False
