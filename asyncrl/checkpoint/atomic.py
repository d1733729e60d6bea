"""Making a directory durable and putting it in place in one step, or not at all.

What is promised assumes a local file system with atomic rename; a crash of the machine is covered by the fsyncs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def sync_tree(directory: Path) -> dict[str, int]:
    """fsync every file and directory below and `directory` itself; the size in bytes of every file by relative path.

    Delayed allocation reports a full disk here at the earliest, so this belongs before the rename.
    """
    sizes: dict[str, int] = {}
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            path = Path(folder, name)
            with path.open("rb") as file:
                os.fsync(file.fileno())
                sizes[path.relative_to(directory).as_posix()] = os.fstat(file.fileno()).st_size
        sync_directory(Path(folder))
    return dict(sorted(sizes.items()))


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable (renames, new files)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(new: Path, place: Path, aside: Path) -> None:
    """Rename the directory `new` to `place`. One that stands there ends up at `aside`, for the caller to remove.

    With an old one the two are exchanged in one system call where Linux can, so that at every moment a whole directory
    stands at `place`; elsewhere there is a moment without one, and the old one lies at `aside`.
    """
    if not os.path.lexists(place):
        os.rename(new, place)
    elif _exchange(new, place):
        os.rename(new, aside)
    else:
        os.rename(place, aside)
        try:
            os.rename(new, place)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(aside, place)
            raise
    sync_directory(place.parent)


def point_at(link: Path, target: str, temporary: Path) -> None:
    """Make `link` a symbolic link to `target` (a name in the same directory), replacing an older link atomically."""
    os.symlink(target, temporary)
    os.replace(temporary, link)
    sync_directory(link.parent)


def remove_tree(directory: Path) -> None:
    """Remove a directory tree (or a link), missing parts included. Errors: `OSError`."""
    if directory.is_symlink() or directory.is_file():
        directory.unlink(missing_ok=True)
    elif directory.exists():
        shutil.rmtree(directory)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))
