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
    records: int = 0  # accepted and not released
    problem: str = ""  # why the segment cannot be read


def inventory() -> list[Entry]:
    """Every segment of this user, by name. Takes no lock that could disturb an owner. Skips links and folders."""
    check_platform()
    found: dict[str, Entry] = {}
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # removed since `glob`
            if _is_own_file(path):
                entry = _read_entry(path.name.removeprefix(PREFIX))
                name = base_name(entry.name)
                whole = found.get(name, Entry(name, 0))
                problem = "; ".join(filter(None, (whole.problem, entry.problem)))
                found[name] = Entry(name, whole.size + entry.size, None, whole.records + entry.records, problem)
    return [replace(entry, owner=owner_of(entry.name)) for entry in found.values()]


def _is_own_file(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _read_entry(name: str) -> Entry:
    """One segment alone. A segment whose name says that it is damaged has a problem, and no records that can be counted."""
    size = os.lstat(path_of(name)).st_size
    damaged = ".damaged-" in name
    try:
        segment = Segment.attach(name)
    except TransportError as error:
        return Entry(name, size, problem=str(error))
    try:
        if not damaged and int.from_bytes(segment.data[:8], "little") != MAGIC:
            return Entry(name, size)
        memory = RingMemory(segment.data)
        records = 0 if damaged else len(memory.live_slots())
        problem = f"the ring of producer {memory.producer.hex()} is damaged ({segment.path})" if damaged else ""
        memory.release_views()
        return Entry(name, size, None, records, problem)
    except TransportError as error:
        return Entry(name, size, problem=f"{segment.path}: {error}")
    finally:
        segment.close(unlink=False)


def clear(name: str, *, drop_records: bool = False) -> int:
    """Remove a segment without an owner, with the rings that belong to it. Returns the bytes of all removed segments.

    Errors: ArenaOwned if the segment has an owner; FileNotFoundError. Without `drop_records` TransportError for accepted
    records, and for a damaged ring, which may hold some.
    """
    check_platform()
    path = path_of(name)
    parts = parts_of(name, "ring", "damaged")
    # If only rings of the name exist, only these are cleared. If nothing exists, `lstat` raises FileNotFoundError.
    if not parts or os.path.lexists(path):
        if not _is_own_file(Path(path)):
            raise TransportError(
                f"{path} is a link or a folder, or of another user: no segment of yours; remove it by hand"
            )
        parts.append(name)
    with contextlib.ExitStack() as locks:
        # Lock the name first, as a new owner does. Remove the name last, so that an interrupted removal can be repeated.
        for part in reversed(parts):
            locks.enter_context(locked(part))
        # Seal before the count. A producer that stores a record later sees the seal and keeps the record for the next owner.
        sealed_before = [(part, _seal(part, True)) for part in parts]
        found = [_read_entry(part) for part in parts]
        records = sum(entry.records for entry in found)
        # A segment that is only a header has no room for records, so its problem does not matter.
        problems = [entry.problem for entry in found if entry.problem and entry.size > HEADER_BYTES]
        if (records or problems) and not drop_records:
            for part, was_sealed in sealed_before:
                _seal(part, was_sealed)
            reasons = [f"holds {records} accepted records that were neither trained nor dropped"] if records else []
            reasons += [f"may hold records that cannot be read: {'; '.join(problems)}"] if problems else []
            raise TransportError(
                f"{path_of(name)} {', and '.join(reasons)}; start the run of this name again to train what can be read, or give "
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
