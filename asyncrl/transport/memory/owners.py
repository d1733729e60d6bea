"""Which process owns a segment: what /proc says of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def owner_of(fd: int) -> int | None:
    """The process that holds the `flock`, as far as /proc shows: asking by locking would disturb a new owner.

    0 where somebody unknown holds it (another process namespace); None where nobody does.
    """
    status = os.fstat(fd)
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == status.st_ino:
                major, minor, _ = fields[5].split(":")
                if os.makedev(int(major, 16), int(minor, 16)) == status.st_dev:
                    return max(int(fields[4]), 0)
    return None
