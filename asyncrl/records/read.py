"""Reading a record in place: the header and the table are checked, the sections are views of the buffer."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RecordError
from .layout import (
    CHECKSUMMED,
    CRC_OFFSET,
    DTYPES,
    ENTRY,
    HEADER,
    MAGIC,
    NEEDED,
    SPECS,
    USER_SECTIONS,
    VERSION,
    Axis,
    Section,
)

_ROWS, _ROW_BYTES, _BYTES = int(Axis.ROWS), int(Axis.ROW_BYTES), int(Axis.BYTES)  # enum look-ups are slow here
_LENGTHS, _MEMBERS, _TOKENS = int(Section.LENGTHS), int(Section.MEMBERS), int(Section.TOKENS)
_FORMS = {int(section): (int(spec.axis), spec.dtypes, spec.inner) for section, spec in SPECS.items()}

Identity = tuple[int, int, int]  # (epoch, group, member)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """`n` members of one group, as views of the buffer that was read: valid as long as the lease on that buffer.

    Arrays of token sections are jagged: member `i` (by position) owns `starts[i] : starts[i + 1]` of the first dimension.
    """

    group: int
    epoch: int
    group_size: int
    policy_version: int  # -1: the producer did not know
    producer: bytes
    sequence: int
    written_ns: int
    version: int  # of the schema that wrote it
    members: npt.NDArray[np.int32]  # [n]
    lengths: npt.NDArray[np.int32]  # [n]
    starts: npt.NDArray[np.int64]  # [n + 1]
    arrays: Mapping[int, npt.NDArray[Any]]  # ROWS [n, ...] and TOKENS [T, ...]
    strings: Mapping[int, memoryview]  # BYTES and ROW_BYTES, raw
    skipped: tuple[int, ...]  # sections of a newer schema

    @property
    def size(self) -> int:
        """Members in this record, n."""
        return len(self.members)

    def identities(self) -> Iterator[Identity]:
        """(epoch, group, member) of every member."""
        return ((self.epoch, self.group, member) for member in self.members.tolist())

    def column(self, section: int, position: int) -> npt.NDArray[Any] | None:
        """One member's part of a TOKENS section, without copying. None where the record lacks the section."""
        array = self.arrays.get(section)
        return None if array is None else array[self.starts[position] : self.starts[position + 1]]

    def row_bytes(self, section: int, position: int) -> bytes | None:
        """One member's byte string of a ROW_BYTES section, copied."""
        raw = self.strings.get(section)
        if raw is None:
            return None
        ends = np.frombuffer(raw, "<i8", self.size)
        base = 8 * self.size
        start = int(ends[position - 1]) if position else 0
        return bytes(raw[base + start : base + int(ends[position])])


def read(buffer: memoryview | bytes | bytearray, *, sequence: int | None = None, checksum: bool = False) -> Record:
    """The record at the start of `buffer`.

    `sequence`: what the ring expects there. `checksum`: also compare the payload's CRC32 where the writer set it.
    Errors: RecordError that says what is wrong: torn, damaged, of another sequence, or for a newer reader.
    """
    view = memoryview(buffer).toreadonly()
    if len(view) < HEADER.size:
        raise RecordError(f"a record has at least {HEADER.size} bytes, found {len(view)}")
    (
        magic, version, oldest, header_bytes, entry_bytes, sections, record_bytes, crc, payload_crc,
        flags, n, group_size, _, found, epoch, group, policy_version, tokens, producer, written_ns,
    ) = HEADER.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise RecordError(f"no record begins here: magic {magic:#010x}, expected {MAGIC:#010x}")
    if oldest > VERSION:
        raise RecordError(f"written by schema version {version} for readers from {oldest} on; this one reads {VERSION}")
    table_end = header_bytes + entry_bytes * sections
    if header_bytes < HEADER.size or entry_bytes < ENTRY.size or not table_end <= record_bytes <= len(view):
        raise RecordError(
            f"sizes do not agree: header {header_bytes}, {sections} entries of {entry_bytes}, record {record_bytes}, "
            f"{len(view)} bytes here"
        )
    if _header_crc(view, table_end) != crc:
        raise RecordError("the CRC32 of header and section table is wrong: torn or damaged")
    if sequence is not None and found != sequence:
        raise RecordError(f"sequence {sequence} expected here, found {found}")
    if checksum and flags & CHECKSUMMED and zlib.crc32(view[table_end:record_bytes]) != payload_crc:
        raise RecordError("the CRC32 of the payload is wrong: torn or damaged")
    arrays: dict[int, npt.NDArray[Any]] = {}
    strings: dict[int, memoryview] = {}
    skipped: list[int] = []
    whole = view[:record_bytes]
    for index in range(sections):
        entry = ENTRY.unpack_from(view, header_bytes + index * entry_bytes)
        _section(whole, entry, n, tokens, arrays, strings, skipped)
    members, lengths, starts = _members(arrays, n, group_size, tokens)
    return Record(
        group=group, epoch=epoch, group_size=group_size, policy_version=policy_version, producer=producer,
        sequence=found, written_ns=written_ns, version=version, members=members, lengths=lengths, starts=starts,
        arrays=arrays, strings=strings, skipped=tuple(skipped),
    )  # fmt: skip


def _header_crc(view: memoryview, table_end: int) -> int:
    crc = zlib.crc32(view[:CRC_OFFSET])
    crc = zlib.crc32(b"\0\0\0\0", crc)
    return zlib.crc32(view[CRC_OFFSET + 4 : table_end], crc)


def _section(
    view: memoryview,
    entry: tuple[int, ...],
    n: int,
    tokens: int,
    arrays: dict[int, npt.NDArray[Any]],
    strings: dict[int, memoryview],
    skipped: list[int],
) -> None:
    section, code, axis, flags, _, inner0, inner1, offset, nbytes = entry
    if offset + nbytes > len(view):
        raise RecordError(f"section {section} ends at {offset + nbytes}, behind the record's end at {len(view)}")
    form = _FORMS.get(section)
    if form is None:
        if section in USER_SECTIONS and axis == _BYTES:
            strings[section] = view[offset : offset + nbytes]
        elif flags & NEEDED:
            raise RecordError(f"section {section} is of a newer schema and must be understood; update this reader")
        else:
            skipped.append(section)
        return
    dtype = DTYPES.get(code)
    if axis != form[0] or dtype not in form[1]:
        raise RecordError(f"section {Section(section).name} has axis {axis} and dtype {code}: not as version 1 says")
    if axis in (_BYTES, _ROW_BYTES):
        strings[section] = raw = view[offset : offset + nbytes]
        if axis == _ROW_BYTES:
            _check_ends(section, raw, n)
        return
    first, itemsize, inner = n if axis == _ROWS else tokens, dtype.itemsize, form[2]
    if first * inner0 * inner1 * itemsize != nbytes or offset % itemsize:
        raise RecordError(
            f"section {Section(section).name}: [{first}, {inner0}, {inner1}] {dtype} is not {nbytes} bytes"
        )
    array = np.frombuffer(view, dtype, nbytes // itemsize, offset)
    arrays[section] = array.reshape(first, *(inner0, inner1)[:inner]) if inner else array


def _check_ends(section: int, raw: memoryview, n: int) -> None:
    good = len(raw) >= 8 * n
    if good:
        ends = np.frombuffer(raw, "<i8", n)
        good = bool(ends[0] >= 0 and (np.diff(ends) >= 0).all() and ends[-1] == len(raw) - 8 * n)
    if not good:
        raise RecordError(f"section {Section(section).name}: the ends of its {n} byte strings are wrong")


def _members(
    arrays: dict[int, npt.NDArray[Any]], n: int, group_size: int, tokens: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    for section in (_LENGTHS, _MEMBERS, _TOKENS):
        if section not in arrays:
            raise RecordError(f"the record lacks the section {Section(section).name}")
    members, lengths = arrays.pop(_MEMBERS), arrays.pop(_LENGTHS)
    listed, sizes = members.tolist(), lengths.tolist()
    if n < 1 or len(set(listed)) != n or min(listed) < 0 or max(listed) >= group_size:
        raise RecordError(f"members {listed} are not distinct numbers below the group size {group_size}")
    if min(sizes) < 0 or sum(sizes) != tokens:
        raise RecordError(f"lengths {sizes} do not add up to {tokens} tokens")
    return members, lengths, np.array([0, *itertools.accumulate(sizes)], np.int64)
