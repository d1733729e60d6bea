"""The header of a segment: what it says of its geometry, under a CRC32 that everybody who opens the segment compares."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from ...errors import SegmentDamaged, TransportError

MAGIC = int.from_bytes(b"asyncrl\0", "little")
VERSION = 1
HEADER_BYTES = 4096
_STATIC = struct.Struct("<QIIQQQQ16sQ")  # magic, version, header bytes, total, blocks, table, data, run, created ns
_CRC_AT = 96


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the header says about a segment; checked by CRC32 whenever somebody opens it."""

    total: int  # bytes
    blocks: int  # entries of the block table
    table: int  # byte offsets
    data: int
    run: bytes  # 16 random bytes: which life of this name it is
    created_ns: int


def pack(geometry: Geometry) -> bytes:
    """The first bytes of a segment."""
    g = geometry
    static = _STATIC.pack(MAGIC, VERSION, HEADER_BYTES, g.total, g.blocks, g.table, g.data, g.run, g.created_ns)
    static = static.ljust(_CRC_AT, b"\0")
    return static + zlib.crc32(static).to_bytes(4, "little")


def read(fd: int, path: str) -> Geometry:
    """The geometry of an open segment. Errors: SegmentDamaged; TransportError where another version wrote it."""
    raw = os.pread(fd, _CRC_AT + 4, 0)
    size = os.fstat(fd).st_size
    if len(raw) < _CRC_AT + 4:
        raise SegmentDamaged(f"{path} is no segment of asyncrl: it has {size} bytes")
    magic, version, header_bytes, total, blocks, table, data, run, created = _STATIC.unpack_from(raw)
    if magic != MAGIC:
        raise SegmentDamaged(f"{path} is no segment of asyncrl: it begins with {magic:#x}")
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise TransportError(
            f"{path} has layout version {version}, this program reads {VERSION}: use the same asyncrl on both sides"
        )
    if zlib.crc32(raw[:_CRC_AT]) != int.from_bytes(raw[_CRC_AT:], "little"):
        raise SegmentDamaged(f"{path}: the CRC32 of its header is wrong")
    if size != total or not HEADER_BYTES <= table <= data <= total or table + blocks * 32 > data:
        raise SegmentDamaged(f"{path}: geometry {total} bytes, table {table}, data {data} does not fit {size} bytes")
    return Geometry(total, blocks, table, data, run, created)
