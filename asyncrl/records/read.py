"""Reading a record in place: the header and the table are checked, the sections are views of the buffer."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RecordError
from .layout import CRC_OFFSET, DTYPES, ENTRY, HEADER, MAGIC, NEEDED, SPECS, VERSION, Axis, Section

_NO_CRC = bytes(4)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """`n` members of one group, as views of the buffer that was read. The views are valid until the buffer's lease ends.

    Arrays of token sections are jagged: member `i` (by position) has `bounds[i] : bounds[i + 1]` of the first dimension.
    """

    group: int
    epoch: int
    group_size: int
    policy_version: int  # -1: the producer did not know
    producer: bytes  # a UUID
    sequence: int  # running number in the ring, from 1; 0: not in a ring
    written_ns: int  # time of writing, since 1970
    members: npt.NDArray[np.int32]  # [n]
    lengths: npt.NDArray[np.int32]  # [n]
    bounds: tuple[int, ...]  # [n + 1]
    arrays: Mapping[int, npt.NDArray[Any]]  # ROWS [n, ...], TOKENS [T, ...]; T: tokens of all members
    strings: Mapping[int, memoryview]  # BYTES and ROW_BYTES, raw

    @property
    def size(self) -> int:
        """Members in this record, n."""
        return len(self.members)

    def column(self, section: int, position: int) -> npt.NDArray[Any] | None:
        """One member's part of a TOKENS section, a view. None if the record lacks the section."""
        array = self.arrays.get(section)
        return None if array is None else array[self.bounds[position] : self.bounds[position + 1]]

    def row_bytes(self, section: int, position: int) -> bytes | None:
        """One member's byte string of a ROW_BYTES section, copied. None if the record lacks the section."""
        raw = self.strings.get(section)
        if raw is None:
            return None
        ends = np.frombuffer(raw, "<i8", self.size)
        base = 8 * self.size
        start = int(ends[position - 1]) if position else 0
        return bytes(raw[base + start : base + int(ends[position])])


def read(buffer: memoryview | bytes | bytearray, *, sequence: int | None = None) -> Record:
    """The record at the start of `buffer`.

    `sequence`: the sequence number that the ring expects; None: any.
    Errors: RecordError for a torn or damaged header or table, another `sequence`, or a record for newer readers only.
    """
    view = memoryview(buffer).toreadonly()
    if len(view) < HEADER.size:
        raise RecordError(f"a record has at least {HEADER.size} bytes, found {len(view)}")
    (
        magic, version, oldest, header_bytes, entry_bytes, sections, record_bytes, crc, _, _,
        n, group_size, _, found_sequence, epoch, group, policy_version, tokens, producer, written_ns,
    ) = HEADER.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise RecordError(f"no record begins here: magic {magic:#010x}, expected {MAGIC:#010x}")
    if oldest > VERSION:
        raise RecordError(f"written by schema version {version} for readers from {oldest} on; this reader: {VERSION}")
    table_end = header_bytes + entry_bytes * sections
    if header_bytes < HEADER.size or entry_bytes < ENTRY.size or not table_end <= record_bytes <= len(view):
        raise RecordError(
            f"sizes do not agree: header {header_bytes}, {sections} entries of {entry_bytes}, record {record_bytes}, "
            f"{len(view)} bytes here"
        )
    head = bytearray(view[:table_end])
    head[CRC_OFFSET : CRC_OFFSET + 4] = _NO_CRC
    if zlib.crc32(head) != crc:
        raise RecordError("the CRC32 of header and section table is wrong: torn or damaged")
    if n < 1:
        raise RecordError("a record without members")
    if sequence is not None and found_sequence != sequence:
        raise RecordError(f"sequence {sequence} expected here, found {found_sequence}")
    if entry_bytes == ENTRY.size:
        entries = ENTRY.iter_unpack(memoryview(head)[header_bytes:])
    else:  # of a newer writer
        entries = (ENTRY.unpack_from(head, at) for at in range(header_bytes, table_end, entry_bytes))
    arrays, strings = _sections(view[:record_bytes], entries, n, tokens)
    members, lengths, bounds = _members(arrays, n, group_size, tokens)
    return Record(
        group, epoch, group_size, policy_version, producer, found_sequence, written_ns, members, lengths, bounds, arrays, strings
    )  # fmt: skip


def _sections(
    view: memoryview, entries: Iterable[tuple[int, ...]], n: int, tokens: int
) -> tuple[dict[int, npt.NDArray[Any]], dict[int, memoryview]]:
    """(arrays, byte strings) by section id, without the sections that version 1 does not know."""
    arrays: dict[int, npt.NDArray[Any]] = {}
    strings: dict[int, memoryview] = {}
    end = len(view)
    for section, code, axis, flags, _, inner0, inner1, offset, nbytes in entries:
        if offset + nbytes > end:
            raise RecordError(f"section {section} ends at {offset + nbytes}, after the record's end at {end}")
        spec, dtype = SPECS.get(section), DTYPES.get(code)
        if spec is None:
            if flags & NEEDED:
                raise RecordError(f"section {section} is of a newer schema and must be understood; update this reader")
            continue
        inner = spec.inner
        if dtype is None or dtype not in spec.dtypes or axis != spec.axis:
            raise RecordError(
                f"section {Section(section).name} has axis {axis} and dtype {code}, which version 1 does not allow for this section"
            )
        if axis in (Axis.BYTES, Axis.ROW_BYTES):
            strings[section] = raw = view[offset : offset + nbytes]
            if axis == Axis.ROW_BYTES:
                _check_ends(section, raw, n)
            continue
        first, itemsize = n if axis == Axis.ROWS else tokens, dtype.itemsize
        # A dimension that the section does not have must be 1.
        unused_are_one = (inner > 0 or inner0 == 1) and (inner > 1 or inner1 == 1)
        if first * inner0 * inner1 * itemsize != nbytes or offset % itemsize or not unused_are_one:
            raise RecordError(
                f"section {Section(section).name}: [{first}, {inner0}, {inner1}] {dtype} is not {nbytes} bytes"
            )
        array = np.frombuffer(view, dtype, nbytes // itemsize, offset)
        try:
            arrays[section] = array.reshape(first, *(inner0, inner1)[:inner]) if inner else array
        except ValueError as error:  # 0 rows whose inner dimensions are too large
            raise RecordError(f"section {Section(section).name}: {error}") from None
    return arrays, strings


def _check_ends(section: int, raw: memoryview, n: int) -> None:
    good = len(raw) >= 8 * n
    if good:
        ends = np.frombuffer(raw, "<i8", n)
        good = bool(ends[0] >= 0 and (ends[1:] >= ends[:-1]).all() and ends[-1] == len(raw) - 8 * n)
    if not good:
        raise RecordError(f"section {Section(section).name}: the ends of its {n} byte strings are wrong")


def _members(
    arrays: dict[int, npt.NDArray[Any]], n: int, group_size: int, tokens: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], tuple[int, ...]]:
    for section in (Section.MEMBERS, Section.LENGTHS, Section.TOKENS):
        if section not in arrays:
            raise RecordError(f"the record lacks the section {Section(section).name}")
    # Copied before the checks, because another process may write to the buffer after the checks.
    members, lengths = arrays.pop(Section.MEMBERS).copy(), arrays.pop(Section.LENGTHS).copy()
    members.flags.writeable = lengths.flags.writeable = False
    listed, sizes = members.tolist(), lengths.tolist()
    if len(set(listed)) != n or min(listed) < 0 or max(listed) >= group_size:
        raise RecordError(f"members {listed} are not distinct numbers below the group size {group_size}")
    if min(sizes) < 0 or sum(sizes) != tokens:
        raise RecordError(f"lengths {sizes} do not add up to {tokens} tokens")
    return members, lengths, (0, *itertools.accumulate(sizes))
