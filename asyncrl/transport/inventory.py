"""Lists asyncrl's segments of shared memory with their owners and contents, and removes segments without an owner."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError, TransportError
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
    """One segment, counted together with the rings that belong to it. `owner`: see `owner_of`."""

    name: str
    size: int  # bytes
    owner: int | None = None
    records: int = 0  # accepted by a ring and not released
    problem: str = ""  # why it or one of its rings cannot be read


def inventory() -> list[Entry]:
    """Every segment of this user, sorted by name. Skips links and folders. Takes no lock: a lock could make a new owner fail."""
    check_platform()
    found: dict[str, Entry] = {}
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}*")):
        # FileNotFoundError: the file was removed after `glob`. ConfigError: no segment can have this name.
        with contextlib.suppress(FileNotFoundError, ConfigError):
            if _is_own_file(path):
                entry = _read_entry(path.name.removeprefix(PREFIX))
                name = base_name(entry.name)
                whole = found.get(name, Entry(name, 0))
                problem = "; ".join(filter(None, (whole.problem, entry.problem)))
                found[name] = Entry(name, whole.size + entry.size, None, whole.records + entry.records, problem)
    return [replace(found[name], owner=owner_of(name)) for name in sorted(found)]


def _is_own_file(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _read_entry(name: str) -> Entry:
    """One segment without its rings. For a segment of the kind "damaged": a problem, and 0 records."""
    size = os.lstat(path_of(name)).st_size
    damaged = name.removeprefix(base_name(name)).startswith(".damaged-")
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

    Errors: ArenaOwned if a segment to remove has an owner; FileNotFoundError; TransportError for a link, a folder or a file of
    another user. Without `drop_records` also TransportError if a segment holds accepted records or is damaged.
    """
    check_platform()
    path = path_of(name)
    parts = parts_of(name, "ring", "damaged")
    # If only rings of the name exist, clear only these. If nothing exists, `_is_own_file` raises FileNotFoundError.
    if not parts or os.path.lexists(path):
        parts.append(name)
    for path in map(path_of, parts):
        if not _is_own_file(Path(path)):
            raise TransportError(
                f"{path} is a link or a folder, or of another user: no segment of yours; remove it by hand"
            )
    with contextlib.ExitStack() as locks:
        # The segment `name` is the last part. Lock it first, as a new owner does; remove it last, so that `clear` can be repeated.
        for part in reversed(parts):
            locks.enter_context(locked(part))
        # Seal before the count. A `put` that stores its record after the count sees the seal, and waits for a new owner.
        sealed_before = [(part, _set_seal(part, True)) for part in parts]
        found = [_read_entry(part) for part in parts]
        records = sum(entry.records for entry in found)
        # A segment that is only a header has no room for records, so its problem does not matter.
        problems = [entry.problem for entry in found if entry.problem and entry.size > HEADER_BYTES]
        if (records or problems) and not drop_records:
            for part, was_sealed in sealed_before:
                _set_seal(part, was_sealed)
            reasons = [f"holds {records} accepted records that were neither trained nor dropped"] if records else []
            reasons += [f"may hold records that cannot be read: {'; '.join(problems)}"] if problems else []
            raise TransportError(
                f"{path_of(name)} {', and '.join(reasons)}; start the run of this name again to train what can be read, or give "
                "--drop-records to lose them"
            )
        for part in parts:
            os.unlink(path_of(part))
    return sum(entry.size for entry in found)


def _set_seal(name: str, sealed: bool) -> bool:
    """Seal or unseal a segment. Returns whether it was sealed before; False if it cannot be attached."""
    try:
        segment = Segment.attach(name)
    except TransportError:
        return False
    was_sealed = segment.sealed
    segment.seal(sealed)
    segment.close(unlink=False)
    return was_sealed
