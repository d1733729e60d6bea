"""A named segment of shared memory: created whole or not at all, owned through `flock`, adopted by a new owner after a crash.

    byte 0  magic, version, bytes of data, random id (16 bytes, drawn at creation), time of creation in ns
    96      CRC32 of bytes 0 to 95; every process that opens the segment checks the CRC32
    128     secret (64 random bits, new for each owner);  seal (1: the owner reads no more)
    4096    data

Guarantees
* A segment under its name is always complete. `create` allocates, locks and initialises a file without a name. Then
  `create` links the file to the name, which fails if the name exists. While the owner lives, only the owner unlinks the name.
* The owner holds the exclusive `flock`. The kernel drops the lock at any death of the owner. A stopped (SIGSTOP) owner keeps it.
* Pages are allocated at creation (`posix_fallocate`). So if /dev/shm is full, `create` raises an error, and no SIGBUS comes later.
* A process that ends without `close`, for example by a kill, leaves its names in /dev/shm.
* Files in /dev/shm are opened directly. `multiprocessing.shared_memory` would register each attached segment with a
  resource tracker, and the tracker would unlink the segment when the attaching process ends.

Danger: the lock belongs to the open file description, which a forked child shares. So a child closes the segments' descriptors.
For the same reason no descriptor is sent to another process: the other process opens the name itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...errors import ArenaOwned, ConfigError, OutOfMemory, PlatformError, SegmentDamaged, TransportError
from .words import Words, fault

DIRECTORY = "/dev/shm"
PREFIX = "asyncrl."
HEADER_BYTES = 4096
# A fork adds 1 in the child. An object that keeps the number at its creation can tell that it is now in a forked child.
forks = 0
_MAGIC = int.from_bytes(b"asyncrl\0", "little")
_VERSION = 2
_STATIC = struct.Struct("<QIQ16sQ")
_CRC_AT, _OWNER_WORDS_AT = 96, 128
_PART = r"\.(?:ring|damaged)-[0-9a-f]{16}"
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,119}}?(?:{_PART})?")

_open_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def check_platform() -> None:
    """Errors: PlatformError on a platform without reliable shared memory."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine != "x86_64":
        raise PlatformError(
            f"the shared-memory transport relies on the store order of Linux x86-64; this is {sys.platform} {machine}. "
            "Without this transport, training in one process still works"
        )
    if not os.path.isdir(DIRECTORY):
        raise PlatformError(f"{DIRECTORY} is missing; mount a tmpfs there (containers: --shm-size)")


def path_of(name: str) -> str:
    """The path of the segment `name`. Errors: ConfigError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"shared-memory name {name!r} is invalid: use 1 to 120 letters, digits, dots, dashes and underscores; the first "
            "character must not be a dot or a dash"
        )
    return f"{DIRECTORY}/{PREFIX}{name}"


def parts_of(name: str, *kinds: str) -> list[str]:
    """The sorted names of all segments NAME.KIND-HEX whose NAME is `name` and whose KIND ("ring", "damaged") is in `kinds`."""
    folder, prefix = os.path.split(path_of(name))
    part = re.compile(rf"{re.escape(prefix)}\.({'|'.join(kinds)})-[0-9a-f]{{16}}")
    return sorted(file.removeprefix(PREFIX) for file in os.listdir(folder) if part.fullmatch(file))


def base_name(name: str) -> str:
    """The name without its suffix .KIND-HEX, if there is one."""
    return re.sub(f"{_PART}$", "", name)


def new_part(name: str, kind: str) -> str:
    """A new unique name NAME.KIND-HEX for a segment that belongs to `name`."""
    return f"{name}.{kind}-{secrets.token_hex(8)}"


class Segment:
    """This process's mapping of a segment, made by `create`, `adopt` or `attach`. Close it in the process that made it."""

    def __init__(self, name: str, fd: int, *, owner: bool) -> None:
        """`fd` belongs to the segment from now on, and is closed if the constructor fails."""
        self.name, self.path, self.owner, self._fd = name, path_of(name), owner, fd
        try:
            size, self.random_id = _read_header(fd, self.path)
            self._map = _map_unlocked(fd, _file_bytes(size))
        except BaseException:
            os.close(fd)
            raise
        self.adopted = self.closed = False
        buffer = memoryview(self._map)
        self.data = buffer[HEADER_BYTES:]
        self._owner_words = Words(buffer, _OWNER_WORDS_AT, 2, "segment.life")
        _open_segments.add(self)

    # -- the three constructors

    @classmethod
    def create(cls, name: str, size: int, prepare: Callable[[memoryview], None] | None = None) -> Segment:
        """A new segment with room for `size` bytes of data, owned by this process.

        `prepare(data)` initialises the data, which are zeros, before the name exists.
        Errors: ArenaOwned if the name has an owner; TransportError if it exists without owner; OutOfMemory if /dev/shm is full.
        """
        check_platform()
        path = path_of(name)
        fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if (error := allocate(fd, total := _file_bytes(size))) is not None:
                space = os.statvfs(DIRECTORY)
                raise OutOfMemory(
                    f"{path} needs {total:,} bytes, but {DIRECTORY} has {space.f_bavail * space.f_frsize:,} free of "
                    f"{space.f_blocks * space.f_frsize:,}; make the segment smaller, run `asyncrl shm clear`, or enlarge "
                    f"{DIRECTORY} (mount -o remount,size=..., containers: --shm-size)"
                ) from error
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, _header(size), 0)
        except BaseException:
            os.close(fd)
            raise
        segment = cls(name, fd, owner=True)
        try:
            segment._begin_tenure()
            if prepare is not None:
                prepare(segment.data)
            fault("segment.link")
            _link(fd, path)
        except BaseException as error:
            segment.close(unlink=False)
            if isinstance(error, FileExistsError):
                raise _name_in_use_error(name) from None
            raise
        return segment

    @classmethod
    def adopt(cls, name: str) -> Segment:
        """Become the owner of a segment without a live owner. The data stay as they are.

        Errors: ArenaOwned if the owner lives; SegmentDamaged for a bad header; and those of `attach`.
        """
        check_platform()
        segment = cls(name, _lock(name, path_of(name)), owner=True)
        segment._begin_tenure()
        segment.adopted = True
        return segment

    @classmethod
    def attach(cls, name: str) -> Segment:
        """Map a segment without owning it. Errors: FileNotFoundError; TransportError for a bad header or a file of another user."""
        check_platform()
        return cls(name, _open(path_of(name)), owner=False)

    # -- state and ownership

    @property
    def secret(self) -> int:
        """A random number of the present owner. Only processes that can open the file know it."""
        return self._owner_words[0]

    @property
    def sealed(self) -> bool:
        """Whether the owner has stopped reading, or the segment was removed. If so, data that are written now may never be read."""
        return bool(self._owner_words.view[1])

    def seal(self, sealed: bool = True) -> None:
        """Set or remove the seal. Seal before the last read: if a writer sees no seal after its write, the read finds the write."""
        self._owner_words.store(1, int(sealed))

    def _begin_tenure(self) -> None:
        self._owner_words.store(1, 0)
        self._owner_words.store(0, secrets.randbits(64))

    def close(self, *, unlink: bool) -> None:
        """Unmap the segment and release the lock. `unlink`: an owner removes the name before it releases the lock. Closing twice is
        fine. The memory stays mapped until the last view of the mapping is gone."""
        if self.closed:
            return
        self.closed = True
        _open_segments.discard(self)
        self._owner_words.release()
        with contextlib.suppress(BufferError):
            self.data.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._fd < 0:
            return  # in a forked child
        if unlink and self.owner and _still_named(self._fd, self.path):
            os.pwrite(self._fd, (1).to_bytes(8, "little"), _OWNER_WORDS_AT + 8)  # the seal, for attached processes
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._fd)


def _after_fork_in_child() -> None:
    global forks
    forks += 1
    for segment in list(_open_segments):
        # Without this the child would keep the lock after the end of the parent.
        if segment._fd >= 0:
            os.close(segment._fd)
        segment._fd = -1


os.register_at_fork(after_in_child=_after_fork_in_child)


def allocate(fd: int, total: int) -> OSError | None:
    """Allocate the first `total` bytes of a file in memory. Returns the error if memory has no room for them, else None."""
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        return error
    return None


def _file_bytes(size: int) -> int:
    return (HEADER_BYTES + size + 4095) & -4096


def _header(size: int) -> bytes:
    static = _STATIC.pack(_MAGIC, _VERSION, size, secrets.token_bytes(16), time.time_ns()).ljust(_CRC_AT, b"\0")
    return static + zlib.crc32(static).to_bytes(4, "little")


def _read_header(fd: int, path: str) -> tuple[int, bytes]:
    """(bytes of data, random id). Errors: SegmentDamaged; TransportError for another layout version."""
    raw, file_size = os.pread(fd, _CRC_AT + 4, 0), os.fstat(fd).st_size
    if len(raw) < _CRC_AT + 4:
        raise _damaged(path, f"it has {file_size} bytes")
    magic, version, size, random_id, _created = _STATIC.unpack_from(raw)
    if magic != _MAGIC:
        raise _damaged(path, f"it begins with {magic:#x}")
    if version != _VERSION:
        raise TransportError(
            f"{path} has layout version {version}, but this program reads version {_VERSION}: use the same asyncrl in all "
            "processes, or remove segments of an earlier asyncrl with `asyncrl shm clear`"
        )
    if zlib.crc32(raw[:_CRC_AT]) != int.from_bytes(raw[_CRC_AT:], "little"):
        raise _damaged(path, "the CRC32 of its header is wrong")
    if file_size != _file_bytes(size):
        raise _damaged(path, f"{size} bytes of data do not make a file of {file_size} bytes")
    return size, random_id


def _damaged(path: str, problem: str) -> SegmentDamaged:
    name = Path(path).name.removeprefix(PREFIX)
    return SegmentDamaged(
        f"{path} is not a complete segment of asyncrl: {problem}; use another name, or remove it with `asyncrl shm clear {name} "
        "--drop-records`"
    )


def owner_of(name: str) -> int | None:
    """The pid of the segment's owner. Read from /proc/locks, because trying the lock could make a new owner fail.

    0: the kernel lists the lock without a pid. None: no lock is listed, or no segment exists. The list omits owners in outer pid
    namespaces.
    """
    try:
        status = os.lstat(path_of(name))
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == status.st_ino:
                major, minor, _inode = fields[5].split(":")
                if os.makedev(int(major, 16), int(minor, 16)) == status.st_dev:
                    return max(int(fields[4]), 0)
    return None


def first_gap(taken: Iterable[tuple[int, int]], size: int, capacity: int) -> int | None:
    """The lowest offset, a multiple of 64, at which `size` of `capacity` bytes are free, or None. `taken`: pairs (start, size)."""
    start = 0
    for begin, length in sorted(taken):
        if begin - start >= size:
            return start
        start = max(start, (begin + length + 63) & -64)
    return start if capacity - start >= size else None


def _map_unlocked(fd: int, total: int) -> mmap.mmap:
    """Map the file by a new descriptor. mmap keeps a duplicate of its descriptor, and a duplicate of `fd` would hold the lock."""
    unlocked_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(unlocked_fd, total)
    finally:
        os.close(unlocked_fd)


def _link(fd: int, path: str) -> None:
    """Link the unnamed file to `path`. `os.link` follows the link in /proc only if it gets directory descriptors."""
    source, name = f"/proc/self/fd/{fd}", os.path.basename(path)
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _open(path: str) -> int:
    not_ours = TransportError(f"{path} is a link or a folder, or of another user; choose another name")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ELOOP, errno.EISDIR):
            raise not_ours from error
        raise
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise not_ours
    return fd


def _lock(name: str, path: str) -> int:
    """The segment's file, opened and locked. Errors: ArenaOwned, FileNotFoundError."""
    while True:
        fd = _open(path)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _name_in_use_error(name, is_locked=True) from None
            # The previous owner may have unlinked the file between our open and our lock: then try again.
            if _still_named(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _still_named(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of the segment, so that no other process becomes its owner. Errors: ArenaOwned, FileNotFoundError."""
    fd = _lock(name, path_of(name))
    try:
        yield
    finally:
        os.close(fd)


def _name_in_use_error(name: str, *, is_locked: bool = False) -> TransportError:
    path, pid = path_of(name), owner_of(name)
    if not os.path.lexists(path):
        return ArenaOwned(f"{path} was owned a moment ago and has just been removed; try again")
    if pid is None and not is_locked:
        return TransportError(
            f"{path} exists and nobody owns it: adopt it, or remove it with `asyncrl shm clear {name}`"
        )
    holder = f"process {pid}" if pid else "a process that cannot be seen from here"
    return ArenaOwned(f"{path} is owned by {holder}, which lives (perhaps stopped); end it or use another name")
