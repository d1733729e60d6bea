"""Lists the segments of shared memory under asyncrl's prefix, their owners and contents, and removes those without an owner."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import TransportError
from .memory.segment import (
    DIRECTORY,
    HEADER_BYTES,
    PREFIX,
    Segment,
    base_name,
    check_platform,
    locked,
    owner_of,
    parts_of,
    path_of,
)
from .rings.ring import MAGIC, RingMemory


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment, with the rings that belong to it. `owner`: see `owner_of`."""

    name: str
    size: int  # bytes
    owner: int | None = None
    rings: int = 0
    records: int = 0  # accepted and not released
    tenure: int = 0  # number of owners so far
    created_ns: int = 0
    problem: str = ""  # why the segment cannot be read

    @property
    def free(self) -> bool:
        """No owner is listed. `clear` still refuses a segment whose hidden owner holds the lock."""
        return self.owner is None


def inventory() -> list[Entry]:
    """Every segment of this user, by name. Takes no lock that could disturb an owner. Skips links and folders."""
    check_platform()
    found: dict[str, Entry] = {}
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # removed since `glob`
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                part = path.name.removeprefix(PREFIX)
                entry, name = _read_entry(part), base_name(part)
                found[name] = _merge(found[name], entry) if name in found else replace(entry, name=name)
    return [replace(entry, owner=_owner(entry.name)) for entry in found.values()]


def _owner(name: str) -> int | None:
    try:
        fd = os.open(path_of(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return owner_of(fd)
    finally:
        os.close(fd)


def _merge(whole: Entry, part: Entry) -> Entry:
    return replace(
        whole,
        size=whole.size + part.size,
        rings=whole.rings + part.rings,
        records=whole.records + part.records,
        problem="; ".join(filter(None, (whole.problem, part.problem))),
    )


def _read_entry(name: str) -> Entry:
    entry = Entry(name, os.lstat(path_of(name)).st_size)
    try:
        segment = Segment.attach(name)
    except TransportError as error:
        return replace(entry, problem=str(error))
    try:
        entry = replace(entry, tenure=segment.tenure, created_ns=segment.created_ns)
        return _with_ring(entry, segment.data)
    finally:
        segment.close(unlink=False)


def _with_ring(entry: Entry, data: memoryview) -> Entry:
    """If the segment is a ring or was renamed as damaged, add the number of its records, or the problem."""
    damaged = ".damaged-" in entry.name
    if not damaged and int.from_bytes(data[:8], "little") != MAGIC:
        return entry
    try:
        memory = RingMemory(data)
    except TransportError as error:
        return replace(entry, rings=1, problem=f"{path_of(entry.name)}: {error}")
    problem = f"the ring of producer {memory.producer.hex()} is damaged ({path_of(entry.name)})" if damaged else ""
    records = 0 if damaged else len(memory.live_slots())
    memory.release_views()
    return replace(entry, rings=1, records=records, problem=problem)


def clear(name: str, *, drop_records: bool = False) -> int:
    """Remove a segment without an owner, with the rings that belong to it. Returns the bytes of all removed segments.

    Errors: ArenaOwned if the segment has an owner; TransportError for accepted records, or a damaged ring that may hold some, if
    `drop_records` is not set; FileNotFoundError.
    """
    check_platform()
    path = path_of(name)
    parts = parts_of(name, "ring", "damaged")
    # If only rings of the name exist, only these are cleared. If nothing exists, `lstat` raises FileNotFoundError.
    if not parts or os.path.lexists(path):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise TransportError(
                f"{path} is a link or a folder, or of another user: no segment of yours; remove it by hand"
            )
        parts.append(name)
    with contextlib.ExitStack() as locks:
        # Lock the name first, as a new owner does. Remove the name last, so that an interrupted removal can be repeated.
        for part in reversed(parts):
            locks.enter_context(locked(part))
        return _clear_locked(name, parts, drop_records)


def _clear_locked(name: str, parts: list[str], drop_records: bool) -> int:
    # Seal before the count. A producer that stores a record later sees the seal and keeps the record for the next owner.
    sealed_before = [(part, _seal(part, True)) for part in parts]
    found = [_read_entry(part) for part in parts]
    records = sum(entry.records for entry in found)
    # A segment that is only a header has no room for records, so its problem does not matter.
    problems = [entry.problem for entry in found if entry.problem and entry.size > HEADER_BYTES]
    if (records or problems) and not drop_records:
        for part, was_sealed in sealed_before:
            _seal(part, was_sealed)
        words = [f"holds {records} accepted records that were neither trained nor dropped"] if records else []
        words += [f"may hold records that cannot be read: {'; '.join(problems)}"] if problems else []
        raise TransportError(
            f"{path_of(name)} {', and '.join(words)}; start the run of this name again to train what can be read, or give "
            "--drop-records to lose them"
        )
    for part in parts:
        os.unlink(path_of(part))
    return sum(entry.size for entry in found)


def _seal(name: str, sealed: bool) -> bool:
    """Seal or unseal a segment. Returns whether it was sealed before."""
    try:
        segment = Segment.attach(name)
    except TransportError:
        return False
    was_sealed = segment.sealed
    segment.seal(sealed)
    segment.close(unlink=False)
    return was_sealed
