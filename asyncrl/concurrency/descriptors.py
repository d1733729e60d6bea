"""File descriptors that are kept for the last checkpoint, and what to do where a process has none left."""

from __future__ import annotations

import errno
import os
import resource

# A checkpoint is written with a few open files at a time, and modules are loaded for it.
SPARE = 16


class Reserve:
    """`keep` holds them, `spend` gives them to what is written at the end of a run."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def keep(self) -> None:
        """Errors: OSError where there are fewer; those that it got are kept."""
        while len(self._held) < SPARE:
            self._held.append(os.open(os.devnull, os.O_RDONLY))

    def spend(self) -> None:
        while self._held:
            os.close(self._held.pop())


def none_left(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is that of a process without a free descriptor."""
    seen = set[int]()
    # A chain may run in a circle: an error that was raised again while one was handled that came from it.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "oo many open files" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def way_out() -> str:
    """What to do, in words."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"too many open files: this process may have {limit} (ulimit -n), and all are in use. Start it with more: "
        "`ulimit -n 4096`, LimitNOFILE= of a service, --ulimit nofile=4096 of a container. Where their number grows with the "
        "steps, code of yours does not close what it opens"
    )
