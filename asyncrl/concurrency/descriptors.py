"""Reserves file descriptors for the checkpoint at the end of a run, and tells the user what to do if no descriptor is free."""

from __future__ import annotations

import errno
import os
import resource

# Writing a checkpoint takes a few open files at a time: the checkpoint's files, and those of modules that are imported for it.
SPARE = 16


class Reserve:
    """`keep` opens `SPARE` descriptors, and `close` frees them for the files that are written at the end of a run."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def keep(self) -> None:
        """Errors: OSError if fewer than `SPARE` descriptors are free. Descriptors that were opened before the error stay open."""
        while len(self._held) < SPARE:
            self._held.append(os.open(os.devnull, os.O_RDONLY))

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())


def descriptor_advice(error: BaseException | None) -> str:
    """Advice to the user, if `error` or an error in its chain of causes means that no descriptor is free. "" for other errors."""
    seen = set[int]()
    # The chain can be a circle: A is raised again while B is handled, and A had caused B.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        code, text = getattr(error, "errno", None), str(error).lower()
        if code == errno.ENFILE or "too many open files in system" in text:
            return "too many open files in system: its table is full (sysctl fs.file-max). End other programs, or enlarge the table"
        if code == errno.EMFILE or "too many open files" in text:
            return (
                f"too many open files: all {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} descriptors of this process (ulimit -n) "
                "are in use. Start it with more: `ulimit -n 4096`, LimitNOFILE= of a service, --ulimit nofile=4096 of a container. "
                "If the number of open files grows with every training step, your own code does not close the files that it opens"
            )
        error = error.__cause__ or error.__context__
    return ""
