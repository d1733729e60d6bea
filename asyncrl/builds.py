"""Optional parts of the installation: extras of the package, and native libraries that are built from source.

A native library is used only if it was built from the present source code: functions of another build may expect other arguments.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path


def native_enabled() -> bool:
    """False if the environment has `ASYNCRL_NATIVE=0`. The run then uses torch or Python in place of native code."""
    return os.environ.get("ASYNCRL_NATIVE", "1") != "0"


def install_command(extra: str) -> str:
    """The pip command that installs an extra of asyncrl, from the checkout if asyncrl runs in one, otherwise by name."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").exists():
        return f"pip install 'asyncrl[{extra}]'"
    return f"pip install -e '{'.' if checkout == Path.cwd() else checkout}[{extra}]'"


def checksum(sources: Sequence[Path]) -> int:
    """CRC32 of the joined source files. setup.py compiles this number into the library."""
    return zlib.crc32(b"".join(source.read_bytes() for source in sources))


def is_current_build(library: str, stamp: int, sources: Sequence[Path]) -> bool:
    """Whether `stamp`, the checksum in the library, equals the checksum of `sources`. Warns if not. True if a source file is
    missing, because only an editable installation has the sources."""
    if not all(source.exists() for source in sources) or stamp == checksum(sources):
        return True
    names = ", ".join(source.name for source in sources)
    warnings.warn(
        f"{library} was built from another version of {names} and is not used: build it again (pip install -e .)",
        RuntimeWarning,
        stacklevel=3,
    )
    return False
