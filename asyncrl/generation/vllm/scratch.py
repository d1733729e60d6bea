"""Folders that vLLM needs while it is made, under the temporary directory: those of a worker that was killed meanwhile are swept.

A folder is locked by whoever uses it, and the kernel lets go of the lock however that process ends. So what can be locked belongs
to nobody, whatever numbers processes have had since. Nothing of vLLM is imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "asyncrl-vllm-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """An empty folder, also for whatever asks Python for a temporary file meanwhile: vLLM's world of one process meets over one,
    which it would leave behind. Gone at the end. Errors: OSError."""
    before = tempfile.tempdir
    folder, lock = _made()
    tempfile.tempdir = folder
    try:
        yield folder
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep_scratch() -> list[str]:
    """Remove the folders of processes that have ended. Returns their paths. Those of other users, and of processes that live
    (stopped ones too), stay. It looks at files: call it in a thread."""
    gone = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # used, not ours, or swept by somebody else just now
            lock = _open(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(lock)
                if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and _is_at(path, lock):
                    shutil.rmtree(path)
                    gone.append(str(path))
            finally:
                os.close(lock)
    return gone


def _made() -> tuple[str, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = _open(Path(folder))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(Path(folder), lock):
                return folder, lock
            os.close(lock)  # somebody swept between the folder and its lock


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
