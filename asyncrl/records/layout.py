"""The bytes of record schema v1: a header, a section table and sections. All numbers are little-endian.

A record holds `n >= 1` members (trajectories) of one group. Most producers put a whole group into one record.

    0                 header, `header_bytes` long (128 in version 1)
    header_bytes      section table: `sections` entries of `entry_bytes` (32 in version 1)
    aligned to 64     the sections, each aligned to 64 bytes from the start of the record

    header                                              section table entry
    0   u32  magic "ARR1"                               0   u16  section id
    4   u16  version of the writer                      2   u8   dtype code
    6   u16  oldest reader version that can read it     3   u8   axis: unit of the first dimension
    8   u16  header_bytes                               4   u16  flags (bit 0: a reader must know this section)
    10  u16  entry_bytes                                6   u16  zero
    12  u32  sections                                   8   u32  first inner dimension, or 1
    16  u64  record_bytes, the size of the record       12  u32  second inner dimension, or 1
    24  u32  CRC32 of header and table, with 0 here     16  u64  offset from the start of the record
    28  8 B  zero                                       24  u64  bytes
    36  u32  members in this record, n
    40  u32  group size
    44  u32  zero
    48  u64  sequence: running number of the record in its ring, from 1 (0: not in a ring)
    56  i64  epoch: a number for each start of the producer. Group ids are unique within an epoch
    64  i64  group id
    72  i64  policy version that the producer knew when it put the record (-1: unknown)
    80  u64  tokens, the sum of the lengths
    88  16 B identity of the producer (a UUID)
    104 u64  time of writing, in ns since 1970
    112 16 B zero

A reader of version 1 can read records of a newer writer. The newer writer may lengthen the header and the entries, because the
header has their sizes. The newer writer may also use the zero bytes and add sections. A reader skips a section that it does not
know. It refuses the record if bit 0 of such a section's flags is set, or if "oldest reader version" is above the reader's version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np

MAGIC = 0x31525241  # "ARR1" in memory
VERSION = 1
ALIGNMENT = 64
HEADER = struct.Struct("<IHHHHIQIIIIIIQqqqQ16sQ16x")
ENTRY = struct.Struct("<HBBHHIIQQ")
CRC_OFFSET = 24
NEEDED = 1  # bit 0 of a section's flags

if HEADER.size != 128 or ENTRY.size != 32:
    raise AssertionError(f"header of {HEADER.size} and entry of {ENTRY.size} bytes; the format needs 128 and 32")


class Axis(IntEnum):
    """The unit of the first dimension of a section. n: members of the record. T: tokens of all members."""

    ROWS = 1  # one entry per member: [n, ...]
    TOKENS = 2  # the tokens of all members, concatenated: [T, ...]
    ROW_BYTES = 3  # n byte strings: i64 ends[n], then the bytes
    BYTES = 4  # one byte string


class Section(IntEnum):
    """The section ids of version 1; `SPECS` has their contents. 0 is never used. 23 to 16,383 are for later versions of the
    schema, 16,384 to 32,767 for experiments, and 32,768 to 65,535 for users. Runs skip the sections of users."""

    LENGTHS = 1
    MEMBERS = 2
    TOKENS = 3
    MASK = 4
    LOGPROBS = 5
    SAMPLED_LOGPROBS = 6
    VERSIONS = 7
    ADVANTAGES = 8
    REFERENCE_LOGPROBS = 9
    ROUTED_EXPERTS = 10
    REWARDS = 11
    COMPONENTS = 12
    COMPONENT_NAMES = 13
    TEMPERATURES = 14
    PROMPT_LENGTHS = 15
    FINISH_REASONS = 16
    MESSAGES = 17
    METADATA = 18
    GROUP_METADATA = 19
    BRANCHES = 20
    TURNS = 21
    TURN_REWARDS = 22


DTYPES: MappingProxyType[int, np.dtype[Any]] = MappingProxyType(
    {
        1: np.dtype("<u1"),
        2: np.dtype("<i4"),
        3: np.dtype("<f4"),
        4: np.dtype("<f8"),
        5: np.dtype("<i8"),
        6: np.dtype("<u2"),
        7: np.dtype("?"),  # a byte that is 0 or 1
        8: np.dtype("<i1"),
        9: np.dtype("<i2"),
    }
)
CODES: MappingProxyType[np.dtype[Any], int] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})


@dataclass(frozen=True, slots=True)
class Spec:
    """The form of a known section. A writer uses `dtypes[0]`, or for ROUTED_EXPERTS any of `dtypes`. A reader accepts all."""

    axis: Axis
    dtypes: tuple[np.dtype[Any], ...]
    inner: int = 0  # number of dimensions after the first
    needed: bool = False  # readers that do not know the section refuse the record


def _spec(axis: Axis, *dtypes: str, inner: int = 0, needed: bool = False) -> Spec:
    return Spec(axis, tuple(np.dtype(d) for d in dtypes), inner, needed)


SPECS: MappingProxyType[int, Spec] = MappingProxyType(
    {
        Section.LENGTHS: _spec(Axis.ROWS, "<i4"),  # [n] tokens of each member
        Section.MEMBERS: _spec(Axis.ROWS, "<i4"),  # [n] distinct, 0..group_size-1
        Section.TOKENS: _spec(Axis.TOKENS, "<i4"),
        Section.MASK: _spec(Axis.TOKENS, "?", "<u1"),  # true, or any u1 but 0: the loss trains the token
        Section.LOGPROBS: _spec(Axis.TOKENS, "<f4"),  # of each token, at the temperature, before all filters
        Section.SAMPLED_LOGPROBS: _spec(Axis.TOKENS, "<f4"),  # of each token, as sampled: after filters such as top-p
        Section.VERSIONS: _spec(Axis.TOKENS, "<i4"),  # -1: not known, or mask is 0
        Section.ADVANTAGES: _spec(Axis.TOKENS, "<f4"),
        Section.REFERENCE_LOGPROBS: _spec(Axis.TOKENS, "<f4"),
        # [T, layers, k]; -1 means not known. Old writers used unsigned integers, without -1.
        Section.ROUTED_EXPERTS: _spec(Axis.TOKENS, "<i4", "<i2", "<i1", "<u2", "<u1", inner=2),
        Section.REWARDS: _spec(Axis.ROWS, "<f8"),  # [n] NaN: not scored
        Section.COMPONENTS: _spec(Axis.ROWS, "<f8", inner=1),  # [n, m] NaN: does not apply
        # JSON {"names": [m names], "held": [for each member, the names of its components]}
        Section.COMPONENT_NAMES: _spec(Axis.BYTES, "<u1"),
        Section.TEMPERATURES: _spec(Axis.ROWS, "<f4"),
        Section.PROMPT_LENGTHS: _spec(Axis.ROWS, "<i4"),
        Section.FINISH_REASONS: _spec(Axis.ROWS, "<u1"),  # 1 stop, 2 length, 3 abort
        Section.MESSAGES: _spec(Axis.ROW_BYTES, "<u1"),  # JSON: a string or a list of messages
        Section.METADATA: _spec(Axis.ROW_BYTES, "<u1"),  # JSON object
        Section.GROUP_METADATA: _spec(Axis.BYTES, "<u1"),  # JSON object
        # Of each member an i4 array [m, 2], see types.Trajectory; empty: no branches. A reader that does not know the section would
        # train branches as one text, so it must refuse the record.
        Section.BRANCHES: _spec(Axis.ROW_BYTES, "<u1", needed=True),
        Section.TURNS: _spec(Axis.ROW_BYTES, "<u1"),  # i4 [t]; empty: one reply
        Section.TURN_REWARDS: _spec(Axis.ROW_BYTES, "<u1"),  # f8 [t]; empty: none
    }
)


def aligned(offset: int) -> int:
    """`offset` rounded up to a multiple of 64."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT
