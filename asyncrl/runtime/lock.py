"""One live run per run directory: a lock that the kernel releases when its process ends or dies.

The process takes two `flock` locks. The lock on the directory survives the removal of files. The lock on the file `.lock` is also
seen by other machines on a shared file system, and the file names the holder. A run removes the file at its end; after a kill the
file remains, unlocked. On a file system without locks, and after a directory is moved, removed or replaced, only `find_loss`
protects the runs from each other: a run calls it before each write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

import orjson

from asyncrl.errors import ConfigError

# EBADF: NFS may lock only descriptors that are open for writing, and a directory cannot be opened for writing.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """The lock of rank 0 on one run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / ".lock"
        self._descriptors: list[int] = []  # of the directory and of the file
        self._content = b""  # of this run's .lock

    def acquire(self) -> str | None:
        """Take the lock without waiting. Returns a warning if the file `.lock` cannot be locked.
        Errors: ConfigError that names the holder; OSError if the directory or the file cannot be made."""
        warning: str | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_descriptors)
            # Repeated if the holder moved the directory, or removed the file, between our `open` and our `flock`.
            while not self._names_open_files():
                self._close_descriptors()
                self._directory.mkdir(parents=True, exist_ok=True)
                for path, flags in ((self._directory, os.O_DIRECTORY), (self.path, os.O_RDWR | os.O_CREAT)):
                    self._descriptors.append(os.open(path, flags, 0o666))
                    warning = None
                    try:
                        fcntl.flock(self._descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise ConfigError(
                            f"{self._directory} is in use by another run: {self._holder()}; wait for its end, stop it, or "
                            "choose another run.name"
                        ) from None
                    except OSError as error:
                        if error.errno not in _UNSUPPORTED:
                            raise
                        # The file is locked last. Its lock is enough to refuse a second run.
                        warning = f"{self._directory} cannot be locked ({error.strerror}): start no second run there; "
                        warning += "the first run would end"
            _held.add(self)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "mark": os.urandom(8).hex()}
            self._content = orjson.dumps(holder)
            os.ftruncate(self._descriptors[1], 0)
            os.pwrite(self._descriptors[1], self._content, 0)
            undo.pop_all()
        return warning

    def find_loss(self) -> str | None:
        """None while the directory is this run's; else what happened to the directory. Works without a free descriptor, too."""
        if not self._descriptors or (self._names_open_files() and self._is_unchanged()):
            return None
        current = self._directory.stat() if self._directory.exists() else None
        if current is None or not os.path.samestat(os.fstat(self._descriptors[0]), current):
            return "it was moved or removed"
        # Another run would have made a new `.lock`.
        return f"another run writes there ({self._holder()})" if self.path.exists() else None

    def release(self) -> None:
        """Remove the file and release the lock. May be called twice."""
        if self._descriptors:
            # `dir_fd`, because the directory may have been moved. Before the unlock, because later the file may be another run's.
            with contextlib.suppress(OSError):
                if self._is_unchanged():
                    os.unlink(self.path.name, dir_fd=self._descriptors[0])
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _names_open_files(self) -> bool:
        """Whether the paths still name the directory and the file that are open."""
        with contextlib.suppress(OSError, ValueError):
            pairs = zip(self._descriptors, (self._directory, self.path), strict=True)
            return all(os.path.samestat(os.fstat(descriptor), path.stat()) for descriptor, path in pairs)
        return False

    def _is_unchanged(self) -> bool:
        return os.pread(self._descriptors[-1], 4096, 0) == self._content

    def _holder(self) -> str:
        try:
            holder = orjson.loads(self.path.read_bytes())
            return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
            return "a process that has only just begun"
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"


def _close_in_child() -> None:
    """A forked child has copies of the descriptors. With them the lock would outlive the run."""
    for lock in list(_held):
        lock._close_descriptors()


os.register_at_fork(after_in_child=_close_in_child)
