"""One live run per run directory: a lock that the kernel gives back when its process dies, however it dies.

The lock is `flock` on `runs/.<name>.lock`, beside the directory and not in it, so that it stays where it is when an old run
is moved aside. The file says who holds it. A run that ends removes it; one that was killed leaves it, unlocked.
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

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Of one process for one run directory. Other ranks of the run take none: only rank 0 writes there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory.with_name(f".{directory.name}.lock")
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take it at once or not at all. Returns a sentence where the file system has no locks: then nothing is held.

        Errors: ConfigError that names the holder; OSError where the file cannot be made.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)  # closed by exec: no child keeps it
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise ConfigError(
                    f"{self._directory} is in use by another run: {holder}; wait for its end, stop it, or choose another run.name"
                ) from None
            except OSError as error:
                os.close(descriptor)
                if error.errno in _UNSUPPORTED:
                    return f"{self.path} cannot be locked ({error.strerror}): start no second run in {self._directory}"
                raise
            if self._is_in_place(descriptor):
                break
            os.close(descriptor)  # its holder removed it between our open and our lock
        self._descriptor = descriptor
        _held.add(self)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}), 0)
        return None

    def release(self) -> None:
        """Give it back and remove the file. Twice is fine."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(
            OSError
        ):  # removed while it is still locked: nobody can have locked this file meanwhile
            self.path.unlink()
        os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: the descriptor is a copy, and with it the lock would outlive the run."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _holder(descriptor: int) -> str:
    try:
        said = orjson.loads(os.pread(descriptor, 4096, 0))
        return f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return "a process that has only just begun"


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
