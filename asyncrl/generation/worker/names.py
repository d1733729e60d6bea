"""The name of the shared memory between a node and its workers, and how to clear what dead runs left under such names."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from ...errors import ArenaOwned
from ...transport.inventory import clear
from ...transport.memory.segment import DIRECTORY, PREFIX, check_platform

# Narrow, so that no name that a user would choose is among them: what lies under such a name may be deleted.
_OURS = re.compile(r"worker-[a-z]+-\d+\.\d+\.[0-9a-f]{12}")


def segment_name() -> str:
    """A name that nobody else has for the weight board of this process."""
    return f"worker-weights-0.{os.getpid()}.{secrets.token_hex(6)}"


def sweep() -> list[str]:
    """Remove the segments of workers that nobody owns any more, with the records in them, which were for a run that is dead.

    Returns their names. Those of other users, of owners that live (stopped ones too), and all that is not a worker's stay. It
    looks at files: call it in a thread. Errors: PlatformError.
    """
    check_platform()
    gone = []
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}worker-*")):
        name = path.name.removeprefix(PREFIX)
        # Whoever comes second where two sweep at once finds a lock, or nothing.
        with contextlib.suppress(ArenaOwned, FileNotFoundError):
            status = path.lstat()
            if _OURS.fullmatch(name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                clear(name, drop_records=True)
                gone.append(name)
    return gone
