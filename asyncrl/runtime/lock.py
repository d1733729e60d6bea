"""One live run per run directory: a lock that the kernel gives back when its process dies, however it dies.

The lock is `flock` on the directory itself, which no removal of a file undoes, and on `.lock` in it, which machines that share the
file system see, too, and which says who holds it. A run that ends removes that file; one that was killed leaves it, unlocked.
Before a run writes it compares (`lost`): for a file system without locks, and for a directory that was moved, removed or replaced.
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

# The last: an NFS that locks through its server, which wants a descriptor that can be written.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """The lock of rank 0 on one run directory. Other ranks read in `path` whether the directory is still their run's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / ".lock"
        self._descriptors: list[int] = []  # of the directory and of the file
        self._mark = b""

    def acquire(self) -> str | None:
        """Take it at once or not at all. Returns a sentence where the file system has no locks: then `lost` is all there is.

        Errors: ConfigError that names the holder; OSError where the directory or the file cannot be made.
        """
        refused: set[str] = set()
        # The holder may have moved the directory, or removed the file, between our open and our lock.
        while not self._in_place():
            self.forget()
            self._directory.mkdir(parents=True, exist_ok=True)
            for place, flags in ((self._directory, os.O_DIRECTORY), (self.path, os.O_RDWR | os.O_CREAT)):
                self._descriptors.append(os.open(place, flags, 0o666))  # closed by exec: no child keeps it
                try:
                    fcntl.flock(self._descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.forget()
                    raise ConfigError(
                        f"{self._directory} is in use by another run: {self._holder()}; wait for its end, stop it, or choose "
                        "another run.name"
                    ) from None
                except OSError as error:
                    if error.errno not in _UNSUPPORTED:
                        self.forget()
                        raise
                    refused.add(str(error.strerror))
        _held.add(self)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "mark": os.urandom(8).hex()}
        self._mark = orjson.dumps(who)
        os.ftruncate(self._descriptors[1], 0)
        os.pwrite(self._descriptors[1], self._mark, 0)
        if not refused:
            return None
        why = ", ".join(sorted(refused))
        return f"{self._directory} cannot be locked ({why}): start no second run there; the first one would end"

    def lost(self) -> tuple[str, Path | None] | None:
        """What became of the directory, and where it lies now, if anywhere; None while it is this run's. It opens no descriptor."""
        if not self._descriptors or (self._in_place() and self._is_marked()):
            return None
        ours, there = os.fstat(self._descriptors[0]), self._directory.stat() if self._directory.exists() else None
        if there is not None and os.path.samestat(
            ours, there
        ):  # else the file alone is gone, and the directory is locked
            return (f"another run writes there ({self._holder()})", None) if self.path.exists() else None
        with contextlib.suppress(OSError):
            now = Path(os.readlink(f"/proc/self/fd/{self._descriptors[0]}"))
            if os.path.samestat(ours, now.stat()):
                return f"it was moved to {now}", now
        return "it was removed" if there is None else "another one took its place", None

    def release(self) -> None:
        """Give it back and remove the file. Twice is fine."""
        if self._descriptors:
            with contextlib.suppress(OSError):  # while it is locked, and wherever the directory lies now
                if self._is_marked():
                    os.unlink(self.path.name, dir_fd=self._descriptors[0])
        self.forget()

    def forget(self) -> None:
        """In a forked child: the descriptors are copies, and with them the lock would outlive the run."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _in_place(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            found = zip(self._descriptors, (self._directory, self.path), strict=True)
            return all(os.path.samestat(os.fstat(descriptor), place.stat()) for descriptor, place in found)
        return False

    def _is_marked(self) -> bool:
        return os.pread(self._descriptors[-1], 4096, 0) == self._mark

    def _holder(self) -> str:
        try:
            said = orjson.loads(self.path.read_bytes())
            return f"process {said['pid']} on {said['host']}, since {said['since']}"
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
            return "a process that has only just begun"


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
