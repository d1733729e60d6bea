"""Writes a record: a `Draft` has the contents, `plan` checks the draft and computes the size, `Plan.write` fills a buffer.

`Plan.write` copies each array of a member directly into the buffer. `plan` copies only arrays whose dtype must be converted.
`plan` does all checks, before the first byte is written.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RecordError
from .layout import (
    CODES,
    CRC_OFFSET,
    ENTRY,
    HEADER,
    MAGIC,
    NEEDED,
    SPECS,
    VERSION,
    Axis,
    Section,
    Spec,
    aligned,
)

_NO_INNER = (1, 1)


@dataclass(slots=True, eq=False)
class Draft:
    """The contents of a record: n members, with L_i tokens of member i. Do not change a draft after `plan`.

    `sections`: id -> contents. The axis in `layout.SPECS` decides the form of the contents: n arrays [L_i, ...] for TOKENS, an
    array [n, ...] for ROWS, n byte strings for ROW_BYTES, a byte string for BYTES. `plan` adds LENGTHS and MEMBERS.
    Not frozen: the slower constructor of a frozen dataclass would take half of the time that `plan` takes.
    """

    group: int
    members: Sequence[int]
    group_size: int
    sections: Mapping[int, Any]
    epoch: int = 0
    policy_version: int = -1
    producer: bytes = bytes(16)


# One section: id, form, dtype, contents (bytes or a list of arrays), inner dimensions, size in bytes.
_Part = tuple[int, Spec, np.dtype[Any], Any, tuple[int, int], int]


@dataclass(slots=True, eq=False)
class Plan:
    """A checked draft with its encoded sections. `size`: bytes of the record, a multiple of 64. `tokens`: sum over members."""

    draft: Draft
    tokens: int
    parts: list[_Part]
    size: int

    def record(self) -> bytearray:
        """The record in a new bytearray."""
        record = bytearray(self.size)
        self.write(memoryview(record))
        return record

    def write(self, buffer: memoryview, *, sequence: int = 0, fault: Callable[[str], None] | None = None) -> None:
        """Fill `buffer` (writable, at least `size` bytes, aligned to 64 bytes). The header is written last.

        `fault(name)` is called after each part is written, so that tests can crash there.
        """
        table = bytearray()
        offset = _first_offset(len(self.parts))
        for section, spec, dtype, data, inner, size in self.parts:
            if type(data) is bytes:
                buffer[offset : offset + size] = data
            elif size:
                flat = np.frombuffer(buffer, dtype, size // dtype.itemsize, offset)
                out = flat.reshape(-1, *inner[: spec.inner]) if spec.inner else flat
                np.concatenate(data, out=out, casting="equiv")  # raises if a dtype or shape changed after `plan`
            table += ENTRY.pack(section, CODES[dtype], spec.axis, NEEDED * spec.needed, 0, *inner, offset, size)
            offset += aligned(size)
            if fault is not None:
                fault("section")
        draft = self.draft
        start = HEADER.size + len(table)
        header = bytearray(
            HEADER.pack(
                MAGIC, VERSION, 1, HEADER.size, ENTRY.size, len(self.parts), self.size, 0, 0, 0,
                len(draft.members), draft.group_size, 0, sequence, draft.epoch,
                draft.group, draft.policy_version, self.tokens, draft.producer, time.time_ns(),
            )
        )  # fmt: skip
        header[CRC_OFFSET : CRC_OFFSET + 4] = zlib.crc32(table, zlib.crc32(header)).to_bytes(4, "little")
        buffer[HEADER.size : start] = table
        if fault is not None:
            fault("table")
        buffer[: HEADER.size] = header
        if fault is not None:
            fault("header")


def plan(draft: Draft) -> Plan:
    """Check a draft, and convert each section to the arrays or bytes that `Plan.write` copies. Errors: RecordError."""
    members, sections = list(draft.members), draft.sections
    n = len(members)
    _check_members(draft, members)
    if Section.TOKENS not in sections:
        raise RecordError(f"group {draft.group}: a record needs the section TOKENS; add it")
    lengths = list(map(len, sections[Section.TOKENS]))
    if len(lengths) != n:
        raise RecordError(
            f"group {draft.group}: {n} members, but TOKENS has {len(lengths)} arrays; give one array per member"
        )
    total = sum(lengths)
    counts = ((Section.LENGTHS, lengths), (Section.MEMBERS, members))
    parts = [_rows(section, SPECS[section], numbers, n) for section, numbers in counts]
    for section, data in sections.items():
        if section not in SPECS:
            raise RecordError(f"section {section} is not in the schema; see asyncrl.records.layout.Section")
        if section in (Section.LENGTHS, Section.MEMBERS):
            raise RecordError(f"section {Section(section).name} is made from the members; do not give it")
        spec, axis = SPECS[section], SPECS[section].axis
        if axis is Axis.TOKENS:
            parts.append(_jagged(section, spec, data, lengths, total))
        elif axis is Axis.ROWS:
            parts.append(_rows(section, spec, data, n))
        elif axis is Axis.ROW_BYTES:
            parts.append(_row_bytes(section, spec, data, n))
        else:
            raw = bytes(data)
            parts.append((section, spec, spec.dtypes[0], raw, _NO_INNER, len(raw)))
    return Plan(draft, total, parts, _first_offset(len(parts)) + sum(aligned(size) for *_, size in parts))


def _check_members(draft: Draft, members: list[int]) -> None:
    n = len(members)
    if n < 1:
        raise RecordError(f"group {draft.group}: no members; a record needs at least one member")
    if len(set(members)) != n or min(members) < 0 or max(members) >= draft.group_size:
        raise RecordError(
            f"group {draft.group}: members must be distinct and in 0..{draft.group_size - 1}, found {members}"
        )
    if not -1 <= draft.policy_version < 2**31:
        raise RecordError(f"policy version must be -1 (unknown) or 0 to 2^31 - 1, found {draft.policy_version}")
    if len(draft.producer) != 16:
        raise RecordError(f"the producer's identity must have 16 bytes, found {len(draft.producer)}")


def _jagged(section: int, spec: Spec, data: Sequence[Any], lengths: list[int], total: int) -> _Part:
    dtype = spec.dtypes[0]
    if [len(a) for a in data] != lengths:
        raise RecordError(
            f"section {Section(section).name}: expected one array per member, with the lengths of TOKENS {lengths}; "
            f"found {[len(a) for a in data]}"
        )
    dtypes = {getattr(array, "dtype", None) for array in data} if spec.inner else set()
    # ROUTED_EXPERTS may keep a narrower dtype than `dtypes[0]`.
    if dtypes and dtypes <= set(spec.dtypes):
        dtype = np.result_type(*dtypes)
    arrays = [conform(a, dtype, section) for a in data]
    inner = _inner(section, spec, arrays)
    return section, spec, dtype, arrays, inner, total * inner[0] * inner[1] * dtype.itemsize


def _rows(section: int, spec: Spec, data: Any, n: int) -> _Part:
    array = conform(data, spec.dtypes[0], section)
    if array.ndim != 1 + spec.inner or array.shape[0] != n:
        raise RecordError(
            f"section {Section(section).name}: shape [{n}{', m' * spec.inner}] expected, found {array.shape}"
        )
    inner = _inner(section, spec, [array])
    return section, spec, array.dtype, [array], inner, array.nbytes


def _row_bytes(section: int, spec: Spec, data: Sequence[bytes], n: int) -> _Part:
    if len(data) != n:
        raise RecordError(f"section {Section(section).name}: {n} byte strings expected, found {len(data)}")
    ends = np.cumsum([len(b) for b in data], dtype="<i8")
    encoded = ends.tobytes() + b"".join(data)
    return section, spec, spec.dtypes[0], encoded, _NO_INNER, len(encoded)


def _inner(section: int, spec: Spec, arrays: list[Any]) -> tuple[int, int]:
    shape = arrays[0].shape[1:]
    if len(shape) != spec.inner or (len(arrays) > 1 and any(a.shape[1:] != shape for a in arrays)):
        shapes = sorted({a.shape[1:] for a in arrays})
        raise RecordError(
            f"section {Section(section).name}: {spec.inner} inner dimensions expected, equal for all members; found {shapes}"
        )
    padded = (*shape, 1, 1)
    return padded[0], padded[1]


def conform(data: Any, dtype: np.dtype[Any], section: int) -> np.ndarray[Any, Any]:
    """`data` as an array of `dtype`. Errors: RecordError for non-numbers, floats for an integer dtype, integers out of range."""
    array = np.asarray(data)
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf" or (dtype.kind in "iub" and array.dtype.kind == "f" and array.size):
        raise RecordError(f"section {Section(section).name}: {dtype} expected, found {array.dtype}")
    if dtype.kind in "iub" and array.size and array.dtype.kind != "b":
        lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        low, high = int(array.min()), int(array.max())
        if low < lowest or high > highest:
            raise RecordError(f"section {Section(section).name}: values {low}..{high} do not fit into {dtype}")
    return array.astype(dtype)


def _first_offset(parts: int) -> int:
    """The offset of the first section."""
    return aligned(HEADER.size + ENTRY.size * parts)
