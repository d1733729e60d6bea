"""The temporary files of vLLM's start, and their removal after a worker was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "asyncrl-engine-"
_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A new folder, removed with its files after the context. Inside the context this process creates its temporary files in the
    folder: vLLM never deletes the file of its process group. First removes the folders of killed processes. Errors: OSError."""
    original, root = tempfile.tempdir, tempfile.gettempdir()
    _remove_orphans(Path(root))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root, ignore_cleanup_errors=True) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            # The lock shows other processes, also in other containers, that this process lives.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            tempfile.tempdir = folder
            yield folder
        finally:
            tempfile.tempdir = original
            os.close(descriptor)


def _remove_orphans(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        # OSError: the process of the folder lives, the folder belongs to another user, or it does not exist any more.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files = [*folder.iterdir()]
                # An empty folder may be new: its process may not have locked the folder yet.
                if files and os.fstat(descriptor).st_uid == os.geteuid():
                    for file in files:
                        remove_segments(file.name)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def remove_segments(name: str) -> None:
    """Remove vLLM's shared-memory files `NAME-*`. `name`: the name of the file of vLLM's process group."""
    if name.startswith("vllm_dist_"):
        for path in _MEMORY.glob(f"{name}-*"):
            path.unlink(missing_ok=True)
