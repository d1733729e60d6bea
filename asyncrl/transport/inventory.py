"""What lies in shared memory under asyncrl's prefix: who owns it, what is in it, and how to clear what nobody owns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArenaOwned, TransportError
from .memory.arena import Arena
from .memory.blocks import SLAB
from .memory.header import HEADER_BYTES
from .memory.owners import owner_of
from .memory.segment import DIRECTORY, PREFIX, check_platform, path_of
from .rings.adoption import ASIDE
from .rings.ring import TAG, RingMemory


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment. `owner`: a process number, 0 for one that cannot be seen from here, None for nobody."""

    name: str
    size: int  # bytes
    owner: int | None
    used: int = 0  # bytes in allocated blocks
    blocks: int = 0
    rings: int = 0
    records: int = 0  # accepted and not released
    tenure: int = 0
    created_ns: int = 0
    problem: str = ""  # why it cannot be read

    @property
    def free(self) -> bool:
        """Nobody owns it: it may be cleared."""
        return self.owner is None


def inventory() -> list[Entry]:
    """Every segment of this user, by name. Looks only: it takes no lock that could disturb an owner. What is no file is no segment:
    a link is not followed."""
    check_platform()
    found = []
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # it ended while we looked
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                found.append(_entry(path.name.removeprefix(PREFIX), path))
    return found


def _entry(name: str, path: Path) -> Entry:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        owner, size = owner_of(fd), os.fstat(fd).st_size
    finally:
        os.close(fd)
    try:
        arena = Arena.attach(name)
    except TransportError as error:
        return Entry(name, size, owner, problem=str(error))
    try:
        blocks = arena.blocks()
        rings, records, problem = _rings(arena)
        return Entry(
            name=name, size=size, owner=owner, used=sum(block.size for block in blocks), blocks=len(blocks), rings=rings,
            records=records, tenure=arena.segment.tenure, created_ns=arena.segment.geometry.created_ns, problem=problem,
        )  # fmt: skip
    finally:
        arena.close(keep=True)


def _rings(arena: Arena) -> tuple[int, int, str]:
    """(rings, records that are accepted and not released, what is damaged)."""
    rings = records = 0
    problems = []
    for block in arena.blocks():
        if block.tag == ASIDE:
            producer = bytes(arena.bytes_of(block)[32:48]).hex()
            problems.append(f"the ring of producer {producer} (block {block.index}) is damaged and was set aside")
        if block.tag != TAG:
            continue
        rings += 1
        try:
            memory = RingMemory(arena.bytes_of(block))
        except TransportError as error:
            problems.append(str(error))
            continue
        records += len(memory.live())
        memory.release_views()
    start = arena.segment.geometry.data
    if arena.table.unplaced and arena.segment.buffer[start : start + len(SLAB)] != SLAB:
        problems.append(f"{len(arena.table.unplaced)} entries of the block table were written over")
    return rings, records, "; ".join(problems)


def clear(name: str, *, drop_records: bool = False) -> int:
    """Remove a segment that nobody owns. Returns its size in bytes.

    Errors: ArenaOwned where somebody does; TransportError where accepted records lie in it, or may lie in what is damaged, and
    `drop_records` is not set; FileNotFoundError.
    """
    check_platform()
    path = path_of(name)
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise TransportError(
            f"{path} is a link or a folder, or of another user: no segment of yours; remove it by hand"
        )
    try:
        arena = Arena.adopt(name)
    except ArenaOwned:
        raise
    except TransportError as error:  # not readable, but somebody may hold it all the same
        return _clear_unreadable(name, str(error), drop_records)
    segment = arena.segment
    size = segment.geometry.total
    # Sealed first: a producer that puts a record after our count looks at the seal after it stored, and puts it elsewhere.
    segment.seal()
    _, records, problem = _rings(arena)
    if (records or problem) and not drop_records:
        segment.unseal()
        arena.close(keep=True)
        found = [f"holds {records} accepted records that were neither trained nor dropped"] if records else []
        found += [f"may hold others: {problem}"] if problem else []
        raise TransportError(
            f"{segment.path} {', and '.join(found)}; start the run of this name again to train what can be read, or give "
            "--drop-records to lose them"
        )
    arena.close()
    return size


def _clear_unreadable(name: str, problem: str, drop_records: bool) -> int:
    path = path_of(name)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArenaOwned(f"{path} is owned by process {owner_of(fd) or '(unknown)'}, which lives") from None
        size = os.fstat(fd).st_size
        if size > HEADER_BYTES and not drop_records:
            raise TransportError(f"{problem}. Accepted records may lie in it; give --drop-records to lose them")
        os.unlink(path)
        return size
    finally:
        os.close(fd)
