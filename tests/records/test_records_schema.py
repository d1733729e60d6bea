"""Record schema v1: exact round trips, every damaged byte found, version 2 read by version 1."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_helpers import resealed, same, trajectory
from transport_records import draft_of, written

from asyncrl.errors import RecordError
from asyncrl.records.layout import CODES, CRC_OFFSET, ENTRY, HEADER, Section
from asyncrl.records.read import read
from asyncrl.records.trajectories import group_metadata, trajectories_of
from asyncrl.records.write import Draft, plan


@pytest.mark.parametrize("lengths", [(5,), (1, 0, 70), (3, 2, 1, 129)])
def test_trajectories_come_back_equal(lengths: tuple[int, ...]) -> None:
    given = [trajectory(i, n) for i, n in enumerate(lengths)]
    draft = draft_of(given, epoch=-5, policy_version=2**30, producer=b"p" * 16, group_metadata={"prompt": "q"})
    raw = written(plan(draft), sequence=2**63 + 1)
    record = read(raw, sequence=2**63 + 1)
    assert (record.epoch, record.policy_version, record.producer) == (-5, 2**30, b"p" * 16)
    assert (record.epoch, record.group, record.members.tolist()) == (-5, 7, list(range(len(lengths))))
    assert group_metadata(record) == {"prompt": "q"}
    for a, b in zip(given, trajectories_of(record), strict=True):
        same(a, b)


def test_every_column_is_a_view_of_the_record() -> None:
    given = [trajectory(i, n) for i, n in enumerate((5, 70))]
    raw = written(plan(draft_of(given)))
    record = read(raw)
    whole = np.frombuffer(raw, np.uint8)
    for t in trajectories_of(record):
        for column in (t.tokens, t.mask, t.logprobs, t.sampled_logprobs, t.versions):
            assert np.shares_memory(column, whole) and not column.flags.writeable


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_a_mask_of_integers_is_written_as_what_it_means(kind: Any) -> None:
    mask = np.array([0, 1, 1], kind)
    record = read(written(plan(Draft(1, [0], 1, {Section.TOKENS: [[5, 6, 7]], Section.MASK: [mask]}))))
    assert trajectories_of(record)[0].mask.tolist() == [False, True, True]


def test_any_byte_but_0_of_a_foreign_mask_is_true() -> None:
    raw = bytearray(written(plan(Draft(1, [0], 1, {Section.TOKENS: [[5, 6, 7]], Section.MASK: [[0, 1, 1]]}))))
    (at,) = [i for i in range(HEADER.size, len(raw), ENTRY.size) if ENTRY.unpack_from(raw, i)[0] == Section.MASK][:1]
    entry = list(ENTRY.unpack_from(raw, at))
    entry[1] = CODES[np.dtype("<u1")]
    ENTRY.pack_into(raw, at, *entry)
    raw[entry[7] : entry[7] + 3] = b"\0\xff\2"
    resealed(raw)
    mask = trajectories_of(read(raw))[0].mask
    assert mask.dtype == bool and mask.tolist() == [False, True, True]


def test_sections_are_aligned_views_and_the_plan_gives_the_exact_size() -> None:
    routed = [np.arange(n * 6, dtype=np.uint8).reshape(n, 3, 2) for n in (4, 9)]
    advantages = [np.full(n, 0.5) for n in (4, 9)]
    extra = {Section.ROUTED_EXPERTS: routed, Section.ADVANTAGES: advantages}
    planned = plan(draft_of([trajectory(0, 4), trajectory(3, 9)], extra=extra))
    raw = written(planned)
    assert len(raw) == planned.size and planned.size % 64 == 0
    record = read(raw)
    base = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    for array in record.arrays.values():
        assert (array.__array_interface__["data"][0] - base) % 64 == 0
        assert not array.flags.writeable
    np.testing.assert_array_equal(record.column(Section.ROUTED_EXPERTS, 1), routed[1])
    assert record.arrays[Section.ROUTED_EXPERTS].dtype == np.uint8
    assert record.arrays[Section.ADVANTAGES].dtype == np.float32


def test_members_of_bare_records_share_nothing() -> None:
    first, second = trajectories_of(read(written(plan(Draft(1, [0, 1], 2, {Section.TOKENS: [[5], [6, 7]]})))))
    assert first.metadata == second.metadata == first.components == {} and first.completion == ""
    assert len({id(one) for one in (first.metadata, second.metadata, first.components, second.components)}) == 4
    assert np.isnan(first.logprobs).all() and np.isnan(second.logprobs).all()  # not known, and not probability 1
    draft = Draft(1, [0, 1], 2, {Section.TOKENS: [[5], [6]], Section.FINISH_REASONS: [1, 9]})
    with pytest.raises(RecordError, match="finish reason 9 is unknown"):
        trajectories_of(read(written(plan(draft))))


def test_a_bare_record_of_a_foreign_producer_gets_the_documented_defaults() -> None:
    draft = Draft(1, [0], 2, {Section.TOKENS: [[5, 6, 7]], Section.PROMPT_LENGTHS: [1]}, policy_version=4)
    (t,) = trajectories_of(read(written(plan(draft))))
    assert t.tokens.tolist() == [5, 6, 7] and t.tokens.dtype == np.int32
    assert t.mask.tolist() == [False, True, True] and t.versions.tolist() == [-1, 4, 4]
    assert t.versions.dtype == np.int32 and t.reward is None and t.temperature == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"members": []}, "at least one member"),
        ({"members": [0, 0]}, "distinct"),
        ({"members": [0, 2]}, r"0\.\.1"),
        ({"sections": {}}, "needs the section TOKENS"),
        ({"sections": {Section.TOKENS: [[1]]}}, "TOKENS has 1 arrays"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.MASK: [[1], [1, 0]]}}, "MASK: expected one array per"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.MASK: [[1], [-100]]}}, "-100..-100 do not fit into bool"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.MASK: [[1], [0.5]]}}, "MASK: bool expected, found float64"),
        ({"sections": {Section.TOKENS: [[1], [2**31]]}}, "do not fit into int32"),
        ({"sections": {Section.TOKENS: [[1], [0.5]]}}, "int32 expected, found float64"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.REWARDS: [1.0]}}, "REWARDS: shape"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.LENGTHS: [1, 1]}}, "do not give it"),
        ({"sections": {Section.TOKENS: [[1], [2]], 99: b""}}, "99 is not in the schema"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.ROUTED_EXPERTS: [[1], [2]]}}, "2 inner dimensions"),
        ({"sections": {Section.TOKENS: [[1], [2]], Section.MESSAGES: [b""]}}, "2 byte strings"),
        ({"policy_version": 2**31}, "policy version"),
        ({"producer": b"x"}, "16 bytes"),
    ],
)
def test_what_cannot_be_written_whole_is_refused(change: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"group": 1, "members": [0, 1], "group_size": 2}
    fields |= {"sections": {Section.TOKENS: [[1], [2]]}} | change
    with pytest.raises(RecordError, match=words):
        plan(Draft(**fields))


def test_what_is_not_json_or_not_finite_is_refused() -> None:
    for change, words in (
        ({"metadata": {"x": object()}}, "metadata.*must be JSON"),
        ({"reward": float("nan")}, "finite"),
    ):
        with pytest.raises(RecordError, match=words):
            draft_of([trajectory(0, 2), trajectory(1, 2, **change)])


@pytest.mark.parametrize(
    ("section", "data", "words"),
    [
        (Section.METADATA, [b"{", b"{}"], "METADATA is not valid JSON"),
        (Section.METADATA, [b"{}", b""], "METADATA is not valid JSON"),
        (Section.METADATA, [b"[]", b"{}"], r"METADATA: expected JSON of type dict, found b'\[\]'"),
        (Section.MESSAGES, [b"7", b'""'], "MESSAGES: expected JSON of type str or list, found b'7'"),
        (Section.COMPONENT_NAMES, b"\xff", "COMPONENT_NAMES is not valid JSON"),
        (Section.COMPONENT_NAMES, b'{"names": ["a"]}', "does not name the 1 components of 2 members: KeyError"),
        (Section.COMPONENT_NAMES, b'{"names": ["a", "b"], "held": [[], []]}', "does not name the 1 components"),
        (Section.COMPONENT_NAMES, b'{"names": ["a"], "held": [["b"], []]}', "does not name the 1 components"),
        (Section.COMPONENT_NAMES, b'{"names": ["a"], "held": 3}', "does not name the 1 components"),
        (Section.GROUP_METADATA, b"null", "GROUP_METADATA: expected JSON of type dict"),
    ],
)
def test_a_foreign_writers_texts_are_refused_by_name(section: Section, data: Any, words: str) -> None:
    sections = {Section.TOKENS: [[5], [6, 7]], Section.COMPONENTS: [[0.5], [1.0]], section: data}
    record = read(written(plan(Draft(1, [0, 1], 2, sections))))
    with pytest.raises(RecordError, match=words):
        trajectories_of(record)
        group_metadata(record)


def test_every_damaged_byte_of_header_and_table_is_found() -> None:
    planned = plan(draft_of([trajectory(0, 3), trajectory(1, 2)]))
    raw = written(planned)
    for index in range(HEADER.size + ENTRY.size * len(planned.parts)):
        torn = bytearray(raw)
        torn[index] ^= 0x10
        with pytest.raises(RecordError):
            read(torn)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_garbage_is_a_record_error_and_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(written(plan(draft_of([trajectory(0, 3), trajectory(1, 2)]))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    if len(raw) >= HEADER.size and data.draw(st.booleans()):  # an honest checksum over dishonest fields
        resealed(raw)
    try:
        record = read(raw)
    except RecordError:
        return
    assert record.bounds[-1] == len(record.arrays[Section.TOKENS])


def with_entry(raw: bytearray, section: int, **fields: int) -> int:
    """Change fields of a section's entry; its offset."""
    names = ["section", "code", "axis", "flags", "zero", "inner0", "inner1", "offset", "bytes"]
    for at in range(HEADER.size, HEADER.size + ENTRY.size * int.from_bytes(raw[12:16], "little"), ENTRY.size):
        entry = dict(zip(names, ENTRY.unpack_from(raw, at), strict=True))
        if entry["section"] == section:
            ENTRY.pack_into(raw, at, *(entry | fields).values())
            return entry["offset"]
    raise AssertionError(section)


def bare(tokens: int = 2, **sections: Any) -> bytearray:
    given = {Section.TOKENS: [np.arange(tokens, dtype=np.int32)], Section.METADATA: [b"{}"]}
    return bytearray(written(plan(Draft(1, [0], 1, given | {Section[name]: data for name, data in sections.items()}))))


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        (Section.TOKENS, {"inner0": 0, "bytes": 0}, r"TOKENS: \[2, 0, 1\] int32 is not 0 bytes"),
        (Section.TOKENS, {"inner0": 2, "bytes": 16}, r"TOKENS: \[2, 2, 1\]"),
        (Section.COMPONENTS, {"inner1": 0, "bytes": 0}, r"COMPONENTS: \[1, 1, 0\]"),
        (Section.COMPONENTS, {"inner0": 2**32 - 1}, "COMPONENTS: "),
    ],
)
def test_dimensions_that_the_section_has_not_are_refused(section: Section, fields: dict[str, int], words: str) -> None:
    raw = bare(COMPONENTS=[[0.5]])
    with_entry(raw, section, **fields)
    with pytest.raises(RecordError, match=words):
        read(resealed(raw))


def test_dishonest_headers_are_record_errors() -> None:
    nobody = bare()
    nobody[36:40] = bytes(4)
    for section in (Section.MEMBERS, Section.LENGTHS):
        with_entry(nobody, section, bytes=0)
    with pytest.raises(RecordError, match="without members"):
        read(resealed(nobody))
    huge = bare(0, ROUTED_EXPERTS=[np.zeros((0, 1, 1), np.uint16)])
    with_entry(huge, Section.ROUTED_EXPERTS, inner0=2**31, inner1=2**31)
    with pytest.raises(RecordError, match="ROUTED_EXPERTS"):
        read(resealed(huge))
    ends = bytearray(written(plan(Draft(1, range(4), 4, {Section.TOKENS: [[1]] * 4, Section.METADATA: [b"{}"] * 4}))))
    struct.pack_into("<4q", ends, with_entry(ends, Section.METADATA), 1, -(2**63), -1, 8)
    with pytest.raises(RecordError, match="METADATA: the ends"):
        read(ends)


def test_what_was_checked_is_what_is_used() -> None:
    """Shared memory is somebody else's too: what he writes there later changes no length and no member."""
    raw = bare()
    record = read(raw)
    for section in (Section.LENGTHS, Section.MEMBERS):
        struct.pack_into("<i", raw, with_entry(raw, section), 2**28)
    (only,) = trajectories_of(record)
    assert (record.members.tolist(), record.lengths.tolist(), record.bounds) == ([0], [2], (0, 2))
    assert (only.member, only.tokens.size, only.mask.size, only.logprobs.size) == (0, 2, 2, 2)
    assert not record.members.flags.writeable and not record.lengths.flags.writeable


def forge(version: int, oldest: int, section: int, flags: int) -> bytes:
    """What a later version might write: a longer header, longer entries, a new section of a new kind."""
    raw = written(plan(draft_of([trajectory(0, 3)])))
    fields = list(HEADER.unpack_from(raw))
    count, body = fields[5], 4096
    fields[1:6] = [version, oldest, 192, 48, count + 1]
    fields[6], fields[7] = body + len(raw) + 64, 0
    table = b""
    for index in range(count):
        entry = list(ENTRY.unpack_from(raw, HEADER.size + index * ENTRY.size))
        entry[7] += body
        table += ENTRY.pack(*entry) + b"n" * 16
    table += ENTRY.pack(section, 77, 9, flags, 0, 1, 1, body + len(raw), 64) + b"n" * 16
    head = bytearray(HEADER.pack(*fields) + b"N" * 64 + table)
    struct.pack_into("<I", head, CRC_OFFSET, zlib.crc32(head))
    return bytes(head).ljust(body, b"\0") + raw + bytes(64)


def test_version_1_reads_version_2() -> None:
    record = read(forge(2, 1, 900, 0))
    assert 900 not in {**record.arrays, **record.strings}
    same(trajectories_of(record)[0], trajectory(0, 3))


def test_version_1_says_why_it_cannot_read_a_record() -> None:
    with pytest.raises(RecordError, match="readers from 2 on"):
        read(forge(2, 2, 900, 0))
    with pytest.raises(RecordError, match="900 is of a newer schema"):
        read(forge(2, 1, 900, 1))


def test_the_wrong_sequence_is_a_stale_block() -> None:
    with pytest.raises(RecordError, match="sequence 5 expected here, found 4"):
        read(written(plan(draft_of([trajectory(0, 3)])), sequence=4), sequence=5)
