"""Make a directory durable with fsync, and rename it to its final path in one atomic step.

The rename is atomic only on a local file system. With the fsyncs the files survive a crash of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def sync_tree(directory: Path) -> dict[str, int]:
    """fsync `directory` and everything below it. Returns the size in bytes of every file, by relative path.

    Some file systems report a full disk only in fsync, by an `OSError`. So call this function before the rename.
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
    """fsync the entries of one directory, so that new and renamed entries survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(new: Path, target: Path, replaced: Path) -> None:
    """Rename the directory `new` to `target`. An old directory at `target` is renamed to `replaced`, which the caller must remove.

    Linux exchanges the old and the new directory in one system call, so `target` exists at every moment. Where this is
    not supported, two renames are needed, and `target` does not exist between the two.
    """
    if not os.path.lexists(target):
        os.rename(new, target)
    elif _exchange(new, target):
        try:
            os.rename(new, replaced)
        except OSError:
            _exchange(new, target)
            raise
    else:
        os.rename(target, replaced)
        try:
            os.rename(new, target)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(replaced, target)
            raise
    sync_directory(target.parent)


def replace_link(link: Path, target: str, temporary: Path) -> None:
    """Make `link` a symbolic link to `target`, a name in the directory of `link`. Creates `temporary` and renames it to `link`."""
    os.symlink(target, temporary)
    os.replace(temporary, link)
    sync_directory(link.parent)


def remove_tree(directory: Path) -> None:
    """Remove a directory tree, a file or a link. A missing `directory` is no error. Errors: `OSError`."""
    if directory.is_symlink() or directory.is_file():
        directory.unlink(missing_ok=True)
    elif directory.exists():
        shutil.rmtree(directory)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories atomically. False if the operating system or the file system cannot do this."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))
