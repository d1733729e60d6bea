"""Names of the shared memory between a rank and its workers, and removal of the shared memory of dead runs."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from ...errors import ArenaOwned, TransportError
from ...transport.inventory import clear
from ...transport.memory.segment import DIRECTORY, PREFIX

# A segment with a matching name may be deleted. So the pattern must not match a name that a user would choose.
_GENERATED_NAME = re.compile(r"worker-[a-z]+-\d+\.\d+\.[0-9a-f]{12}")


def segment_name() -> str:
    """A new unique name for the weight board of this process."""
    return f"worker-weights-0.{os.getpid()}.{secrets.token_hex(6)}"


def remove_orphaned_segments() -> list[str]:
    """Remove this user's worker segments whose owner process is dead, even damaged segments. A suspended owner counts as alive.
    Returns the names of the removed segments. Call this in a thread, because it reads files."""
    removed = []
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}worker-*")):
        name = path.name.removeprefix(PREFIX)
        # ArenaOwned: the owner lives, or another process is removing the segment. TransportError: not a file of this user.
        with contextlib.suppress(ArenaOwned, FileNotFoundError, TransportError):
            if _GENERATED_NAME.fullmatch(name):
                clear(name, drop_records=True)
                removed.append(name)
    return removed
