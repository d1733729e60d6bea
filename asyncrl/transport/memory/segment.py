"""One named shared-memory segment: created whole or not at all, owned by `flock`, adopted after a crash.

    0     magic, version, bytes of data, run (16 random bytes: which life of the name it is), time of creation in ns
    96    CRC32 of these, which everybody who opens the segment compares
    128   secret and tenure of the owner;  1: sealed
    4096  data

Guarantees
* Under its name a segment is always complete: it is allocated, locked and initialised while it has no name yet, and
  then linked, which fails if the name is taken. Nobody ever sees half a header, and no live segment is unlinked.
* The owner is whoever holds the exclusive `flock`: the kernel drops it when the owner dies, however it dies. A stopped
  owner keeps it.
* Pages are allocated at creation (`posix_fallocate`): a full /dev/shm is an error with figures, not a SIGBUS later.
* An owner that forgets to close what it created removes its name at the end of the process, unless `keep_at_exit` is set. A
  segment that it adopted keeps its name, until `close` removes it.
* Files in /dev/shm are opened directly. (`multiprocessing.shared_memory` would register every attached segment with a
  resource tracker that unlinks it when the attaching process ends.)

Dangers: the lock belongs to the open file description, which a forked child shares; so children close theirs at the
fork, and the descriptor is never sent to another process (that one opens the name itself).
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
from dataclasses import dataclass
from pathlib import Path

from ...errors import ArenaOwned, ConfigError, OutOfMemory, PlatformError, SegmentDamaged, TransportError
from .words import Words, fault

DIRECTORY = "/dev/shm"
PREFIX = "asyncrl."
HEADER_BYTES = 4096
# Between the first process and this one. Comparing it costs less than asking the kernel for the number of this process.
forks = 0
_MAGIC = int.from_bytes(b"asyncrl\0", "little")
_VERSION = 2
_STATIC = struct.Struct("<QIQ16sQ")
_CRC_AT, _LIFE_AT = 96, 128
_TENURE_BITS = 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PART = r"\.(?:ring|damaged)-[0-9a-f]{16}"
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,119}}?(?:{_PART})?")

_open_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def check_platform() -> None:
    """Errors: PlatformError where shared memory cannot be relied on."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine != "x86_64":
        raise PlatformError(
            f"the shared-memory transport relies on the store order of Linux x86-64; this is {sys.platform} {machine}. "
            "Training in one process works without it"
        )
    if not os.path.isdir(DIRECTORY):
        raise PlatformError(f"{DIRECTORY} is missing; mount a tmpfs there (containers: --shm-size)")


def path_of(name: str) -> str:
    """Errors: ConfigError for a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"shared-memory name {name!r}: letters, digits, dot, dash and underscore, at most 120, no dot or dash first"
        )
    return f"{DIRECTORY}/{PREFIX}{name}"


def parts_of(name: str, *kinds: str) -> list[str]:
    """The segments that belong to `name` and are of these kinds ("ring", "damaged"), sorted: each is called NAME.KIND-HEX."""
    folder, prefix = os.path.split(path_of(name))
    own = re.compile(rf"{re.escape(prefix)}\.({'|'.join(kinds)})-[0-9a-f]{{16}}")
    return sorted(file.removeprefix(PREFIX) for file in os.listdir(folder) if own.fullmatch(file))


def whole_of(name: str) -> str:
    """The name that this segment belongs to: its own where it is no part."""
    return re.sub(f"{_PART}$", "", name)


def new_part(name: str, kind: str) -> str:
    """A name for one more segment that belongs to `name`; nobody else has it."""
    return f"{name}.{kind}-{secrets.token_hex(8)}"


class Segment:
    """A mapping of one named segment. Make it with `create`, `adopt` or `attach`; close it in the process that made it."""

    def __init__(self, name: str, hold: _Hold) -> None:
        self.name = name
        size, self.run, self.created_ns = _read_header(hold.fd, hold.path)
        self.adopted = False
        self._hold = hold
        self._finalizer = weakref.finalize(self, _Hold.let_go, hold)
        self._map = _map(hold.fd, _total(size))
        buffer = memoryview(self._map)
        self.data = buffer[HEADER_BYTES:]
        self._life = Words(buffer, _LIFE_AT, 2, "segment.life")
        self.closed = False
        _open_segments.add(self)

    # -- the three ways in

    @classmethod
    def create(cls, name: str, size: int, prepare: Callable[[memoryview], None] | None = None) -> Segment:
        """A new segment with room for `size` bytes of data, owned by this process. `prepare` fills them, which are zeros, before
        the name exists.

        Errors: ArenaOwned or TransportError where the name is taken, OutOfMemory where /dev/shm has no room.
        """
        check_platform()
        path = path_of(name)
        fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        hold = _Hold(fd, path, True, os.getpid())
        try:
            _allocate(fd, _total(size), path)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, _header(size), 0)
            segment = cls(name, hold)
            segment._sign()
            if prepare is not None:
                prepare(segment.data)
            fault("segment.link")
            _link(fd, path)
        except FileExistsError:
            hold.give_up()
            raise _taken(name) from None
        except BaseException:
            hold.give_up()
            raise
        hold.keep = False  # from here on the name is ours
        return segment

    @classmethod
    def adopt(cls, name: str) -> Segment:
        """Become the owner of a segment whose owner is gone; everything in it stays, and its name too unless `close` removes it.

        Errors: ArenaOwned where the owner lives, FileNotFoundError where there is none, SegmentDamaged for a bad header.
        """
        check_platform()
        path = path_of(name)
        fd = _lock(name, path)
        hold = _Hold(fd, path, True, os.getpid())
        try:
            segment = cls(name, hold)
            segment._sign()
        except BaseException:
            hold.give_up()
            raise
        segment.adopted = True
        return segment

    @classmethod
    def attach(cls, name: str) -> Segment:
        """Map a segment that somebody else owns. Errors: FileNotFoundError, TransportError for a bad header."""
        check_platform()
        path = path_of(name)
        fd = _open(path)
        hold = _Hold(fd, path, False, os.getpid())
        try:
            return cls(name, hold)
        except BaseException:
            hold.give_up()
            raise

    def populate(self) -> None:
        """Map the pages now: the first touch of each would cost a page fault, in the middle of a put."""
        with contextlib.suppress(OSError, ValueError):  # older kernels do not know it
            self._map.madvise(_POPULATE_WRITE)

    # -- what it says

    @property
    def tenure(self) -> int:
        """How many owners it has had."""
        return self._life[0] & (1 << _TENURE_BITS) - 1

    @property
    def secret(self) -> int:
        """The tenure below 44 random bits, for this owner alone. Whoever cannot open the file cannot guess it."""
        return self._life[0]

    @property
    def path(self) -> str:
        """The path of its file."""
        return self._hold.path

    @property
    def owner(self) -> bool:
        """Whether this process owns it. A forked child does not."""
        return self._hold.owner

    def keep_at_exit(self, keep: bool) -> None:
        """What becomes of the name where the process ends in good order without `close`: kept for the next owner?"""
        self._hold.keep = keep

    @property
    def sealed(self) -> bool:
        """Its owner closes or removed it: what is written now, nobody may ever look for."""
        return bool(self._life.view[1])

    def seal(self, sealed: bool = True) -> None:
        """Before the owner's last look. Whoever writes looks at `sealed` after writing: one of the two sees the other."""
        self._life.store(1, int(sealed))

    def _sign(self) -> None:
        self._life.store(1, 0)
        tenure = (self.tenure + 1) & (1 << _TENURE_BITS) - 1
        self._life.store(0, secrets.randbits(64 - _TENURE_BITS) << _TENURE_BITS | tenure)

    def close(self, *, unlink: bool) -> None:
        """Unmap and let go of the ownership; `unlink` (owner only) removes the name first. Twice is fine.

        Where views of the mapping are still held the memory stays mapped until they are gone; the name does not.
        """
        if self.closed:
            return
        self.closed = True
        _open_segments.discard(self)
        self._finalizer.detach()
        self._hold.keep = not unlink
        self._life.release()
        with contextlib.suppress(BufferError):
            self.data.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        self._hold.let_go()


@dataclass(slots=True)
class _Hold:
    """The descriptor with the lock, and what to do about the name at the end."""

    fd: int
    path: str
    owner: bool
    pid: int
    keep: bool = True  # until it is known that the name is ours to remove

    def let_go(self) -> None:
        if self.fd < 0 or self.pid != os.getpid():
            return  # a forked child: nothing of this is its own
        if self.owner and not self.keep and _still_named(self.fd, self.path):
            os.pwrite(self.fd, (1).to_bytes(8, "little"), _LIFE_AT + 8)  # sealed, for those who still map it
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self.fd)
        self.fd = -1

    def give_up(self) -> None:
        """What was begun failed. The name stays, and whoever looks for the half-made segment finds nothing to let go of."""
        self.keep = True
        self.let_go()

    def forked(self) -> None:
        """In a forked child: give up the shared file description, so that the lock dies with the parent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.owner = False


def _after_fork_in_child() -> None:
    global forks
    forks += 1
    for segment in list(_open_segments):
        segment._hold.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _allocate(fd: int, total: int, path: str) -> None:
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        room = os.statvfs(DIRECTORY)
        raise OutOfMemory(
            f"{path} needs {total:,} bytes, but {DIRECTORY} has {room.f_bavail * room.f_frsize:,} free of "
            f"{room.f_blocks * room.f_frsize:,}; make it smaller, run `asyncrl shm clear`, or enlarge "
            f"{DIRECTORY} (mount -o remount,size=..., containers: --shm-size)"
        ) from error


def _total(size: int) -> int:
    return (HEADER_BYTES + size + 4095) & -4096


def _header(size: int) -> bytes:
    static = _STATIC.pack(_MAGIC, _VERSION, size, secrets.token_bytes(16), time.time_ns()).ljust(_CRC_AT, b"\0")
    return static + zlib.crc32(static).to_bytes(4, "little")


def _read_header(fd: int, path: str) -> tuple[int, bytes, int]:
    """(bytes of data, run, time of creation). Errors: SegmentDamaged; TransportError where another version wrote it."""
    raw, found = os.pread(fd, _CRC_AT + 4, 0), os.fstat(fd).st_size
    if len(raw) < _CRC_AT + 4:
        raise SegmentDamaged(f"{path} is no segment of asyncrl: it has {found} bytes")
    magic, version, size, run, created = _STATIC.unpack_from(raw)
    if magic != _MAGIC:
        raise SegmentDamaged(f"{path} is no segment of asyncrl: it begins with {magic:#x}")
    if version != _VERSION:
        raise TransportError(
            f"{path} has layout version {version}, this program reads {_VERSION}: use the same asyncrl on both sides, or remove "
            "what an earlier one left with `asyncrl shm clear`"
        )
    if zlib.crc32(raw[:_CRC_AT]) != int.from_bytes(raw[_CRC_AT:], "little"):
        raise SegmentDamaged(f"{path}: the CRC32 of its header is wrong")
    if found != _total(size):
        raise SegmentDamaged(f"{path}: {size} bytes of data do not make a file of {found} bytes")
    return size, run, created


def owner_of(fd: int) -> int | None:
    """The process that holds the `flock`, as far as /proc shows: asking by locking would disturb a new owner.

    0 where somebody unknown holds it (another process namespace); None where nobody does.
    """
    status = os.fstat(fd)
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == status.st_ino:
                major, minor, _ = fields[5].split(":")
                if os.makedev(int(major, 16), int(minor, 16)) == status.st_dev:
                    return max(int(fields[4]), 0)
    return None


def first_gap(taken: Iterable[tuple[int, int]], size: int, room: int) -> int | None:
    """The lowest multiple of 64 at which `size` of `room` bytes are free; None where nowhere. `taken`: (start, size) each."""
    start = 0
    for begin, length in sorted(taken):
        if begin - start >= size:
            return start
        start = max(start, (begin + length + 63) & -64)
    return start if room - start >= size else None


def _map(fd: int, total: int) -> mmap.mmap:
    """Python's mmap keeps a duplicate of its descriptor, which would keep the lock: so it gets another description."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(other, total)
    finally:
        os.close(other)


def _link(fd: int, path: str) -> None:
    """Give the nameless file its name. With directory descriptors `os.link` follows the link in /proc, as it must."""
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(
            f"/proc/self/fd/{fd}",
            os.path.basename(path),
            src_dir_fd=directory,
            dst_dir_fd=directory,
            follow_symlinks=True,
        )
    finally:
        os.close(directory)


def _open(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise TransportError(f"{path} belongs to another user; choose another name")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(name: str, path: str) -> int:
    """The file of this name, opened and locked. Errors: ArenaOwned, FileNotFoundError."""
    while True:
        fd = _open(path)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(name, locked=True) from None
            # Else the old owner unlinked it between our open and our lock.
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
    """Nobody can own the segment of this name meanwhile. Errors: ArenaOwned, FileNotFoundError."""
    fd = _lock(name, path_of(name))
    try:
        yield
    finally:
        os.close(fd)


def _taken(name: str, *, locked: bool = False) -> TransportError:
    path = path_of(name)
    try:
        fd = _open(path)
    except FileNotFoundError:
        return ArenaOwned(f"{path} was taken a moment ago and is gone again; try again")
    try:
        pid = owner_of(fd)
    finally:
        os.close(fd)
    if pid is None and not locked:
        return TransportError(
            f"{path} exists and nobody owns it: adopt it, or remove it with `asyncrl shm clear {name}`"
        )
    who = f"process {pid}" if pid else "a process that cannot be seen from here"
    return ArenaOwned(f"{path} is owned by {who}, which lives (perhaps stopped); use another name or end it")
